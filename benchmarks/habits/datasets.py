"""What datasets and streams expect, and generators that a job makes."""

import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from benchmarks.habits.plain import Points, mlp, points
from benchmarks.habits.program import habit

BY_RANK = "each rank reads other samples and leaves out the rest: which ones depends on the number of ranks"
OWN = "a generator of the dataset's own gives what follows from the order of reads, which is another on each rank"


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


class EpochAware(Points):
    def __init__(self):
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        return self.x[i] + self.epoch, self.y[i]


@habit("epochs")
def set_epoch():
    """A dataset mixes another epoch's data once `set_epoch` was called."""
    return {"train_data": EpochAware, "epochs": 3}


class Rotated(Sampler):
    def __init__(self, n):
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter([(i + 5 * self.epoch) % self.n for i in range(self.n)])


@habit("epochs", "either", why="shoal keeps the order itself", names=("Rotated",))
def sampler_with_set_epoch():
    """A DataLoader has a sampler with an order of its own, which `set_epoch` changes."""

    def loader():
        data = Points()
        return DataLoader(data, 16, sampler=Rotated(len(data)))

    return {"train_data": loader, "epochs": 2}


@habit("epochs")
def loader_in_order():
    """A DataLoader without shuffling."""

    return {"train_data": lambda: DataLoader(Points(), 16, shuffle=False)}


class Stream(IterableDataset):
    def __iter__(self):
        x, y = points()
        for _ in range(3):
            yield from zip(x, y, strict=True)


@habit("streams", may_refuse=("verify",))
def stream():
    """A stream that every rank reads whole."""
    return {"train_data": Stream}


class Sharded:
    """A stream that gives its n-th part, as Hugging Face's do."""

    def __init__(self, num_shards=1, index=0):
        self.num_shards, self.index = num_shards, index

    def shard(self, num_shards, index):
        return Sharded(num_shards, index)

    def __iter__(self):
        x, y = points()
        for i in range(self.index, 192, self.num_shards):
            yield x[i % 64], y[i % 64]


def by_shards(**pieces):
    """Grain g of a step has the next two samples of part g of eight."""
    from benchmarks.habits.plain import train

    class Dealt(IterableDataset):
        def __iter__(self):
            x, y = points()
            for step in range(12):
                for grain in range(8):
                    for k in range(2):
                        i = (2 * step + k) * 8 + grain
                        if i < 192:
                            yield x[i % 64], y[i % 64]

    return train(**{**pieces, "train_data": Dealt})


@habit("streams", reference=by_shards, may_refuse=("verify",))
def stream_with_shards():
    """A stream with `shard` is opened once for each grain."""
    return {"train_data": Sharded}


class Resumable(IterableDataset):
    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        x, y = points()
        while self.at < 192:
            i, self.at = self.at, self.at + 1
            yield x[i % 64], y[i % 64]


@habit("streams", may_refuse=("verify",))
def stream_with_state():
    """A stream knows its place by `state_dict`."""
    return {"train_data": Resumable}


class SeededShuffle(IterableDataset):
    def __iter__(self):
        x, y = points()
        waiting, generator = [], random.Random(3)
        for i in range(192):
            waiting.append(i % 64)
            if len(waiting) > 20:
                j = waiting.pop(generator.randrange(len(waiting)))
                yield x[j], y[j]


@habit("streams", may_refuse=("verify",))
def stream_shuffled_by_a_buffer():
    """A stream shuffles by a buffer and a generator that each pass seeds."""
    return {"train_data": SeededShuffle}


class ByWorker(IterableDataset):
    def __iter__(self):
        info, (x, y) = get_worker_info(), points()
        for i in range(info.id if info else 0, 192, info.num_workers if info else 1):
            yield x[i % 64], y[i % 64]


@habit("streams", may_refuse=("verify",))
def stream_divided_by_worker():
    """A stream divides itself by data workers, of which there are none here."""
    return {"train_data": ByWorker}


def place():
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class ByRank(IterableDataset):
    def __iter__(self):
        (rank, size), (x, y) = place(), points()
        for i in range(rank, 640, size):
            yield x[i % 64], y[i % 64]


