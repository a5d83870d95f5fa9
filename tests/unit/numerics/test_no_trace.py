"""State that a look restores."""

from __future__ import annotations

from shoal.numerics.no_trace import NoTrace


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
