"""Hardware catalogue: devices, links and hosts of the TOML files beside this module, by name or alias."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from shoal.errors import HardwareError, nearest
from shoal.hardware.toml_values import Reading
from shoal.hardware.values import Device, Link

_DEVICE_FILES = ("gpus.toml", "cpus.toml")
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
    aliases: tuple[str, ...] = ()
    mean_hours_between_failures: float | None = None
    source: str = ""


def plain(name: str) -> str:
    """A name as it is compared: without case, hyphens and spaces."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@cache
def devices() -> Mapping[str, Mapping[str, Any]]:
    """The tables of all devices by name, what `like` takes over filled in."""
    found: dict[str, Any] = {}
    for name in _DEVICE_FILES:
        found |= _file(name)
    return {name: _filled(name, found) for name in found}


@cache
def links() -> Mapping[str, Mapping[str, Any]]:
    """The tables of all links by name."""
    found = _file("links.toml")
    return {name: _filled(name, found) for name in found}


@cache
def hosts() -> Mapping[str, Host]:
    """All hosts by name."""
    return {
        name: Host(name=name, **{**table, "aliases": tuple(table.get("aliases", ()))})
        for name, table in _file("hosts.toml").items()
    }


def find(name: str, table: Mapping[str, Any]) -> str | None:
    """The entry of `table` that has this name or alias; None where none has."""
    wanted = plain(name)
    for known, entry in table.items():
        aliases = entry.aliases if isinstance(entry, Host) else entry.get("aliases", ())
        if wanted in {plain(known), *map(plain, aliases)}:
            return known
    return None


def names(table: Mapping[str, Any]) -> list[str]:
    """All names and aliases of a table."""
    found = []
    for known, entry in table.items():
        found += [known, *(entry.aliases if isinstance(entry, Host) else entry.get("aliases", ()))]
    return found


def device(name: str) -> Device:
    """A device of the catalogue. Raises: HardwareError where there is none of this name."""
    known = find(name, devices())
    if known is None:
        raise unknown("device", name, names(devices()))
    return device_of(f"device {known}", {"like": known, "name": known})


def link(name: str) -> Link:
    """A link of the catalogue. Raises: HardwareError where there is none of this name."""
    known = find(name, links())
    if known is None:
        raise unknown("link", name, names(links()))
    return link_of(f"link {known}", {"like": known, "name": known})


def unknown(what: str, name: str, known: list[str]) -> HardwareError:
    """The error for a name that the catalogue lacks."""
    near = nearest(name, known) or nearest(name.upper(), known)
    return HardwareError(
        given=f"{what} {name!r}",
        conflict=f"the catalogue has no {what} of that name{near}",
        remedy="give a name of the catalogue (8xH100, 4x8xA100-80-SXM, 2xcpu), a file ending in .toml, or here",
    )


def device_of(source: str, table: Mapping[str, Any]) -> Device:
    """The device in a table that may take over another's values. Raises: HardwareError."""
    reading = Reading(source)
    found = reading.value(Device, "device", completed("device", table, devices()))
    reading.refuse()
    assert found is not None
    return found


def link_of(source: str, table: Mapping[str, Any]) -> Link:
    """The link in a table that may take over another's values. Raises: HardwareError."""
    reading = Reading(source)
    found = reading.value(Link, "link", completed("link", table, links()))
    reading.refuse()
    assert found is not None
    return found


def completed(what: str, table: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A table with what `like` names filled in, and without the keys that only the catalogue has."""
    like = table.get("like")
    if like is None:
        return dict(table)
    parent = find(str(like), known)
    if parent is None:
        raise unknown(what, str(like), names(known))
    joined = _joined(table, known[parent])
    joined.setdefault("name", parent)
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


def _file(name: str) -> dict[str, Any]:
    return tomllib.loads(files("shoal.hardware").joinpath(name).read_text(encoding="utf-8"))
