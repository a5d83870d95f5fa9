"""Row: a model that others wrote, as a job in a tiny size that needs no download."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shoal

SAMPLES = 24
BATCH = 8
GRAINS = 4

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], tuple[Any, Any]]


@dataclass(frozen=True)
class Row:
    """One model. `written` is all that defines it, as text: a result counts only for what it was run with.

    job: makes the job. prepare: imports what the job needs, and uses no autograd.
    """

    name: str
    family: str
    job: Callable[[], shoal.Job]
    prepare: Callable[[], Any]
    written: str


def make_job(model: Callable[[], nn.Module], loss: Loss, data: Callable[[], Any], **others: Any) -> shoal.Job:
    """A job of two steps and more, by AdamW with clipping unless told otherwise."""
    settings: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "clip_norm": 1.0}
    settings |= {"global_batch": BATCH, "grains": GRAINS, "length": shoal.Steps(6)}
    return shoal.Job(model=model, loss=loss, train_data=data, **(settings | others))


def drawn(seed: int = 0) -> torch.Generator:
    """A generator for data: the same on every rank."""
    return torch.Generator().manual_seed(seed)


def ids(*shape: int, most: int = 64, least: int = 4, seed: int = 0) -> Tensor:
    """Token ids, int64, of the given shape; the smallest ids are left to special tokens."""
    return torch.randint(least, most, shape, generator=drawn(seed))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal float32 numbers of the given shape."""
    return torch.randn(shape, generator=drawn(seed))


def torch_row(family: str, name: str, model: Any, loss: Loss, data: Any, **others: Any) -> Row:
    """A row of plain torch. `others`: what else a Job has."""
    written = " ".join(map(_told, (model, loss, data, sorted(others.items()))))
    return Row(name, family, partial(make_job, model, loss, data, **others), lambda: None, written)


def _told(value: Any) -> str:
    """What a result depends on, the same in every process: names and arguments."""
    if isinstance(value, partial):
        arguments = (*value.args, *sorted(value.keywords.items()))
        return f"{_told(value.func)}({', '.join(map(_told, arguments))})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_told, value))})"
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__qualname__
    return repr(value)
