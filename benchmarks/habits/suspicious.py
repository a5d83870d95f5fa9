"""Right programs that only look as if they kept a state."""

import functools
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.habits.plain import mlp, points
from benchmarks.habits.program import habit


def total_of(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), len(labels)


@habit("suspicious")
def relu_in_place():
    """ReLU(inplace=True) on activations."""
    return {
        "model": lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 4)),
        "eval_data": points,
    }


class MaskCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.mask = nn.Linear(4, 8), nn.Linear(8, 4), None

    def forward(self, x):
        h = self.embed(x.view(len(x), -1, 4))
        if self.mask is None or len(self.mask) < h.shape[1]:
            self.mask = torch.full((h.shape[1],) * 2, -torch.inf).triu(1)
        a = (h @ h.transpose(1, 2) + self.mask[: h.shape[1], : h.shape[1]]).softmax(-1)
        return self.head((a @ h)[:, -1])


@habit("suspicious")
def mask_that_grows():
    """A causal mask is made at the first forward and kept: a pure cache."""
    return {"model": MaskCache}


class RotaryCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.length, self.cos = mlp(), 0, torch.zeros(0)

    def forward(self, x):
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.cos = torch.cos(torch.arange(self.length) / 7)
        return self.net(x * self.cos[: x.shape[1]])


@habit("suspicious")
def rotary_table_that_grows():
    """A rotary table grows with the longest input: a pure cache."""
    return {"model": RotaryCache}


class Logged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls, self.log = mlp(), 0, []

    def forward(self, x):
        y = self.net(x)
        self.calls += 1
        self.log.append(float(y.detach().mean()))
        return y


@habit("suspicious")
def counter_and_list_that_log():
    """A counter and a list of means, which nothing reads."""
    return {"model": Logged}


@functools.lru_cache
def positions(length):
    return torch.arange(length) / length


class CachedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x + positions(x.shape[1]))


@habit("suspicious")
def lru_cache():
    """Positions come from a function with a cache."""
    return {"model": CachedFunction}


class KeepsMap(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.map = nn.Linear(4, 8), nn.Linear(8, 4), None

    def forward(self, x):
        h = self.embed(x.view(len(x), -1, 4))
        self.map = (h @ h.transpose(1, 2)).softmax(-1)
        return self.head((self.map @ h).mean(1))


@habit("suspicious")
def last_attention_map():
    """A module keeps its last attention map for whoever wants to draw it."""
    return {"model": KeepsMap}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.aux = nn.Linear(16, 16), None

    def forward(self, x):
        y = x + torch.tanh(self.a(x))
        self.aux = y.pow(2).sum()
        return y


@habit("suspicious")
def auxiliary_loss_on_blocks():
    """Blocks keep a loss term that the loss of the same forward reads."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 4)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def loss(model, batch):
        total, weight = total_of(model(batch[0]), batch[1])
        return total + 0.01 * sum(block.aux for block in model.blocks), weight

    return {"model": Blocks, "loss": loss}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
        self.outputs = []

    def forward(self, x):
        self.outputs = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.tanh(block(x))
            self.outputs.append(head(x))
        return self.outputs[-1]


@habit("suspicious")
def deep_supervision():
    """Outputs of all heads are kept on the module, and the loss reads them."""

    def loss(model, batch):
        model(batch[0])
        return sum(total_of(y, batch[1])[0] for y in model.outputs), len(batch[1])

    return {"model": Deep, "loss": loss}


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.seconds, self.began = mlp(), 0.0, time.perf_counter()

    def forward(self, x):
        began = time.perf_counter()
        y = self.net(x)
        self.seconds += time.perf_counter() - began
        return y


@habit("suspicious")
def timer():
    """A module adds up how long its forwards took."""
    return {"model": Timed}


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.first, self.shape = mlp(), True, None

    def forward(self, x):
        if self.first:
            self.shape = tuple(x.shape[1:])
            self.first = False
        assert tuple(x.shape[1:]) == self.shape, "the inputs changed their shape"
        return self.net(x)


@habit("suspicious")
def first_flag():
    """A flag says whether it is the first forward; what follows from it is a check."""
    return {"model": First}


@habit("suspicious")
def generator_in_each_call():
    """The loss makes a generator with a fixed seed in each call, for the probe that it projects on."""

    def loss(model, batch):
        probe = torch.randn(4, generator=torch.Generator().manual_seed(11))
        y = model(batch[0])
        total, weight = total_of(y, batch[1])
        return total + 0.1 * (y @ probe).pow(2).sum(), weight

    return {"loss": loss}


class SavesNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.last_input = None

    def forward(self, x):
        self.last_input = x
        return self.net(x)


@habit("suspicious")
def last_input_kept():
    """A module keeps its last input; the loss reads it after the forward of the same batch."""

    def loss(model, batch):
        y = model(batch[0])
        total, weight = total_of(y, batch[1])
        return total + 0.1 * (y[:, :2] - model.last_input[:, :2]).pow(2).sum(), weight

    return {"model": SavesNothing, "loss": loss}


HISTORY = {"losses": []}


@habit("suspicious")
def global_history():
    """The loss appends its value to a list of its module, which nothing reads."""

    def loss(model, batch):
        total, weight = total_of(model(batch[0]), batch[1])
        HISTORY["losses"].append(float(total.detach()) / weight)
        return total, weight

    return {"loss": loss}
