"""Conversion of hardware values from and to TOML's types; an error lists every mistake."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from shoal.errors import HardwareError, nearest
from shoal.hardware.values import Cluster, Device, Link

T = TypeVar("T", Cluster, Device, Link)
# By the kind of pydantic's error; others say it themselves.
_WANTED = {
    "dataclass_type": "a name of the catalogue or a table",
    "dict_type": "a table",
    "tuple_type": "a list",
    "string_type": "a text",
    "bool_type": "true or false",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
}
# What a cluster's tables are of.
_KINDS = {"device": Device, "alternatives": Device, "within": Link, "between": Link, "algorithms": Link}


def checked(kind: type[T], table: Mapping[str, Any], source: str) -> T:
    """The value in a table. Raises: HardwareError with all of its mistakes, each under the name of its key."""
    try:
        value: T = _adapter(cast(Hashable, kind)).validate_python(table)
        return value
    except ValidationError as error:
        raise HardwareError(
            given=source,
            conflict="\n".join(_mistake(item, kind) for item in error.errors(include_url=False)),
            remedy="mend these keys; docs/hardware.md describes the format",
        ) from None


def to_table(cluster: Cluster) -> dict[str, Any]:
    """The TOML table of a cluster; what is as by default is left out."""
    table: dict[str, Any] = _adapter(Cluster).dump_python(cluster, mode="json", exclude_defaults=True)
    return table


@cache  # who only asks what is here reads no table
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _mistake(item: Any, kind: type[Any]) -> str:
    path = [str(part) for part in item["loc"] if part != "[key]"]
    where = ".".join(path)
    if item["type"] == "missing":
        return f"{where} is missing"
    if item["type"] == "unexpected_keyword_argument":
        known = [field.name for field in fields(_KINDS.get(path[0], kind) if path[1:] else kind)]
        return f"{where} is unknown{nearest(path[-1], known)}"
    said = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{where} = {item['input']!r:.60} is not {_WANTED.get(item['type'], said)}"
