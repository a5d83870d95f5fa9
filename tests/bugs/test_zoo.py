"""Every bug of the zoo is caught, and the first divergence names its phase and module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.bugs.zoo import ZOO, Bug

import shoal
from shoal.training.preflight import judged
from shoal.verification.forked import trace_forked
from shoal.verification.judge import Verdict, judge_traces


def verdict_on(bug: Bug, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """The ranks have the bug, the references have not."""
    job = bug.job()
    axis = "shard" if "shard" in bug.sections else "data"
    plan = shoal.Plan().with_sections(layout={axis: bug.ranks}, **bug.sections)
    plan = judged(job, plan).plan
    with monkeypatch.context() as patch:
        bug.plant(patch)
        trace_forked(lambda: job, plan, folder, 3)
    return judge_traces(job, plan, folder)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ZOO)
def test_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = ZOO[name]
    verdict = verdict_on(bug, tmp_path, monkeypatch)
    assert not verdict.verified, verdict.render()
    first = verdict.failed[0]
    assert first.phase == bug.phase, verdict.render()
    assert re.fullmatch(bug.name, first.name), verdict.render()
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.causes, verdict.render()
