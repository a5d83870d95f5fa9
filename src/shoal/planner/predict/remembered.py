"""Results of a computation by key, for costs that many plans share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Remembered:
    """Results by key: a key's first part names what was computed, the others are all that it depends on."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Any] = {}

    def once(self, key: tuple[object, ...], compute: Callable[[], _Result]) -> _Result:
        """The result for a key, which is computed where it is asked for first."""
        try:
            found: _Result = self._found[key]
        except KeyError:
            found = self._found[key] = compute()
        return found
