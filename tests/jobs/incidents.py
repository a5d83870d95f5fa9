"""Jobs that something befalls, as the environment asks: samples that cannot be read, a flipped bit, a slow rank."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
import witness
from torch import Tensor, nn
from torch.utils.data import get_worker_info

import shoal


class Rows(tiny.SlowToLoad):
    """Augmented vectors by item, of which those in $TEST_BAD raise; a data worker tells its process id.

    The first worker stops at its first sample, if the file $TEST_STOP is not there yet.
    """

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        found = super().__getitem__(i)  # which draws at random first
        if get_worker_info() is not None and "TEST_PIDS" in os.environ:
            Path(os.environ["TEST_PIDS"], f"{witness.rank()}-{os.getpid()}").touch()
        mark = Path(os.environ.get("TEST_STOP", os.devnull))
        if get_worker_info() is not None and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        if str(i) in os.environ.get("TEST_BAD", "").split(","):
            raise OSError(f"cannot read sample {i}")
        return found


def rows() -> shoal.Job:
    """The MLP on samples of which some cannot be read; two passes over 40."""
    return tiny.mlp(train_data=partial(Rows, 40), length=shoal.Epochs(2))


def evaluated() -> shoal.Job:
    """The MLP, some of whose evaluation data cannot be read."""
    return tiny.mlp(eval_data=partial(Rows, 40))


_models: list[nn.Module] = []


def _model() -> nn.Module:
    _models.append(tiny.mlp_model())
    return _models[-1]


class Flips(witness.Gated):
    """A schedule that flips a bit of a weight, in step $TEST_FLIP=FOLDER:STEP:RANK and once for all."""

    def __call__(self, progress: float) -> float:
        folder, step, rank = os.environ["TEST_FLIP"].rsplit(":", 2)
        mark = Path(folder, "flipped")
        if getattr(progress, "step", -1) == int(step) and witness.rank() == rank and not mark.exists():
            mark.touch()
            with torch.no_grad():
                next(_models[-1].parameters()).view(torch.int32).view(-1)[7] ^= 1 << 3
        return super().__call__(progress)


def flipped() -> shoal.Job:
    """The MLP, in one of whose replicas a bit flips."""
    return tiny.mlp(model=_model, schedule=Flips())


class Slow(nn.Module):
    """The MLP, which sleeps in its forward on rank $TEST_SLOW."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.mlp_model()

    def forward(self, inputs: Tensor) -> Any:
        if witness.rank() == os.environ.get("TEST_SLOW") and self.training:
            time.sleep(0.01)
        return self.inner(inputs)


def slow() -> shoal.Job:
    """Some 40 steps of the MLP."""
    return tiny.mlp(model=Slow, steps=40)


class Drifts(torch.optim.SGD):
    """An optimizer whose update differs by rank, as one that reads a statistic of the rank's own samples."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1.0 - 0.1 * int(witness.rank() or 0))


def drifting() -> shoal.Job:
    """The MLP, of which each rank makes another one."""
    return tiny.mlp(optimizer=lambda parameters: Drifts(parameters, lr=0.1))
