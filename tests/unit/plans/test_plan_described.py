"""A plan's layout in words."""

from typing import Any

import pytest

from shoal.plans import Plan
from shoal.plans.plan import described

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
