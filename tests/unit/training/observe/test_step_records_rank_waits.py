"""Waits among ranks are summed over some steps, and stay small on many ranks."""

import numpy as np
import pytest

from shoal.distributed.mesh import Agreement, Report, from_rows, measures, to_row
from shoal.runs.records import SPANS
from shoal.training.observe.step_records import RankWaits


def step(waits: list[float], seconds: float = 1.0) -> Agreement:
    """The agreement after a step in which each rank waited so long."""
    spans = dict.fromkeys(SPANS, 0.0)
    rows = [Report(measures=measures(spans | {"exposed_communication": w}, seconds, 0)) for w in waits]
    return from_rows(np.array([to_row(row) for row in rows]))


def test_ten_steps_are_one_sum() -> None:
    waits = RankWaits(2)
    told = [waits.add(step([0.5, 0.0] if number % 5 else [0.0, 0.25])) for number in range(20)]
    assert [number for number, sums in enumerate(told, 1) if sums is not None] == [10, 20]
    assert told[9] == told[19]
    assert told[9] is not None
    assert told[9].busy_seconds == pytest.approx([6.0, 9.5])
    assert told[9].waits == {1: [4.0, 0.0], 0: [0.0, 0.5]}  # the rank that was waited for most comes first


def test_on_many_ranks_those_that_were_waited_for_least_are_one() -> None:
    waits, told = RankWaits(16), None
    for number in range(16):
        told = waits.add(step([0.0 if rank == number else number / 16 for rank in range(16)]))
    assert told is not None
    assert (told.steps, list(told.waits)) == (16, [15, 14, 13, 12, -1])
    assert told.waits[-1][0] == pytest.approx(sum(range(1, 12)) / 16)


def test_steps_that_are_trained_again_are_forgotten_and_one_process_waits_for_nobody() -> None:
    waits, alone = RankWaits(2), RankWaits(1)
    for number in range(17):
        if number == 7:
            waits.clear()
        assert (waits.add(step([0.0, 0.5])) is not None) == (number == 16)
        assert alone.add(step([0.0])) is None
