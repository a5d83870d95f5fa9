"""Losses that staleness has spoilt are told from all others, on the losses of real runs."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from shoal.training.parameter_server.retreat import BEGINNING, LossGuard, foretold, largest_rate

# Of `shoal run examples/digits.py` on asynchronous workers at rate 0.1, by update: "trains" on 3 workers without
# momentum, "lost" with momentum 0.9.
LOSSES = json.loads((Path(__file__).parent / "losses.json").read_text(encoding="utf-8"))


def fires(losses: list[float]) -> int | None:
    guard = LossGuard()
    for number, loss in enumerate(losses, start=1):
        guard.add(loss)
        if guard.lost:
            return number
    return None


@pytest.mark.parametrize("name", LOSSES["trains"])
def test_a_run_that_trains_is_left_alone(name: str) -> None:
    assert fires(LOSSES["trains"][name]) is None


@pytest.mark.parametrize("name", LOSSES["lost"])
def test_a_run_that_is_lost_is_noticed(name: str) -> None:
    assert fires(LOSSES["lost"][name]) is not None


def test_noise_and_plateaus_are_no_rise() -> None:
    for seed in range(10):
        draw = random.Random(seed)
        assert fires([2.3 + draw.gauss(0, 0.01) - 1e-5 * step for step in range(500)]) is None, "hardly learns"
        assert fires([0.05 + draw.expovariate(20.0) for _ in range(500)]) is None, "resumed where all is learnt"
        falling = [2.3 * 0.98**step + abs(draw.gauss(0, 0.2)) for step in range(500)]
        assert fires(falling) is None


def test_a_rise_that_keeps_something_is_none() -> None:
    assert fires([2.3, 2.31] * 10 + [0.3, 0.2] * 20 + [2.0, 2.1] * 50) is None
    assert fires([2.3, 2.31] * 10 + [0.3, 0.2] * 20 + [2.3, 2.4] * 50) is not None


def test_it_goes_on_where_a_checkpoint_was_taken() -> None:
    losses = LOSSES["lost"]["3 workers, seed 2"]
    at = fires(losses)
    assert at is not None
    for stop in (1, BEGINNING, 30, at - 1):
        guard = LossGuard()
        for loss in losses[:stop]:
            guard.add(loss)
        guard = LossGuard(**json.loads(json.dumps(asdict(guard))))
        for loss in losses[stop:at]:
            assert not guard.lost
            guard.add(loss)
        assert guard.lost


def test_whether_anything_was_learnt() -> None:
    guard = LossGuard()
    for loss in [2.3] * 19:
        guard.add(loss)
    assert guard.learnt, "too few to tell"
    for loss in [2.31] * 10:
        guard.add(loss)
    assert not guard.learnt
    guard.add(None)
    for loss in [2.2] * 10:
        guard.add(loss)
    assert guard.learnt


def test_values_after_a_sudden_rise_are_no_good_ones() -> None:
    """As at step 46 of a run that was taken back there: its mean over ten was the lowest so far."""
    guard = LossGuard()
    for loss in [2.3] * 10 + [1.74, 1.82, 1.96, 2.04, 1.61, 1.62, 1.7]:
        guard.add(loss)
    assert guard.of_now == guard.lately < 2.3
    for loss in [2.58, 2.40, 2.59]:
        guard.add(loss)
    assert guard.lately < 2.1
    assert guard.of_now > 2.5


@pytest.mark.parametrize(
    ("momentum", "staleness", "warned"),
    [(0.9, 1, True), (0.9, 2, True), (0.9, 0, False), (0.5, 1, False), (0.5, 2, False), (0.0, 7, False)],
)
def test_momentum_that_staleness_does_not_bear_is_foretold(momentum: float, staleness: int, warned: bool) -> None:
    """As measured: docs/parameter-server.md."""
    text = foretold([{"lr": 0.1}, {"lr": 0.1, "momentum": momentum}], staleness)
    assert (text is not None) is warned
    if text is not None:
        assert f"momentum {momentum:g}" in text
        assert "Take momentum out" in text


def test_an_optimizer_without_momentum_is_not_judged() -> None:
    assert foretold([{"lr": 0.1, "betas": (0.9, 0.999), "momentum": None}], 2) is None
    assert foretold([{"lr": 0.1, "momentum": 1.0}], 2) is None


@pytest.mark.parametrize(("momentum", "rate"), [(0.0, 2.0), (0.5, 3.0), (0.9, 3.8)])
def test_the_largest_rate_for_gradients_that_are_up_to_date(momentum: float, rate: float) -> None:
    """2 (1 + momentum), as Polyak has it."""
    assert largest_rate(momentum, 0) == pytest.approx(rate, rel=1e-3)
    assert largest_rate(0.0, 1) == pytest.approx(1.0, rel=1e-3)
