"""Detection of draws from the global random generators, with one reading of their states for each stretch of code."""

from __future__ import annotations

from typing import Any

from shoal.numerics.grain_randomness import all_generators


class DrawWatch:
    """Watch over all global generators during consecutive stretches of code; it reports whether any code has drawn.

    The states after one stretch also serve as the states before the next, if no other code draws in between. So a
    stretch takes one reading instead of two. `forget` reports that other code may have drawn. If `is_unclear`, a draw
    may have happened before the stretch, and each stretch needs readings of its own.
    """

    def __init__(self) -> None:
        self._left: tuple[Any, ...] | None = None
        self.is_unclear = False

    def begin(self) -> None:
        """Begin a stretch of code."""
        self._is_fresh = self._left is None
        if self._is_fresh:
            self._left = all_generators()

    def end(self) -> bool:
        """End the stretch. Return whether any code has drawn, earlier code included if the result `is_unclear`."""
        now, before = all_generators(), self._left
        if now == before:
            self.is_unclear = False
            return False
        self._left, self.is_unclear = now, not self._is_fresh
        return True

    def forget(self) -> None:
        """Read the states again at the beginning of the next stretch."""
        self._left = None
