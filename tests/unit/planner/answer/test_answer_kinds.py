"""A cluster of several kinds of devices: each choice of kinds has a plan or a reason, and none is faster."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from tests.conformance import cases
from tests.unit.planner.models import facts, transformer

from shoal.hardware import cluster
from shoal.planner.answer.answer import answer, question
from shoal.planner.answer.display import Answer
from shoal.planner.answer.outlook import Case, Question
from shoal.planner.predict.workload import Workload
from shoal.planner.search.search import DISTINCT, NothingFitsError, parse
from shoal.planner.search.space import Space, counts
from shoal.plans.plan import Plan


def asked(name: str, aim: str = "fastest", *, width: int = 512, layers: int = 2, grains: int = 12) -> Answer:
    batch, several = 4 * grains, cluster(name)
    profile = transformer(layers=layers, width=width, ffn=4 * width, vocabulary=8000, positions=1024, heads=2)
    limits = replace(facts(grains, layers=layers, heads=2, positions=1024), grain_size=4)
    base = Plan().with_sections(precision={"compute": "float16"})
    kinds = tuple(kind.num_devices for kind in several.kinds)
    space = Space(base, limits, counts(several), kinds=kinds, tensor=False)
    return answer(
        Question(Case(Workload(profile, batch, grains), several, space), 10), parse(aim), "job", None, time.perf_counter
    )


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("2xA100-80+2xH100", ("2xH100", "2xA100-80")),  # in the order of their speed
        ("2xA100-80+1xT4", ("2xA100-80",)),
        ("1xA100-40@400Gb+1xH100@400Gb+1xA100-80@400Gb", ("1xH100@400Gb", "1xA100-80@400Gb", "1xA100-40@400Gb")),
    ],
)
def test_no_choice_of_kinds_is_faster(name: str, chosen: tuple[str, ...]) -> None:
    found = asked(name, width=2048)
    assert len(found.kinds) == 2 ** (name.count("+") + 1) - 1
    assert found.plan.prediction["cluster"] == (name if len(chosen) == name.count("+") + 1 else "+".join(chosen))
    assert tuple(found.plan.prediction.get("kinds", dict.fromkeys(chosen))) == chosen
    for one in found.kinds:
        if one.best is not None:
            assert found.chosen.seconds <= one.best.seconds * (1 + DISTINCT)
        else:
            assert one.over is not None
            assert one.over >= found.chosen.seconds
    fastest = sorted(found.kinds, key=lambda one: one.best.seconds if one.best is not None else math.inf)
    for one in fastest[:3]:  # each has a row
        assert f"  {' and '.join(one.names)}: " in str(found)
    assert "kinds" in str(found)


def test_kinds_without_room_are_named() -> None:
    with pytest.raises(NothingFitsError) as caught:
        asked("1x4090+1x3090", width=8192, layers=16)
    said = str(caught.value)
    for names in ("1x4090 and 1x3090: no layout fits", "1x4090: no layout fits", "1x3090: no layout fits"):
        assert names in said


def test_a_kind_that_is_too_small_alone_is_said() -> None:
    found = asked("1xA100-80+1x3090", width=4096, layers=8)
    alone = {one.names: one for one in found.kinds}
    assert alone["1x3090",].best is None
    assert "GiB more" in alone["1x3090",].reason
    assert "1x3090: no plan" in str(found)


def test_grains_that_keep_shares_from_the_ideal_are_said_with_a_better_number() -> None:
    found = asked("1xH100@400Gb+1xA100-80@400Gb", width=2048, grains=9)
    assert found.plan.layout.shares[0] == 100
    assert "longer than with ideal shares, Job(grains=18) suits them" in str(found)


def test_a_kind_without_the_dtype_of_compute_is_said() -> None:
    narrow = Plan().with_sections(precision={"compute": "bfloat16"})
    (found,) = (
        note
        for note in question(cases.job(), narrow, "1xA100-80+1xV100-SXM2-32", None).case.work.profile.notes
        if "bfloat16" in note
    )
    assert found == "V100-SXM2-32: no products in bfloat16, so they are priced in float32"
