"""Hardware in TOML: devices, links and hosts of the catalogue beside this module, by name or alias, and cluster files.

A cluster file has exact keys; its devices and links are given in full, by name, or as what differs from a named one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from shoal.errors import HardwareError, nearest
from shoal.hardware.power import CAP, capped
from shoal.hardware.values import Cluster, Device, Link, checked, to_table

_CATALOGUED = ("like", "aliases", "match", "host", "reach")  # keys of an entry that are not the value's


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
    """A device of the catalogue, capped where the name ends in "@500W". Raises: HardwareError where there is none."""
    name, _, cap = name.partition("@")
    found = checked(Device, described("device", name), f"device {name}")
    if not cap:
        return found
    watts = CAP.fullmatch(cap)
    if watts is None:
        raise HardwareError(
            given=f"device {name}@{cap}",
            conflict=f"{cap!r} is no power cap",
            remedy=f"write watts behind the @, as {name}@500W",
        )
    return capped(found, float(watts[1]))


def link(name: str) -> Link:
    """A link of the catalogue. Raises: HardwareError where there is none of this name."""
    return checked(Link, described("link", name), f"link {name}")


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


def described(what: str, given: Any) -> Any:
    """The table of a "device" or a "link" that is given by name, or by a table; what is neither is left to its reader.

    What `like` names is filled in, and without the keys that only the catalogue has. A device's name may have a cap.
    """
    own = {"like": given} if isinstance(given, str) else given
    if not isinstance(own, dict) or "like" not in own:
        return own
    if what == "device" and "@" in str(own["like"]):
        return _joined({key: value for key, value in own.items() if key != "like"}, to_table(device(own["like"])))
    known = devices() if what == "device" else links()
    parent = entry(what, str(own["like"]), known)
    joined = {"name": parent, **_joined(own, known[parent])}
    return {key: value for key, value in joined.items() if key not in _CATALOGUED}


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


SCHEMA = 1
# Not the cluster's: `shoal bench` adds for people the spread of each measurement, and where and when it ran.
_BESIDE = ("schema", "measurements", "machine")
_DESCRIBED = {"device": "device", "within": "link", "between": "link"}
_DESCRIBED_BY_NAME = {"alternatives": "device", "algorithms": "link"}


def load(path: Path | str) -> Cluster:
    """The cluster in a TOML file. Raises: HardwareError where it is missing, is no TOML, or has mistakes (all told)."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(
            given=str(path),
            conflict=f"the file cannot be read: {error.strerror}",
            remedy="give the path of a cluster file, or a name such as 8xH100",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(
            given=str(path), conflict=f"it is not TOML: {error}", remedy="mend the file at that place"
        ) from None
    if document.get("schema", SCHEMA) != SCHEMA:
        raise HardwareError(
            given=str(path),
            conflict=f"schema = {document['schema']!r} is not {SCHEMA}",
            remedy="write it as docs/hardware.md describes the format",
        )
    table = {"name": Path(path).stem} | {key: value for key, value in document.items() if key not in _BESIDE}
    table |= {key: described(what, table[key]) for key, what in _DESCRIBED.items() if key in table}
    for key, what in _DESCRIBED_BY_NAME.items():
        if isinstance(table.get(key), dict):
            table[key] = {name: described(what, value) for name, value in table[key].items()}
    return checked(Cluster, table, str(path))


def dump(cluster: Cluster, beside: Mapping[str, Any] | None = None) -> str:
    """The cluster as TOML text, which `load` reads back; `beside` has tables for people that it passes over."""
    import tomli_w

    return tomli_w.dumps({"schema": SCHEMA, **to_table(cluster), **(beside or {})})
