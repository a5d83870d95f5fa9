"""A plan's layout in words."""

from typing import Any

import pytest

from shoal.plans import Plan
from shoal.plans.plan import described, layout_name

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "one device"),
    ({"layout": {"data": 2, "shard": 2}, "shard": {"level": "optimizer"}}, "data 2, shard 2, ZeRO-1"),
    ({"layout": {"pipeline": 2}}, "pipeline 2, 1f1b"),
    (
        {"layout": {"pipeline": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}},
        "pipeline 2, interleaved_1f1b x 2",
    ),
    ({"layout": {"tensor": 2}, "tensor": {"sequence": True}}, "tensor 2, sequence"),
    ({"memory": {"recompute": "full"}}, "one device, recompute full"),
    ({"layout": {"data": 2}, "server": {"mode": "synchronous"}}, "data 2, synchronous with 1 server"),
    (
        {"layout": {"data": 3}, "server": {"mode": "bounded", "staleness": 1, "num_servers": 2}},
        "data 3, bounded (staleness 1) with 2 servers",
    ),
]


@pytest.mark.parametrize(("sections", "expected"), CASES)
def test_the_layout_and_who_serves_are_named(sections: dict[str, Any], expected: str) -> None:
    assert described(Plan().with_sections(**sections)) == expected


NAMES: list[tuple[dict[str, Any], str]] = [
    ({}, "1 device"),
    ({"layout": {"data": 8}}, "dp8"),
    ({"layout": {"shard": 8, "tensor": 2, "pipeline": 4}}, "dp8 zero3 tp2 pp4"),
    ({"layout": {"data": 2, "shard": 4}, "shard": {"level": "optimizer"}}, "dp8 zero1/4"),
    ({"layout": {"context": 2, "tensor": 2}, "tensor": {"sequence": True}}, "cp2 tp2+sp"),
    ({"layout": {"data": 4, "expert": 2}}, "dp4 ep2"),
    ({"layout": {"pipeline": 2}, "pipeline": {"schedule": "zero_bubble"}}, "pp2 zero_bubble"),
    (
        {"layout": {"pipeline": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}},
        "pp2x2 interleaved",
    ),
    ({"layout": {"data": 2}, "memory": {"shared": True, "recompute": "full"}}, "dp2 shared rc"),
    ({"memory": {"recompute": "selective"}, "execution": {"cuda_graph": True}}, "1 device graph rc-part"),
    ({"layout": {"data": 2}, "server": {"mode": "asynchronous", "num_servers": 2}}, "dp2 ps2 asynchronous"),
]


@pytest.mark.parametrize(("sections", "expected"), NAMES)
def test_a_table_names_a_layout_briefly(sections: dict[str, Any], expected: str) -> None:
    assert layout_name(Plan().with_sections(**sections)) == expected
