"""Shares of grains by the ranks' speeds: fewer grains for a slow rank, and the same training run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Run, run

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'unequal.py'}:job"
SLOW_STEPS = {"first": 10, "until": 60, "steps": 180}


def balances(ended: Ended) -> list[dict[str, Any]]:
    lines = (ended.out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "rebalanced"]


def shares(out: Path) -> Any:
    return tomllib.loads((out / "plan.toml").read_text(encoding="utf-8"))["layout"]["shares"]


def test_a_rank_that_becomes_slow_gets_fewer_grains_and_then_its_own_back(tmp_path: Path) -> None:
    one = run(Run(JOB, tmp_path / "one", 1, exact=True, settings=SLOW_STEPS)).expect(0)
    two = run(Run(JOB, tmp_path / "two", 2, exact=True, arguments=("--shares", "by-speed"), settings=SLOW_STEPS))
    slowed, *_, recovered = balances(two.expect(0))
    assert 10 < slowed["step"] <= 60
    assert slowed["before"] == [6, 6]
    assert slowed["after"][0] > 6 > slowed["after"][1]
    assert sum(slowed["after"]) == 12
    assert slowed["seconds_per_grain"][1] > slowed["seconds_per_grain"][0]
    assert recovered["step"] > 60
    assert recovered["after"][1] > slowed["after"][1]
    assert two.result["weights_sha256"] == one.result["weights_sha256"]
    assert two.result["sample_digest"] == one.result["sample_digest"]


def test_a_resumed_run_begins_with_the_shares_that_it_had(tmp_path: Path) -> None:
    whole = {"first": 1, "until": 100, "steps": 60}
    by_speed = ("--shares", "by-speed")
    first = run(Run(JOB, tmp_path / "two", 2, exact=True, arguments=(*by_speed, "--steps", "40"), settings=whole))
    assert balances(first.expect(0))
    had = shares(tmp_path / "two")
    assert had[0] > had[1]
    again = run(Run(JOB, tmp_path / "two", None, arguments=("--resume", "--steps", "60"))).expect(0)
    assert f"shares {had[0]}:{had[1]}" in again.output
    one = run(Run(JOB, tmp_path / "one", 1, exact=True, settings=whole)).expect(0)
    assert again.result["weights_sha256"] == one.result["weights_sha256"]
