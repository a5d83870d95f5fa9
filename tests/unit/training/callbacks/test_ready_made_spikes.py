"""LossSpikes: by a loss's course."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal.errors import JobError


class Told:
    """A run that keeps what it is told."""

    def __init__(self) -> None:
        self.incidents: list[tuple[str, str, str]] = []
        self.ended = False

    def note(self, text: str) -> None: ...

    def incident(self, *told: str) -> None:
        self.incidents.append(told)  # type: ignore[arg-type]

    def request_end(self, reason: str) -> None:
        self.ended = True


def course(losses: list[float], **settings: Any) -> Told:
    spikes, run = shoal.LossSpikes(**settings), Told()
    for step, loss in enumerate(losses, 1):
        spikes.on_step(run, SimpleNamespace(step=step, loss=loss))  # type: ignore[arg-type]
        again = shoal.LossSpikes(**settings)  # as if it were resumed after each step
        again.load_state_dict(spikes.state_dict())
        spikes = again
    return run


def falling(count: int) -> list[float]:
    drawn = random.Random(3)
    return [4.0 / (1 + 0.05 * step) + 0.05 * drawn.gauss(0, 1) for step in range(count)]


def test_a_falling_loss_has_no_spikes() -> None:
    assert course(falling(400)).incidents == []


@pytest.mark.parametrize("stop", [False, True])
def test_spikes_in_a_row_are_told_once(stop: bool) -> None:
    losses = falling(200)
    losses[120:123] = [9.0, 12.0, 8.0]
    losses[60] = math.nan  # the policy for what is not finite is the job's own
    run = course(losses, stop=stop)
    ((kind, what, done),) = run.incidents
    assert (kind, done) == ("spike", "the run ends" if stop else "nothing")
    assert "the loss of step 121 is 9" in what
    assert run.ended is stop


def test_a_new_level_is_told_once() -> None:
    assert len(course([1.0] * 50 + [3.0] * 150).incidents) == 1


@pytest.mark.parametrize("wrong", [{"deviations": 0.0}, {"window": 5}, {"window": 20.5}])
def test_what_is_no_window(wrong: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="LossSpikes"):
        shoal.LossSpikes(**wrong)


def test_where_most_losses_are_0_none_is_a_spike() -> None:
    assert course([0.0] * 60 + [1e-7], stop=True).incidents == []
