"""What a plan with servers excludes, what has no effect, and how many processes it asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.plans.checking import check

from shoal.errors import PlanError, SettingWarning
from shoal.plans.legal import SERVED, ModelFacts, conflicts, notes
from shoal.plans.plan import Plan
from shoal.plans.resolve import complete

FACTS = ModelFacts(num_grains=8, grain_size=4)


def served(mode: str = "synchronous", **sections: dict[str, Any]) -> Plan:
    layout = {"data": 4, **sections.pop("layout", {})}
    server = {"mode": mode, **sections.pop("server", {})}
    return Plan().with_sections(layout=layout, server=server, **sections)


EXCLUDED = [
    *(
        (
            served(layout={axis: 2}),
            f'layout.{axis} = 2, server.mode = "synchronous"',
            f"layout.{axis} = 1" + (" and a larger layout.data" if axis != "expert" else ""),
        )
        for axis in ("shard", "tensor", "pipeline", "context", "expert")
    ),
    (
        served("asynchronous", execution={"exact": True}),
        'server.mode = "asynchronous", execution.exact = true',
        'server.mode = "synchronous", or execution.exact = false',
    ),
    (
        served("bounded", execution={"exact": True}),
        'server.mode = "bounded", execution.exact = true',
        'server.mode = "synchronous"',
    ),
    (served(collectives={"compression": "int8"}), 'collectives.compression = "int8"', 'compression = "none"'),
    (served(execution={"compile": "default"}), 'execution.compile = "default"', 'execution.compile = "none"'),
    (served(precision={"compute": "float16", "loss_scale": "dynamic"}), "precision.loss_scale", "bfloat16"),
    (served(memory={"shared": True}), "memory.shared = true", "memory.shared = false"),
    (served(data={"workers": 2}), "data.workers = 2", "data.workers = 0"),
    (served(layout={"data": 2, "shares": [2, 1]}), "layout.shares = [2, 1]", "no layout.shares"),
]


@pytest.mark.parametrize(("plan", "given", "remedy"), EXCLUDED)
def test_settings_that_exclude_each_other(plan: Plan, given: str, remedy: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(plan, FACTS)
    assert given in caught.value.given
    assert remedy in caught.value.remedy


def test_each_row_is_tried() -> None:
    assert [rule for rule in SERVED if not any(rule.applies(plan) for plan, _, _ in EXCLUDED)] == []
    assert not any(rule.applies(plan) for rule in SERVED for plan in (Plan(), served(), served("bounded")))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (served(server={"staleness": 3}), 'server.staleness = 3: no effect, since server.mode is not "bounded"'),
        (Plan().with_sections(server={"num_servers": 2}), 'server.num_servers = 2: no effect, since server.mode is "n'),
        (served(collectives={"all_reduce": "ring"}), 'collectives.all_reduce = "ring": no effect, since gradients are'),
    ],
)
def test_what_has_no_effect_warns(plan: Plan, text: str) -> None:
    with pytest.warns(SettingWarning) as caught:
        check(plan, FACTS)
    assert [text in str(warning.message) for warning in caught] == [True]


def test_a_bound_that_keeps_workers_waiting_is_noted() -> None:
    (note,) = notes(served("bounded", server={"staleness": 1}), FACTS)
    assert "at most 2 of 4 workers compute at a time; server.staleness = 3 or more" in note
    assert list(notes(served("bounded", server={"staleness": 3}), FACTS)) == []


@pytest.mark.parametrize(
    ("density", "ranks", "noted"), [(0.1, 9, False), (0.1, 10, True), (0.5, 2, True), (0.4, 2, False)]
)
def test_a_density_that_saves_nothing_is_noted(density: float, ranks: int, noted: bool) -> None:
    facts = ModelFacts(num_grains=16, grain_size=4)
    plan = Plan().with_sections(
        layout={"data": ranks}, collectives={"compression": "topk"}, compression={"density": density}
    )
    told = list(notes(plan, facts))
    assert [f"below {1 / ranks:.2g} they are" in note for note in told] == [True] * noted
    assert list(notes(plan.with_sections(collectives={"compression": "none"}), facts)) == []


def test_the_processes_of_a_plan() -> None:
    plan = served(server={"num_servers": 2})
    assert (plan.layout.world_size, plan.num_processes) == (4, 7)
    assert Plan().num_processes == 1


def test_a_worker_that_runs_ahead_computes_whole_steps() -> None:
    assert complete(served("synchronous"), 8, 4).batch.grains_per_microbatch == 2
    assert complete(served("asynchronous"), 8, 4).batch.grains_per_microbatch == 8


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        *(({"layout": {axis: 2}}, f"layout.{axis}") for axis in ("tensor", "pipeline", "context")),
        ({"layout": {"data": 2}, "server": {"mode": "synchronous"}}, "server.mode"),
        ({"execution": {"compile": "default"}}, "execution.compile"),
        ({"execution": {"cuda_graph": True}}, "execution.compile"),
        ({"layout": {"data": 2}, "collectives": {"compression": "int8"}}, "collectives.compression"),
    ],
)
def test_a_loss_over_the_global_batch_excludes(sections: dict[str, dict[str, Any]], key: str) -> None:
    plan = Plan().with_sections(**sections)
    keys = [conflict.key for conflict in conflicts(plan, replace(FACTS, has_global_loss=True))]
    assert key in keys
    assert len(keys) == len(conflicts(plan, FACTS)) + 1
    for legal in ({}, {"layout": {"data": 2, "shard": 2, "expert": 2}}, {"execution": {"exact": True}}):
        assert not conflicts(Plan().with_sections(**legal), replace(FACTS, has_global_loss=True))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        *(({"layout": {axis: 2}}, f"layout.{axis}") for axis in ("shard", "tensor", "pipeline", "context")),
        ({"layout": {"data": 2, "expert": 2}}, "layout.expert"),
        ({"layout": {"data": 2}, "server": {"mode": "synchronous"}}, "server.mode"),
        ({"layout": {"data": 2}, "collectives": {"compression": "int8"}}, "collectives.compression"),
        ({"precision": {"compute": "float16", "loss_scale": "dynamic"}}, "precision.loss_scale"),
        ({"execution": {"cuda_graph": True}}, "execution.cuda_graph"),
    ],
)
def test_an_optimizer_with_a_closure_excludes(sections: dict[str, dict[str, Any]], key: str) -> None:
    plan = Plan().with_sections(**sections)
    keys = [conflict.key for conflict in conflicts(plan, replace(FACTS, has_closure=True))]
    assert key in keys
    assert len(keys) == len(conflicts(plan, FACTS)) + 1
    for legal in ({"layout": {"data": 2}}, {"execution": {"exact": True}}, {"execution": {"compile": "default"}}):
        assert not conflicts(Plan().with_sections(**legal), replace(FACTS, has_closure=True))


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline", "context"])
def test_a_search_for_sparse_gradients_leaves_out(axis: str) -> None:
    plan = Plan().with_sections(layout={axis: 2})
    found = [c for c in conflicts(plan, replace(FACTS, has_sparse=True)) if c not in conflicts(plan, FACTS)]
    assert [conflict.key for conflict in found] == [f"layout.{axis}"]
    assert not conflicts(Plan().with_sections(layout={"data": 2}), replace(FACTS, has_sparse=True))
