"""Conversion of hardware values from and to TOML's types, key by key; an error lists every mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from typing import Any, TypeVar

from shoal.errors import HardwareError, nearest
from shoal.hardware.values import Curve, Device, Link

T = TypeVar("T", Device, Link)


class _WrongError(Exception):
    """What a value should have been."""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise _WrongError("a number of at least 0")
    return float(value)


def _integer(value: Any) -> int:
    if _number(value) != int(value):
        raise _WrongError("a whole number")
    return int(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongError("true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongError("a text")
    return value


def _curve(value: Any) -> Curve:
    wanted = _WrongError("a list of [size, fraction], the sizes above 0 and growing")
    if not isinstance(value, list) or not value or any(not isinstance(p, list) or len(p) != 2 for p in value):
        raise wanted
    points = tuple((_number(size), _number(fraction)) for size, fraction in value)
    sizes = [size for size, _ in points]
    if sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
        raise wanted
    return Curve(points)


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise _WrongError("two whole numbers")
    return _integer(value[0]), _integer(value[1])


def _table(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def reader(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _WrongError("a table")
        return {key: read(inner) for key, inner in value.items()}

    return reader


# By the annotation of the field.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": _text,
    "int": _integer,
    "float": _number,
    "float | None": _number,
    "bool": _truth,
    "Curve": _curve,
    "tuple[int, int]": _pair,
    "Mapping[str, str]": _table(_text),
    "Mapping[str, float]": _table(_number),
    "Mapping[str, Curve]": _table(_curve),
    "Mapping[str, Mapping[str, float]]": _table(_table(_number)),
}


class Reading:
    """Reader of one document; collects mistakes under the names of their keys."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.mistakes: list[str] = []

    def value(self, kind: type[T], where: str, table: Mapping[str, Any]) -> T | None:
        """A Device or a Link from its table; None, and the mistakes noted, where that is not possible."""
        known = {field.name: field for field in fields(kind)}
        self.unknown(where, table, list(known))
        found = {name: self.field(f"{where}.{name}", known[name], table[name]) for name in known if name in table}
        missing = [name for name, field in known.items() if _is_needed(field) and name not in table]
        if missing:
            self.mistakes.append(f"{where}: {', '.join(missing)} is missing")
            return None
        return kind(**found)

    def field(self, where: str, field: Field[Any], value: Any) -> Any:
        """The value of a field; None where it is wrong."""
        return self.read(where, _READERS[str(field.type)], value)

    def read(self, where: str, reader: Callable[[Any], Any], value: Any) -> Any:
        """The result of `reader` for a value; None where it is wrong."""
        try:
            return reader(value)
        except _WrongError as wrong:
            self.mistakes.append(f"{where} = {_short(value)} is not {wrong}")
            return None

    def unknown(self, where: str, table: Mapping[str, Any], known: list[str]) -> None:
        """Notes the keys that nothing reads."""
        self.mistakes += [f"{where}.{key} is unknown{nearest(key, known)}" for key in table if key not in known]

    def refuse(self) -> None:
        """Raises: HardwareError where there were mistakes, with all of them."""
        if self.mistakes:
            raise HardwareError(
                given=self.source,
                conflict="\n".join(self.mistakes),
                remedy="mend these keys; docs/hardware.md describes the format",
            )


def integer(value: Any) -> int:
    """A whole number of at least 1, for `Reading.read`."""
    if _integer(value) < 1:
        raise _WrongError("a whole number of at least 1")
    return int(value)


number, text, numbers = _number, _text, _table(_number)


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def to_table(value: Device | Link) -> dict[str, Any]:
    """The TOML table of a value; what is as by default is left out."""
    table: dict[str, Any] = {}
    for field in fields(value):
        held = getattr(value, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if _is_needed(field) or (held is not None and held != default):
            table[field.name] = _plain(held)
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Curve):
        return [[size, fraction] for size, fraction in value.points]
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
