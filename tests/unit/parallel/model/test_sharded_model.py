"""Slices of tensors that several ranks have: who writes which."""

from __future__ import annotations

from shoal.parallel.model.sharded_model import first_holders


def test_each_different_part_has_one_holder() -> None:
    told = [{"w": ["f", [4], [[[0, 2]]]]}, {}, {"w": ["f", [4], [[[2, 4]]]]}, {"w": ["f", [4], [[[0, 2]]]]}]
    assert first_holders(told, "w") == [0, 2]
