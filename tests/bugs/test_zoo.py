"""Every bug of the zoo is caught, and the first divergence names its phase and module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.bugs.zoo import ZOO, Bug
from tests.conformance.strategies import ONE_COPY

import shoal
from shoal.training.setup.preflight import judged
from shoal.verification.forked import trace_forked
from shoal.verification.judge import Verdict, judge_traces


def verdict_on(bug: Bug, folder: Path, monkeypatch: pytest.MonkeyPatch, **further: dict[str, Any]) -> Verdict:
    """The ranks have the bug, the references have not; `further`: sections of the plan."""
    job = bug.job()
    axis = "shard" if "shard" in bug.sections else "data"
    layout = {axis: bug.ranks, **bug.sections.get("layout", {})}
    plan = shoal.Plan().with_sections(**{**bug.sections, **further, "layout": layout})
    plan = judged(job, plan).plan
    with monkeypatch.context() as patch:
        bug.plant(patch)
        trace_forked(lambda: job, plan, folder, 3)
    return judge_traces(job, plan, folder)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ZOO)
def test_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(ZOO[name], verdict_on(ZOO[name], tmp_path, monkeypatch))


# What one copy has of its own is in the table already; and its initial values are rank 0's, since there are no others.
DIVIDED = {"shard", "tensor", "pipeline", "memory", "expert"}
ON_DATA = [name for name, bug in ZOO.items() if not DIVIDED & {*bug.sections, *bug.sections.get("layout", {})}]
ON_DATA.remove("initial values by rank")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_DATA)
def test_caught_where_ranks_share_one_copy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(ZOO[name], verdict_on(ZOO[name], tmp_path, monkeypatch, **ONE_COPY))


def assert_caught(bug: Bug, verdict: Verdict) -> None:
    assert not verdict.verified, verdict.render()
    first = verdict.failed[0]
    assert first.phase == bug.phase, verdict.render()
    assert re.fullmatch(bug.name, first.name), verdict.render()
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.causes, verdict.render()
