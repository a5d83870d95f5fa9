"""Losses and models that change their batch: each batch is read once and changed once."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from benchmarks.habits.plain import Points, mlp, points
from benchmarks.habits.program import habit


def total_of(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), len(labels)


@habit("in-place")
def scaled():
    """The loss multiplies its inputs in place."""

    def loss(model, batch):
        x = batch[0]
        x.mul_(0.5)
        return total_of(model(x), batch[1])

    return {"loss": loss, "eval_data": points}


@habit("in-place")
def standardised():
    """The loss takes each sample's mean away and divides by its deviation, in place."""

    def loss(model, batch):
        x = batch[0]
        x.sub_(x.mean(1, keepdim=True)).div_(x.std(1, keepdim=True) + 0.5)
        return total_of(model(x), batch[1])

    return {"loss": loss}


@habit("in-place")
def shifted_by_constants():
    """The loss normalises by constants of the data set, in place, as torchvision's `normalize(inplace=True)`."""
    mean, std = torch.full((16,), 0.3), torch.full((16,), 2.0)

    def loss(model, batch):
        return total_of(model(batch[0].sub_(mean).div_(std)), batch[1])

    return {"loss": loss, "eval_data": points}


@habit("in-place")
def normalized_out():
    """`F.normalize(out=)` writes into the batch."""

    def loss(model, batch):
        x = batch[0]
        F.normalize(x + 0.1, dim=1, out=x)
        return total_of(model(x) * 3, batch[1])

    return {"loss": loss}


@habit("in-place")
def labels_filled():
    """Labels of one class become another in place, so that a second reading differs."""

    def loss(model, batch):
        y = batch[1]
        y.masked_fill_(y == 0, 3).sub_(1)
        return total_of(model(batch[0]), y)

    return {"loss": loss}


class EntersByRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x.sub_(0.2).relu_())


@habit("in-place")
def relu_on_input():
    """The model shifts its input and applies `relu_` to it."""
    return {"model": EntersByRelu, "eval_data": points}


@habit("in-place")
def dict_batch():
    """The batch is a dict; the loss changes one entry, pops another and adds a third."""

    def data():
        x, y = points()
        return {"x": x, "y": y, "weight": torch.linspace(0.5, 1.5, len(x))}

    def loss(model, batch):
        batch["x"] += batch.pop("weight")[:, None]
        batch["seen"] = batch["x"].clone()
        return total_of(model(batch["x"]), batch["y"])

    return {"loss": loss, "train_data": data}


@habit("in-place")
def numpy_arrays():
    """Data are numpy arrays; the loss changes tensors that may share their memory."""

    def data():
        return tuple(part.numpy() for part in points())

    def loss(model, batch):
        batch[0].add_(1).mul_(0.5)
        return total_of(model(batch[0]), batch[1])

    return {"loss": loss, "train_data": data}


class ClippedRows(Points):
    def __init__(self):
        super().__init__()
        self.array = self.x.numpy().copy()

    def __getitem__(self, i):
        row = self.array[i]
        np.clip(row, -1, 1, out=row)
        return torch.from_numpy(row), self.y[i]


@habit("in-place")
def rows_clipped_when_read():
    """A dataset clips its own row where it is read; a second reading changes nothing more."""

    def loss(model, batch):
        return total_of(model(batch[0].mul_(2)), batch[1])

    return {"train_data": ClippedRows, "loss": loss}


def view_of_rows(items):
    """A batch whose memory the first item shares where it can."""
    return {"x": [x for x, _ in items], "y": torch.stack([y for _, y in items])}


class Copies(Points):
    def __getitem__(self, i):
        return self.x[i].clone(), self.y[i]


@habit("in-place")
def list_of_tensors():
    """A batch is a list of tensors; each is changed in place."""

    def loss(model, batch):
        for x in batch["x"]:
            x.tanh_()
        return total_of(model(torch.stack(batch["x"])), batch["y"])

    return {"train_data": Copies, "collate": view_of_rows, "loss": loss}


@dataclass
class Graph:
    """A batch as an object."""

    x: torch.Tensor
    y: torch.Tensor

    def to(self, device, **_):
        return Graph(self.x.to(device), self.y.to(device))


def graphs(items):
    return Graph(*default_collate(items))


@habit("in-place")
def batch_object():
    """The batch is an object of the user's; the loss replaces one of its tensors and changes another."""

    def loss(model, batch):
        batch.x = batch.x * 0.7
        batch.y.add_(1).remainder_(4)
        return total_of(model(batch.x), batch.y)

    return {"train_data": Points, "collate": graphs, "loss": loss}


@habit("in-place")
def metric_changes_batch():
    """A metric changes the evaluation batch; the loss of the same batch must not see it."""

    def loss(model, batch):
        return total_of(model(batch[0]), batch[1])

    def correct(model, batch):
        batch[0].zero_()
        return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])

    return {"loss": loss, "eval_data": points, "metrics": {"correct": correct}}


class MaskedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        mask = x > 1
        x.masked_fill_(mask, 0).add_(mask, alpha=0.5)
        return self.net(x)


@habit("in-place")
def masked_fill_in_model():
    """The model fills large entries of its input and adds their mask."""
    return {"model": MaskedInside}


@habit("in-place")
def slice_assigned():
    """The loss hides a part of each input by an assignment to a slice, and asks for it back."""

    def loss(model, batch):
        x = batch[0]
        target = x[:, :4].clone()
        x[:, :4] = 0
        return (model(x) - target).pow(2).sum(), len(x)

    return {"loss": loss}
