"""Operators by themselves: named as a profile names them, with the bytes that it counts for them."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.planner.measure.operators import operators

MATRIX = 512 * 256 * 4
IMAGES = 8 * 64 * 16 * 16 * 4
PARAMETERS = (2**20 + 2**20 + 2**18 + 2**10) * 4
FOUND = {probe.name.removeprefix("operator."): probe for probe in operators()}


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("aten.gelu", 2 * MATRIX),
        ("aten.gelu_backward", 3 * MATRIX),
        ("aten.bernoulli_", MATRIX),
        ("aten.avg_pool2d", IMAGES + IMAGES // 4),
        ("aten.clone", 2 * MATRIX),
        # Read for the norm, read and written for the factor; parameters and state read and written, gradients read.
        ("update", (1 + 2 + 5) * PARAMETERS),
    ],
)
def test_the_work_is_what_a_profile_counts(name: str, num_bytes: int) -> None:
    assert FOUND[name].work == pytest.approx(num_bytes, rel=1e-3)


def test_each_operator_once_and_ready_to_be_called() -> None:
    assert len(FOUND) == len(list(operators()))
    for probe in FOUND.values():
        probe.make()()


def test_pools_are_measured_in_both_memory_formats() -> None:
    for name in ("aten.max_pool2d_with_indices", "aten.avg_pool2d", "aten.max_pool2d_with_indices_backward"):
        probe = FOUND[f"{name}_channels_last"]
        assert probe.work == FOUND[name].work
        call: Any = probe.make()
        assert call.args[0].stride()[1] == 1