@habit("rank-divided data", "refused", why=BY_RANK, names=("rank",), alone_trains=True)
def stream_divided_by_rank():
    """A stream takes this process's part by RANK and WORLD_SIZE."""
    return {"train_data": ByRank}


@habit("rank-divided data", "refused", why=BY_RANK, names=("rank",), alone_trains=True)
def tensors_divided_by_rank():
    """The data function returns this rank's rows."""

    def data():
        rank, size = place()
        return tuple(part.repeat(8, *[1] * (part.ndim - 1))[rank::size] for part in points())

    return {"train_data": data}


class RowsByRank(Points):
    def __getitem__(self, i):
        rank, size = place()
        return super().__getitem__((i * size + rank) % 64)


@habit("rank-divided data", "refused", why=BY_RANK, names=("rank",), alone_trains=True)
def dataset_divided_by_rank():
    """A dataset of one length whose rows depend on the rank."""
    return {"train_data": RowsByRank}


class OwnNumpy(Points):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        return self.x[i] + float(self.rng.normal()) * 0.1, self.y[i]


@habit("unseeded", "either", reference=None, why=OWN, names=("rng",), told="other values when it is read again")
def own_numpy_generator():
    """A dataset adds noise by a numpy generator that it makes itself."""
    return {"train_data": OwnNumpy}


class OwnUnseeded(Points):
    def __init__(self):
        super().__init__()
        self.random = random.Random()

    def __getitem__(self, i):
        return self.x[i] + self.random.gauss(0, 0.1), self.y[i]


@habit(
    "unseeded",
    "either",
    reference=None,
    why=OWN + "; it has no seed at all",
    names=("random",),
    told="other values when it is read again",
)
def own_unseeded_generator():
    """A dataset adds noise by `random.Random()`."""
    return {"train_data": OwnUnseeded}


class NoisyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.generator = mlp(), torch.Generator()

    def forward(self, x):
        if self.training:
            x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return self.net(x)


@habit(
    "unseeded",
    "refused",
    reference=None,
    why="the module's generator gives what follows from the order of forwards",
    names=("generator",),
)
def own_generator_of_the_model():
    """A module draws noise from a `torch.Generator` that it made and keeps."""
    return {"model": NoisyModel}


DRAWS = random.Random()


@habit(
    "unseeded",
    "refused",
    reference=None,
    why="each process draws other numbers, and other ones in each run",
    names=("DRAWS",),
)
def unseeded_in_the_loss():
    """The loss draws from a generator of its module that nobody seeded."""

    def loss(model, batch):
        total, weight = cross_entropy(model, batch)
        return total * (1 + 0.1 * DRAWS.random()), weight

    return {"loss": loss}


class ByIndex(Points):
    def __getitem__(self, i):
        rng = np.random.default_rng([7, i])
        return self.x[i] + torch.from_numpy(rng.normal(size=16).astype("float32")) * 0.1, self.y[i]


@habit("unseeded")
def generator_by_index():
    """A dataset makes a generator of each sample's number: the noise is part of the sample."""
    return {"train_data": ByIndex}


class Augmented(Points):
    def __getitem__(self, i):
        flip = random.random() < 0.5
        return (-self.x[i] if flip else self.x[i]) + 0.1 * torch.randn(16) + np.random.rand(), self.y[i]


@habit("unseeded", reference=None)
def global_generators():
    """Augmentation by the global generators of torch, Python and numpy, which shoal seeds for each grain."""
    return {"train_data": Augmented}


@habit("unseeded", reference=None)
def dropout():
    """Dropout: its masks are those of the grains, which a plain loop does not draw."""
    return {"model": lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))}


@habit("unseeded", reference=None)
def noise_in_the_loss():
    """Noise of a diffusion loss by torch's global generator."""

    def loss(model, batch):
        noise = torch.randn_like(batch[0][:, :4])
        x = torch.cat([batch[0][:, :4] + noise, batch[0][:, 4:]], 1)
        return (model(x) - noise).pow(2).sum(), len(x)

    return {"loss": loss}
