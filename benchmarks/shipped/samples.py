"""Samples, a model, and a sampler with epochs, of the trainings that have their own loader."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

SIZE, SEED = 32, 7
chance = torch.Generator().manual_seed(3)
INPUTS, LABELS = torch.randn(SIZE, 8, generator=chance), torch.randint(0, 3, (SIZE,), generator=chance)
DATA = torch.utils.data.TensorDataset(INPUTS, LABELS)


def order(epoch):
    """Return the order of an epoch's samples."""
    return torch.randperm(SIZE, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


class Sampler(torch.utils.data.Sampler):
    """A sampler that gets its epoch by `set_epoch`, as DistributedSampler does."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(order(self.epoch))

    def __len__(self):
        return SIZE


class Batches(Sampler):
    """The same for batches of 4."""

    batch_size, drop_last = 4, False

    def __iter__(self):
        own = order(self.epoch)
        return (own[start : start + 4] for start in range(0, SIZE, 4))

    def __len__(self):
        return SIZE // 4


def build():
    """Return a model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def expected(step):
    """Return the inputs of a step of two ranks with batches of 4, as a loop by hand reads them."""
    epoch, place = divmod(step, SIZE // 8)
    return INPUTS[order(epoch)[8 * place : 8 * place + 8]]


def summed(model, inputs):
    """Return the sum of the losses of a batch, and their number."""
    places = [int((row == INPUTS).all(1).nonzero()[0]) for row in inputs]
    return cross_entropy(model(inputs), LABELS[places], reduction="sum"), len(places)
