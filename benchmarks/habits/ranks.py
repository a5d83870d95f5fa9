"""Programs that know of ranks: collectives, wrappers, SyncBatchNorm, models made at import."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.habits.plain import cross_entropy, mlp
from benchmarks.habits.program import habit

OWN_SUM = "what the job's own collective adds depends on the number of ranks, and ranks may call it unequally often"
BARE = "a module that is divided or averaged already"


def there():
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@habit("collectives", "refused", why=OWN_SUM, names=("all_reduce",), alone_trains=True)
def all_reduce_in_loss():
    """The loss takes the value that it has on average over the ranks, with the gradient scaled to it."""

    def loss(model, batch):
        total, weight = cross_entropy(model, batch)
        if there():
            mean = total.detach().clone()
            dist.all_reduce(mean)
            total = total * (mean / dist.get_world_size() / total.detach())
        return total, weight

    return {"loss": loss}


@habit(
    "collectives",
    "either",
    why="nothing of it is trained on, but ranks may call it unequally often",
    names=("all_reduce",),
    alone_trains=True,
)
def all_reduce_for_a_log():
    """The loss sums itself over ranks for a log."""

    def loss(model, batch):
        total, weight = cross_entropy(model, batch)
        if there():
            dist.all_reduce(total.detach().clone())
        return total, weight

    return {"loss": loss}


class Gathers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        return g.chunk(dist.get_world_size())[dist.get_rank()]


@habit("collectives", "refused", reference=None, why=OWN_SUM, names=("all_gather",), alone_trains=True)
def all_gather_of_features():
    """A contrastive loss gathers the features of all ranks itself."""

    def loss(model, batch):
        z = F.normalize(model(batch[0]), dim=1)
        others = Gathers.apply(z.contiguous()) if there() else z
        return (z @ others.T).logsumexp(1).sum(), len(z)

    return {"loss": loss}


@habit(
    "collectives",
    "either",
    why="ranks may call it unequally often, and then they wait for ever",
    names=("barrier",),
    alone_trains=True,
)
def barrier_in_loss():
    """The loss waits for all ranks."""

    def loss(model, batch):
        if there():
            dist.barrier()
        return cross_entropy(model, batch)

    return {"loss": loss}


class SumsInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = self.net(x - self.mean)
        if self.training:
            mean = x.mean(0)
            if there():
                dist.all_reduce(mean)
            self.mean.lerp_(mean, 0.1)
        return y


@habit("collectives", "refused", why=OWN_SUM, names=("all_reduce",), alone_trains=True)
def all_reduce_in_model():
    """A model sums a statistic over ranks itself."""
    return {"model": SumsInForward}


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        if there():
            self.net = nn.parallel.DistributedDataParallel(self.net)

    def forward(self, x):
        return self.net(x)


@habit("wrapped", "refused", why=BARE, names=("DistributedDataParallel", "bare"), alone_trains=True)
def wrapped_in_ddp():
    """A module wraps a part of itself where a process group is there."""
    return {"model": Wrapped}


@habit("wrapped", "refused", why=BARE, names=("DistributedDataParallel", "bare"), alone_trains=True)
def ddp_returned():
    """The model function returns DistributedDataParallel of its model."""

    def model():
        net = mlp()
        return nn.parallel.DistributedDataParallel(net) if there() else net

    return {"model": model}


@habit("wrapped", "refused", why=BARE, names=("fully_shard", "bare"), alone_trains=True)
def fully_sharded():
    """The model function shards its model by FSDP."""

    def model():
        net = mlp()
        if there():
            from torch.distributed.fsdp import fully_shard

            fully_shard(net)
        return net

    return {"model": model}


@habit(
    "wrapped",
    "either",
    why="DataParallel passes on to its module where there is no GPU",
    names=("DataParallel", "bare"),
)
def data_parallel():
    """The model function returns DataParallel of its model."""
    return {"model": lambda: nn.DataParallel(mlp())}


@habit(
    "SyncBatchNorm",
    "refused",
    why="its batch is that of all ranks, with collectives of its own on GPUs alone",
    names=("torch.nn.BatchNorm",),
    alone_trains=True,
    reference=None,
)
def sync_batch_norm():
    """A SyncBatchNorm in a model."""
    return {"model": lambda: nn.Sequential(nn.Linear(16, 32), nn.SyncBatchNorm(32), nn.ReLU(), nn.Linear(32, 4))}


@habit(
    "SyncBatchNorm",
    "refused",
    why="as the one before",
    names=("torch.nn.BatchNorm",),
    alone_trains=True,
    reference=None,
)
def converted_to_sync_batch_norm():
    """`convert_sync_batchnorm`, as scripts for DDP have it."""

    def model():
        net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)

    return {"model": model}


def at_import():
    torch.manual_seed(5)
    return mlp()


SEEDED = at_import()


def copied(**pieces):
    """The plain loop at its own copy, since the object of the module is trained."""
    from benchmarks.habits.plain import train

    return train(**{**pieces, "model": at_import})


@habit("made at import", reference=copied)
def model_object_with_a_seed():
    """The model is an object that was made at import, with a seed of its own."""
    return {"model": lambda: SEEDED}


UNSEEDED = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
with torch.no_grad():
    for parameter in UNSEEDED.parameters():
        noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        parameter.uniform_(-0.2, 0.2, generator=noise)


@habit(
    "made at import",
    "either",
    reference=None,
    why="two runs begin at other values, which shoal says",
    names=("model",),
    told="initial values",
    unseeded=True,
)
def model_object_without_a_seed():
    """The model is an object that was made at import, with values of no seed."""
    return {"model": lambda: UNSEEDED}


@habit("collectives")
def logs_on_rank_zero():
    """The loss asks for its rank and prints on the first alone: nothing of it is trained on."""

    def loss(model, batch):
        total, weight = cross_entropy(model, batch)
        if not there() or dist.get_rank() == 0:
            with open(os.devnull, "w") as log:
                print(f"loss {float(total.detach()):.3f}", file=log)
        return total, weight

    return {"loss": loss}
