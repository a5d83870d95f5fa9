"""Hardware catalogue: devices, links and hosts of the TOML files beside this module, by name or alias."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from shoal.errors import HardwareError, nearest
from shoal.hardware.toml_values import checked
from shoal.hardware.values import Device, Link

_BESIDE = ("like", "aliases", "match", "host", "reach")  # keys of an entry that are not the value's


@dataclass(frozen=True)
class Host:
    """A host of the catalogue: its devices, joined by `within`, and `ports` of the network link `between`."""

    name: str
    device: str
    devices: int
    within: str | None = None
    between: str | None = None
    ports: int = 1
    aliases: Sequence[str] = ()
    mean_hours_between_failures: float | None = None
    source: str = ""


def plain(name: str) -> str:
    """A name as it is compared: without case, hyphens and spaces."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@cache
def devices() -> Mapping[str, Mapping[str, Any]]:
    """The tables of all devices by name, what `like` takes over filled in."""
    return _tables("gpus.toml", "cpus.toml")


@cache
def links() -> Mapping[str, Mapping[str, Any]]:
    """As `devices`, of links."""
    return _tables("links.toml")


@cache
def hosts() -> Mapping[str, Mapping[str, Any]]:
    """As `devices`, of hosts."""
    return _tables("hosts.toml")


def find(name: str, table: Mapping[str, Any]) -> str | None:
    """The entry of `table` that has this name or alias; None where none has."""
    wanted = plain(name)
    return next((known for known in table if wanted in map(plain, names({known: table[known]}))), None)


def entry(what: str, name: str, table: Mapping[str, Any]) -> str:
    """The entry of `table` that has this name or alias. Raises: HardwareError where none has."""
    known = find(name, table)
    if known is None:
        raise unknown(what, name, names(table))
    return known


def names(table: Mapping[str, Any]) -> list[str]:
    """All names and aliases of a table."""
    return [name for known, entry in table.items() for name in (known, *entry.get("aliases", ()))]


def device(name: str) -> Device:
    """A device of the catalogue. Raises: HardwareError where there is none of this name."""
    return checked(Device, described_device(name), f"device {name}")


def link(name: str) -> Link:
    """A link of the catalogue. Raises: HardwareError where there is none of this name."""
    return checked(Link, described_link(name), f"link {name}")


def host(known: str) -> Host:
    """The host of an entry."""
    return Host(**hosts()[known])


def unknown(what: str, name: str, known: list[str]) -> HardwareError:
    """The error for a name that the catalogue lacks."""
    near = nearest(name, known) or nearest(name.upper(), known)
    return HardwareError(
        given=f"{what} {name!r}",
        conflict=f"the catalogue has no {what} of that name{near}",
        remedy="give a name of the catalogue (8xH100, 4x8xA100-80-SXM, 2xcpu), a file ending in .toml, or here",
    )


def described_device(described: Any) -> Any:
    """The table of a device that is described by a name, or by a table; what is neither is left to its reader."""
    return _completed("device", described, devices())


def described_link(described: Any) -> Any:
    """As `described_device`."""
    return _completed("link", described, links())


def _completed(what: str, described: Any, known: Mapping[str, Mapping[str, Any]]) -> Any:
    """A table with what `like` names filled in, and without the keys that only the catalogue has."""
    own = {"like": described} if isinstance(described, str) else described
    if not isinstance(own, dict) or "like" not in own:
        return own
    parent = entry(what, str(own["like"]), known)
    joined = {"name": parent, **_joined(own, known[parent])}
    return {key: value for key, value in joined.items() if key not in _BESIDE}


def _joined(own: Mapping[str, Any], parent: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `parent`; a number that is stated anew needs its own source; "none" takes a value away."""
    sources = {key: text for key, text in parent.get("sources", {}).items() if key not in own}
    joined = {**parent, **own, "sources": sources | own.get("sources", {})}
    return {key: value for key, value in joined.items() if value != "none"}


def _filled(name: str, all_tables: Mapping[str, Any]) -> Mapping[str, Any]:
    table = {"name": name, **all_tables[name]}
    like = table.pop("like", None)
    if like is None:
        return table
    parent = {key: value for key, value in _filled(like, all_tables).items() if key not in ("aliases", "match")}
    return _joined(table, parent)


def _tables(*names: str) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, Any] = {}
    for name in names:
        found |= tomllib.loads(files("shoal.hardware").joinpath(name).read_text(encoding="utf-8"))
    return {name: _filled(name, found) for name in found}
