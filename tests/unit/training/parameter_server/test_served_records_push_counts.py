"""Every grain once."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from shoal.training.parameter_server.served_records import Arrived, PushCounts, exactly_once
from shoal.training.parameter_server.task_queue import Task


def part(*nodes: tuple[int, int]) -> Arrived:
    return Arrived(Task(0, 0, 1), cast(Any, None), 0, {node: torch.zeros(1) for node in nodes}, [])


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([part((0, 3)), part((3, 8))], True),
        ([part((3, 8)), part((0, 3))], True),
        ([part((0, 1), (1, 2)), part((2, 8))], True),
        ([part((0, 3)), part((4, 8))], False),
        ([part((0, 4)), part((3, 8))], False),
        ([part((0, 3)), part((3, 7))], False),
        ([part((0, 8)), part((0, 8))], False),
        ([part((1, 8))], False),
        ([], False),
    ],
)
def test_exactly_once(parts: list[Arrived], whole: bool) -> None:
    assert exactly_once(parts, 8) is whole


def test_the_histogram_in_order() -> None:
    tally = PushCounts()
    for staleness in (2, 0, 10, 2):
        tally.applied([part((0, 8))], range(8), staleness)
    tally.moved(1, 10, 20)
    tally.moved(1, 1, 2)
    found = tally.to_json()
    assert list(found["staleness"].items()) == [("0", 1), ("2", 2), ("10", 1)]
    assert (found["applied_steps"], found["applied_pushes"], found["applied_grains"]) == (4, 4, 32)
    assert found["workers"] == {"1": {"tasks": 2, "pushed_bytes": 11, "pulled_bytes": 22}}
