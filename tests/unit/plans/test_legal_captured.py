"""Refusals of plans whose step can never be captured in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import PlanError
from shoal.plans.legal import ModelFacts, conflicts, refuse
from shoal.plans.plan import Plan, described
from shoal.plans.resolve import judge
from shoal.plans.rules import CAPTURED, value

FACTS = ModelFacts(8, 4)
# Sections besides execution.cuda_graph, and what is said.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    **{
        f"{axis} axis": ({"layout": {axis: 2}}, f"execution.cuda_graph = true, layout.{axis} = 2", f"layout.{axis} = 1")
        for axis in ("tensor", "pipeline", "context")
    },
    "experts": (
        {"layout": {"data": 2, "expert": 2}},
        "execution.cuda_graph = true, layout.expert = 2",
        "layout.expert = 1",
    ),
    "ZeRO-3": (
        {"layout": {"shard": 2}, "shard": {"level": "parameters"}},
        'shard.level = "parameters"',
        'shard.level = "optimizer"',
    ),
    "compressed": (
        {"layout": {"data": 2}, "collectives": {"compression": "int8"}},
        'collectives.compression = "int8"',
        'collectives.compression = "none"',
    ),
    "servers": (
        {"server": {"mode": "synchronous"}, "layout": {"data": 2}},
        'execution.cuda_graph = true, server.mode = "synchronous"',
        'server.mode = "none"',
    ),
    "exact": ({"execution": {"exact": True}}, "execution.exact = true", "execution.exact = false"),
    "compiled": ({"execution": {"compile": "reduce-overhead"}}, "reduce-overhead", 'execution.compile = "default"'),
    "recomputed": ({"memory": {"recompute": "full"}}, 'memory.recompute = "full"', 'memory.recompute = "none"'),
    "narrow": ({"precision": {"parameters": "bfloat16"}}, "bfloat16", 'precision.parameters = "float32"'),
}


def of(sections: dict[str, Any]) -> Plan:
    execution = {"cuda_graph": True, **sections.get("execution", {})}
    return Plan().with_sections(**{**sections, "execution": execution})


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_never_be_captured_is_refused_in_three_beats(name: str) -> None:
    sections, given, remedy = REFUSED[name]
    own = [found for found in conflicts(of(sections), FACTS) if found.key == "execution.cuda_graph"]
    assert len(own) == 1, own
    with pytest.raises(PlanError) as error:
        refuse(own)
    assert given in error.value.given
    assert remedy in error.value.remedy
    assert "execution.cuda_graph = false" in error.value.remedy
    without = of(sections).with_sections(execution={"cuda_graph": False})
    assert not [found for found in conflicts(without, FACTS) if found.key == "execution.cuda_graph"]


def test_each_row_is_tried() -> None:
    assert [rule for rule in CAPTURED if not any(rule.applies(of(s)) for s, _, _ in REFUSED.values())] == []
    for rule in CAPTURED:
        for key in rule.keys:
            value(Plan(), key)


def test_a_plan_of_one_device_is_judged_and_described() -> None:
    plan = judge(of({"precision": {"compute": "bfloat16"}}), FACTS).plan
    assert plan.batch.grains_per_microbatch == 8
    assert "CUDA graph" in described(plan)
    assert "CUDA graph" not in described(Plan())
