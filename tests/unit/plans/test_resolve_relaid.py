"""Layouts for another number of devices: the product fits, and the axes stay in use where there is room."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.plans.plan import AXES, Plan
from shoal.plans.resolve import relaid


def plan(**layout: int) -> Plan:
    return Plan().with_sections(layout=layout)


def degrees(found: Plan) -> dict[str, int]:
    """Those above one."""
    return {axis: found.layout.degree(axis) for axis in AXES if found.layout.degree(axis) > 1}


@pytest.mark.parametrize(
    ("layout", "devices", "wanted"),
    [
        ({"data": 2}, 3, {"data": 3}),
        ({"shard": 2}, 1, {}),
        ({"shard": 2}, 3, {"shard": 3}),
        ({"shard": 2}, 4, {"data": 2, "shard": 2}),
        ({"shard": 8}, 4, {"shard": 4}),
        ({"tensor": 4}, 2, {"tensor": 2}),
        ({"tensor": 4, "data": 2}, 4, {"tensor": 4}),
        ({"pipeline": 2, "shard": 2}, 2, {"pipeline": 2}),
        ({"pipeline": 4, "shard": 2}, 4, {"pipeline": 2, "shard": 2}),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 1, {}),
        ({"tensor": 2, "shard": 4}, 6, {"tensor": 2, "shard": 3}),
    ],
)
def test_degrees(layout: dict[str, int], devices: int, wanted: dict[str, int]) -> None:
    assert degrees(relaid(plan(**layout), devices)) == wanted


@pytest.mark.parametrize("devices", range(1, 25))
def test_the_product_is_the_number(devices: int) -> None:
    for layout in ({"shard": 4, "tensor": 2}, {"pipeline": 3, "data": 2}, {"context": 2, "shard": 3, "data": 2}):
        found = relaid(plan(**layout), devices).layout
        assert found.world_size == devices
        used = {axis for axis, degree in layout.items() if degree > 1} | {"data"}
        assert math.prod(found.degree(axis) for axis in used) == devices


@pytest.mark.parametrize(
    ("layout", "devices", "expert"),
    [
        ({"data": 8, "expert": 4}, 4, 4),
        ({"data": 8, "expert": 4}, 6, 2),
        ({"data": 4, "expert": 4}, 3, 1),
        ({"shard": 4, "expert": 4}, 2, 2),
        ({"pipeline": 2, "data": 4, "expert": 4}, 4, 2),
    ],
)
def test_fewer_ranks_divide_experts_by_a_divisor(layout: dict[str, int], devices: int, expert: int) -> None:
    found = relaid(plan(**layout), devices).layout
    assert (found.world_size, found.expert) == (devices, expert)


def test_what_was_chosen_for_other_degrees_is_left_open() -> None:
    sections: dict[str, Any] = {
        "batch": {"grains_per_microbatch": 3},
        "pipeline": {"split": ["a", "b", "c"], "schedule": "gpipe"},
        "precision": {"compute": "bfloat16"},
    }
    old = plan(pipeline=4).with_sections(**sections)
    found = relaid(old, 2)
    assert (found.batch.grains_per_microbatch, found.pipeline.split, found.pipeline.schedule) == (0, (), "gpipe")
    assert found.precision == old.precision
    assert relaid(old, 1).pipeline == Plan().pipeline
    assert relaid(old, 4) == old
    assert relaid(old, 8).pipeline == old.pipeline


def test_other_devices_begin_with_equal_shares() -> None:
    assert relaid(Plan().with_sections(layout={"data": 2, "shares": [2, 1]}), 3).layout.shares == ()
