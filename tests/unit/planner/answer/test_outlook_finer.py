"""Where grains keep a plan poor, or from fitting, the answer says so first, with the number and what it brings."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.conformance import cases
from tests.unit.planner.models import facts, gpus, transformer

from shoal.planner.answer.answer import answer, question
from shoal.planner.answer.display import show
from shoal.planner.answer.outlook import Case, Question, finer
from shoal.planner.predict.workload import Workload
from shoal.planner.search.search import Aim, NothingFitsError, choose
from shoal.planner.search.space import Space
from shoal.plans.plan import Plan

BATCH, HEADS, LAYERS, POSITIONS = 64, 4, 8, 512
PROFILE = transformer(layers=LAYERS, width=1024, ffn=4096, vocabulary=4096, positions=POSITIONS, heads=HEADS)


def case(grains: int, devices: int = 4, memory_bytes: int | None = None, **space: Any) -> Case:
    cluster = gpus(1, devices)
    if memory_bytes is not None:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    known = facts(grains, layers=LAYERS, heads=HEADS, positions=POSITIONS)
    return Case(Workload(PROFILE, BATCH, grains), cluster, Space(Plan(), known, (devices,), **space))


def nothing_fits(one: Case) -> bool:
    try:
        choose(one.search(), Aim())
    except NothingFitsError:
        return True
    return False


def said(one: Case) -> str:
    out = io.StringIO()
    found = answer(Question(one, 10), Aim(), "job", None, time.perf_counter)
    show(found, Console(file=out, width=400), more=True)
    return out.getvalue()


def test_a_poor_plan_is_told_with_the_number_that_mends_it() -> None:
    one = case(2, devices=8)
    poor = choose(one.search(), Aim()).chosen
    found = finer(one, Aim(), poor)
    assert found is not None
    assert found.candidate.seconds < poor.seconds / 1.05
    again = choose(case(found.num_grains, devices=8).search(), Aim()).chosen
    assert again.seconds <= found.candidate.seconds * 1.01, "what is promised is what the number brings"
    first, _, rest = said(one).partition("In short\n")
    lines = rest.splitlines()
    assert f"2 grains limit it: Job(grains={found.num_grains}) allows " in first
    assert lines[1].startswith("The number of grains keeps the job from a better plan: 2 of 32 samples")
    assert f"Job(grains={found.num_grains}): grains of {BATCH // found.num_grains} bring" in lines[2]
    assert lines[3].startswith("grains: 2 (32 samples each; ")


def test_nothing_that_fits_is_told_with_the_number_that_does() -> None:
    peak = choose(case(1).search(), Aim("fastest")).chosen.prediction.peak_bytes
    tight = next(m for m in (int(peak * 0.95**n) for n in range(40)) if nothing_fits(case(1, memory_bytes=m)))
    with pytest.raises(NothingFitsError) as caught:
        answer(Question(case(1, memory_bytes=tight), 10), Aim(), "job", None, time.perf_counter)
    assert caught.value.conflict.startswith(
        "the number of grains keeps the job from fitting: 1 of 64 samples, of which"
    )
    assert caught.value.remedy.startswith("write Job(grains=")
    number = int(caught.value.remedy.partition("grains=")[2].partition(")")[0])
    assert not nothing_fits(case(number, memory_bytes=tight)), "what is promised is what the number brings"
    with pytest.raises(NothingFitsError) as tiny:
        answer(Question(case(1, memory_bytes=1 << 20), 10), Aim(), "job", None, time.perf_counter)
    assert "grains" not in tiny.value.conflict, "no number of them would help"


def test_grains_are_not_blamed_where_they_are_not_the_cause() -> None:
    assert finer(case(BATCH), Aim(), choose(case(BATCH).search(), Aim()).chosen) is None, "they have a sample each"
    alone = case(8, devices=1)
    assert finer(alone, Aim(), choose(alone.search(), Aim()).chosen) is None, "a microbatch has several"
    kept_apart = case(2, devices=8, max_grains=1)
    assert finer(kept_apart, Aim(), choose(kept_apart.search(), Aim()).chosen) is None, "the loss compares samples"
    assert "The number of grains keeps" not in said(alone)


@pytest.mark.parametrize(("batch", "grains"), [(3, 3), (8, 8), (16, 8)])
def test_a_step_has_no_more_grains_than_samples(batch: int, grains: int) -> None:
    """Three samples are priced as three, and not as eight grains of one."""
    asked = question(cases.job(global_batch=batch), Plan(), "1xH100", None)
    assert (asked.case.work.num_grains, asked.case.space.facts.num_grains) == (grains, grains)
    assert asked.case.work.grain_size * grains == batch
