"""Cache of computed results by key, for costs that many plans share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Remembered:
    """Cache by key: the first part names the computation, the other parts are all of its inputs."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Any] = {}

    def once(self, key: tuple[object, ...], compute: Callable[[], _Result]) -> _Result:
        """Return the result of a key. The first call with the key computes the result."""
        try:
            found: _Result = self._found[key]
        except KeyError:
            found = self._found[key] = compute()
        return found
