"""Differences between two descriptions of a job, a plan or a run: for resumes, certificates and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple


class Absent(Enum):
    """Stands for a value that only the other description has."""

    ABSENT = "nothing"

    def __repr__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT


class Difference(NamedTuple):
    """A value that differs. Names of nested values have dots."""

    name: str
    mine: Any
    theirs: Any


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> list[Difference]:
    """Return the values that differ between two descriptions, each as JSON values."""
    different = []
    for key in {**theirs, **mine}:
        one, other = mine.get(key, ABSENT), theirs.get(key, ABSENT)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            different += differences(one, other, f"{prefix}{key}.")
        elif one != other:
            different.append(Difference(f"{prefix}{key}", one, other))
    return different


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values as one level of dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two results of `code`: one text per file, with its changed definitions."""
    texts = []
    for file in sorted({*before, *now}):
        old, new = before.get(file), now.get(file)
        if old is None or new is None:
            texts.append(f"{file} ({'new' if old is None else 'gone'})")
        elif old != new:
            texts.append(f"{file}: {', '.join(sorted(one.name for one in differences(new, old)))}")
    return texts
