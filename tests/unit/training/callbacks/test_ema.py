"""EMA: the average of the weights, by hand and by the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.training.callbacks.test_calls import job, trained

import shoal
from shoal.errors import JobError, RunDirectoryError


class Follows(shoal.Callback):
    """The same average, in float64, by the formula."""

    watches_only = True

    def __init__(self, decays: Any) -> None:
        self.decays = decays

    def on_start(self, run: Any) -> None:
        self.average = {name: p.double() for name, p in run.parameters()}

    def on_step(self, run: Any, record: Any) -> None:
        decay = self.decays(record.step - 1)
        for name, p in run.parameters():
            self.average[name] = decay * self.average[name] + (1 - decay) * p.double()


@pytest.mark.parametrize("warmup", [False, True])
def test_is_the_average(warmup: bool, tmp_path: Path) -> None:
    follows = Follows(lambda n: min(0.9, (1 + n) / (10 + n)) if warmup else 0.9)
    ema = shoal.EMA(0.9, warmup=warmup)
    trained(job(ema, follows), tmp_path)
    found = shoal.load(tmp_path, ema=True)
    weights = shoal.load(tmp_path)
    for name, wanted in follows.average.items():
        assert torch.allclose(found[name].double(), wanted, rtol=1e-6, atol=1e-7), name
        assert not torch.equal(found[name], weights[name])
    assert torch.equal(found["inner.1.running_mean"], weights["inner.1.running_mean"])


def test_changes_nothing_but_adds_metrics() -> None:
    ema = shoal.EMA(0.9)
    found, outcome, _ = trained(job(ema))
    without, other, _ = trained(job())
    assert found == without
    assert outcome.metrics["loss"] == other.metrics["loss"]
    assert outcome.metrics["ema_loss"] != outcome.metrics["loss"]
    assert outcome.metrics["ema_loss"] == trained(job(shoal.EMA(0.9)))[1].metrics["ema_loss"]
    assert set(trained(job(shoal.EMA(0.9, evaluate=False)))[1].metrics) == {"loss"}


def test_a_skipped_step_is_not_averaged() -> None:
    rows = torch.ones(8, 3)
    rows[5] = float("nan")
    ema = shoal.EMA(0.9)
    changes = {"train_data": (rows, torch.ones(8, 1)), "on_nonfinite": "skip", "eval_data": None}
    trained(job(ema, steps=2, **changes))
    assert ema.num_updates == 0


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    trained(job(shoal.EMA(0.9)), tmp_path / "whole")
    trained(job(shoal.EMA(0.9), steps=4), tmp_path / "two")
    trained(job(shoal.EMA(0.9)), tmp_path / "two", resume=True)
    hashes = {shoal.weights_sha256(shoal.load(tmp_path / name, ema=True)) for name in ("whole", "two")}
    assert len(hashes) == 1


def test_a_run_without_an_average_says_so(tmp_path: Path) -> None:
    trained(job(), tmp_path)
    with pytest.raises(RunDirectoryError, match="no average of the weights is there"):
        shoal.load(tmp_path, ema=True)


@pytest.mark.parametrize("decay", [1.0, -0.1, "much", True])
def test_refuses_what_is_no_decay(decay: Any) -> None:
    with pytest.raises(JobError, match="a decay is a number"):
        shoal.EMA(decay)


@pytest.mark.parametrize(
    ("average", "warned"),
    [
        (shoal.EMA(), "warning: EMA(0.999) over 6 steps: 99% of the average at the end is of the weights that"),
        (shoal.EMA(warmup=True), None),
    ],
)
def test_an_average_of_mostly_the_beginning_is_warned_of(average: shoal.EMA, warned: str | None) -> None:
    lines = [line for line in trained(job(average))[2] if "warning" in line]
    assert [warned is not None and warned in line for line in lines] == [True] * (warned is not None)
    if warned is not None:
        assert "shoal.EMA(0.17), say, or EMA(" in lines[0]
