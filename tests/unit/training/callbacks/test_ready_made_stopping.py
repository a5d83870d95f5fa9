"""EarlyStopping and KeepBest: by a metric's course."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.unit.training.callbacks.test_calls import Told, job, trained

import shoal
from shoal.errors import JobError


def course(values: list[float], **settings: Any) -> int | None:
    """The number of the evaluation after which it asks for the end."""

    class Run:
        ended = False

        def request_end(self, reason: str) -> None:
            self.ended = True

    stopping, run = shoal.EarlyStopping("m", **settings), Run()
    for number, value in enumerate(values, 1):
        stopping.on_evaluation(run, {"m": value})  # type: ignore[arg-type]
        if run.ended:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "settings", "ends"),
    [
        ([3, 2, 1, 0], {"patience": 1}, None),
        ([3, 2, 2, 1], {"patience": 1}, 3),
        ([3, 2, 2, 1, 1, 1], {"patience": 2}, 6),
        ([1, 2, 3, 2, 2], {"patience": 2, "mode": "max"}, 5),
        ([3, 2.9, 2.8], {"patience": 2, "min_delta": 0.5}, 3),
        ([3, 2.9, 2.4], {"patience": 2, "min_delta": 0.5}, None),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([1, math.nan, 0.5, math.inf], {"patience": 2}, None),
    ],
)
def test_ends_after_its_patience(values: list[float], settings: dict[str, Any], ends: int | None) -> None:
    assert course(values, **settings) == ends


def test_a_run_ends_and_says_why() -> None:
    outcome, lines = trained(job(shoal.EarlyStopping("loss", patience=1, min_delta=100.0), steps=30))[1:]
    assert outcome.state.step == 6
    assert outcome.ended_by is not None
    assert outcome.ended_by["callback"] == "EarlyStopping"
    assert any(line.startswith("EarlyStopping ends the training after step 6: loss is not better") for line in lines)


def test_one_that_has_ended_a_run_ends_it_again(tmp_path: Path) -> None:
    """And one with more patience goes on, with what was seen before."""
    trained(job(shoal.EarlyStopping("loss", patience=1, min_delta=100.0), steps=30), tmp_path)
    again = trained(job(shoal.EarlyStopping("loss", patience=1, min_delta=100.0), steps=30), tmp_path, resume=True)
    assert again[1].state.step == 6
    more = trained(job(shoal.EarlyStopping("loss", patience=3, min_delta=100.0), steps=30), tmp_path, resume=True)
    assert more[1].state.step == 12


def test_keep_best_is_the_jobs_watch(tmp_path: Path) -> None:
    wanted = job(shoal.KeepBest("loss", mode="max"), Told())
    assert wanted.watched == ("loss", True)
    best = trained(wanted, tmp_path)[1].state.best
    assert best is not None
    assert shoal.load(tmp_path, step="best")
    assert job(watch="loss:max").watched == wanted.watched
    assert job(shoal.KeepBest("ema_loss"), shoal.EMA()).watched == ("ema_loss", False)


@pytest.mark.parametrize("settings", [{"patience": 0}, {"patience": 1.5}, {"mode": "best"}, {"min_delta": -1.0}])
def test_refuses_what_says_nothing(settings: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="EarlyStopping"):
        shoal.EarlyStopping("loss", **settings)


def test_without_an_evaluation_it_says_so() -> None:
    said = job(shoal.EarlyStopping("loss"), shoal.KeepBest("loss"), eval_data=None).without_effect()
    assert said == [
        f"{name} has no effect: there is no eval_data to evaluate" for name in ("EarlyStopping", "KeepBest")
    ]
