"""Detection of draws from the global random generators, with one look for each of many stretches of code."""

from __future__ import annotations

from typing import Any

from shoal.numerics.grain_randomness import all_generators


class DrawWatch:
    """Watch over all global generators during stretches of code that follow each other: whether one has drawn.

    What a stretch leaves is what the next one finds, as long as nobody draws between them: one look serves both, of the
    two that each would take. `forget` says that somebody may have. Once it `is_unclear` who has drawn, each stretch
    needs looks of its own.
    """

    def __init__(self) -> None:
        self._left: tuple[Any, ...] | None = None
        self.is_unclear = False

    def begin(self) -> None:
        """A stretch begins."""
        self._is_fresh = self._left is None
        if self._is_fresh:
            self._left = all_generators()

    def end(self) -> bool:
        """Whether anybody has drawn: the stretch, or, where it `is_unclear` from then on, somebody before it."""
        now, before = all_generators(), self._left
        if now == before:
            self.is_unclear = False
            return False
        self._left, self.is_unclear = now, not self._is_fresh
        return True

    def forget(self) -> None:
        """Looks at the beginning of the next stretch too."""
        self._left = None
