"""The MLP on ranks that end themselves at some place, as the environment asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
import witness
from torch import Tensor, nn

import shoal

KINDS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGABRT": signal.SIGABRT}


def end_at(place: str) -> None:
    """Ends this rank where $TEST_END=FOLDER:PLACE,PLACE...:RANK:HOW:TIMES says so, so many times at each place."""
    folder, places, rank, how, times = os.environ.get("TEST_END", "::::0").rsplit(":", 4)
    if place not in places.split(",") or rank != witness.rank():
        return
    marks = [Path(folder, f"{place}-{number}") for number in range(int(times))]
    mark = next((mark for mark in marks if not mark.exists()), None)
    if mark is None:
        return
    mark.touch()
    if how in KINDS:
        os.kill(os.getpid(), KINDS[how])
    elif how.startswith("gone with "):
        os._exit(int(how[-1]))
    else:
        sys.exit(0)


end_at("import")


def leave_child() -> None:
    """Starts a process that nobody waits for, if $TEST_CHILD is set."""
    if "TEST_CHILD" in os.environ:
        subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])


class Ending(nn.Module):
    """The MLP; a hook of its output's gradient ends the rank in the backward."""

    def __init__(self) -> None:
        super().__init__()
        end_at("model")
        leave_child()
        self.inner = tiny.mlp_model()

    def forward(self, inputs: Tensor) -> Any:
        found = self.inner(inputs)
        if torch.is_grad_enabled() and self.training:
            end_at("forward")
            found.register_hook(lambda gradient: end_at("backward"))
        return found


class Schedule(witness.Gated):
    """Ends the rank between the sums and the optimizer, from the sixth step on."""

    def __call__(self, progress: float) -> float:
        if getattr(progress, "step", 0) >= 5:
            end_at("optimizer")
        return super().__call__(progress)


def accuracy(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    end_at("evaluation")
    return tiny.accuracy(model, batch)


class Saves(shoal.Callback):
    """Has a state, whose writing and reading end the rank."""

    def state_dict(self) -> dict[str, Any]:
        end_at("save")
        return {"saves": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        end_at("load")


def job() -> shoal.Job:
    """Sixteen steps."""
    return tiny.mlp(model=Ending, schedule=Schedule(), metrics={"accuracy": accuracy}, callbacks=(Saves(),))


class Wide(torch.utils.data.Dataset[Any]):
    """Vectors, each with 400 kB that nobody looks at."""

    def __init__(self) -> None:
        self.rows = tiny.vectors(40)

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return (*(column[i] for column in self.rows), torch.zeros(100_000))


def _narrow(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return tiny.classify(model, batch[:3])


def wide() -> shoal.Job:
    """Batches that do not fit into a small /dev/shm."""
    return tiny.mlp(train_data=Wide, loss=_narrow, eval_data=None, metrics={})
