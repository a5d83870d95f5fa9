"""The MLP, whose evaluations have a gate."""

from __future__ import annotations

import os
from typing import Any

import tiny
import witness
from torch import Tensor, nn

import shoal

EVALUATION = 1000  # the gate EVALUATION + STEP is in the evaluation after step STEP, which counts from 0


class Schedule(witness.Gated):
    """Remembers the step."""

    step = -EVALUATION

    def __call__(self, progress: float) -> float:
        Schedule.step = getattr(progress, "step", -EVALUATION)
        return super().__call__(progress)


def accuracy(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """As shoal.accuracy; appends the number of samples to $TEST_EVALUATED, and waits."""
    sums = shoal.accuracy(model, batch)
    with open(os.environ.get("TEST_EVALUATED", os.devnull), "a", encoding="utf-8") as file:
        file.write(f"{len(batch[2])}\n")
    witness.wait_at_gate(EVALUATION + Schedule.step)
    return sums


def job() -> shoal.Job:
    """Sixteen steps; an evaluation has seven chunks."""
    return tiny.mlp(schedule=Schedule(), metrics={"accuracy": accuracy})
