"""Sample: a function of the whole model, which may draw and change what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.training.callbacks.test_calls import X, job, trained

import shoal
from shoal.errors import JobError


class Draw:
    """Notes steps and outputs, and does all that it should not."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def __call__(self, model: torch.nn.Module, run: Any) -> None:
        assert not model.training
        torch.rand(3)
        self.seen.append((run.step, float(model(X).sum())))
        torch.nn.init.zeros_(next(model.parameters()))


def test_at_intervals_and_after_evaluations() -> None:
    every, evaluated = Draw(), Draw()
    found = trained(job(shoal.Sample(every, every=2), shoal.Sample(evaluated), steps=7))
    assert [step for step, _ in every.seen] == [2, 4, 6]
    assert [step for step, _ in evaluated.seen] == [3, 6, 7]
    assert every.seen[2] == evaluated.seen[1], "the same model, whatever was done to the first"
    assert found[0] == trained(job(steps=7))[0]


@pytest.mark.parametrize("every", [0, 1.5, -1])
def test_refuses_what_is_no_interval(every: Any) -> None:
    with pytest.raises(JobError, match="a function of"):
        shoal.Sample(Draw(), every=every)
