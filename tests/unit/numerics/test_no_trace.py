"""State that a look restores."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.numerics.no_trace import NoTrace
from shoal.numerics.python_state import is_plain


class Slotted:
    """A loss whose class has no dict of attributes."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1

    def __call__(self) -> None:
        del self.count


def test_a_deleted_attribute_of_a_class_with_slots_is_restored() -> None:
    loss = Slotted()
    with NoTrace(None, {"loss": loss}) as no_trace:
        loss()
        assert [change.name for change in no_trace.changes()] == ["loss.count"]
    assert loss.count == 1


def test_a_tensor_inside_vmap_has_no_memory_of_its_own() -> None:
    """As a parameter has where functional_call puts a batched one in its place."""
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(is_plain(x))
        return x

    torch.vmap(look)(torch.zeros(2, 3))
    assert seen == [False]
    assert is_plain(torch.zeros(2, 3))
