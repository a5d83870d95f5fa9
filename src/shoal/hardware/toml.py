"""Cluster files in TOML: read with exact keys, devices and links by name or in full, and written whole."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import HardwareError
from shoal.hardware.catalogue import completed, devices, links
from shoal.hardware.toml_values import Reading, integer, number, numbers, text, to_table
from shoal.hardware.values import Cluster, Device, Link

SCHEMA = 1
_NUMBERS = ("storage_bytes_per_second", "mean_hours_between_failures")
# What `shoal bench` adds for people: the spread of each measurement, and where and when it ran.
_FOR_PEOPLE = ("measurements", "machine")
_KEYS = ["schema", "name", "devices_per_host", "num_hosts", "device", "within", "between", "prices"]
_KEYS += ["alternatives", "algorithms"]


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
    return from_mapping(document, str(path))


def from_mapping(document: Mapping[str, Any], source: str) -> Cluster:
    """The cluster in a mapping of TOML's types. Raises: HardwareError with all mistakes."""
    reading = Reading(source)
    reading.unknown("cluster", document, [*_KEYS, "notes", *_NUMBERS, *_FOR_PEOPLE])
    if document.get("schema", SCHEMA) != SCHEMA:
        reading.mistakes.append(f"schema = {document['schema']!r} is not {SCHEMA}")
    device = _device(reading, "device", document.get("device"))
    if "device" not in document:
        reading.mistakes.append("device is missing")
    counts = {
        key: reading.read(key, integer, document[key]) for key in ("devices_per_host", "num_hosts") if key in document
    }
    rates = {key: reading.read(key, number, document[key]) for key in _NUMBERS if key in document}
    found = {
        "within": _link(reading, "within", document.get("within")),
        "between": _link(reading, "between", document.get("between")),
        "prices": reading.read("prices", numbers, document.get("prices", {})),
        "alternatives": _alternatives(reading, document.get("alternatives", {})),
        "algorithms": _algorithms(reading, document.get("algorithms", {})),
        "notes": _notes(reading, document.get("notes", [])),
        "name": reading.read("name", text, document.get("name", Path(source).stem)),
    }
    reading.refuse()
    assert device is not None
    return Cluster(device=device, **found, **counts, **rates)


def _device(reading: Reading, where: str, value: Any) -> Device | None:
    found = _described(reading, where, value)
    return None if found is None else reading.value(Device, where, completed("device", found, devices()))


def _link(reading: Reading, where: str, value: Any) -> Link | None:
    found = _described(reading, where, value)
    return None if found is None else reading.value(Link, where, completed("link", found, links()))


def _described(reading: Reading, where: str, value: Any) -> dict[str, Any] | None:
    """A table, of which a name alone is short for; None where there is nothing, or a mistake."""
    if isinstance(value, str):
        return {"like": value}
    if value is None or isinstance(value, dict):
        return value
    reading.mistakes.append(f"{where} is neither a name of the catalogue nor a table")
    return None


def _alternatives(reading: Reading, value: Any) -> dict[int, Device]:
    if not isinstance(value, dict) or not all(key.isdecimal() and int(key) > 0 for key in value):
        reading.mistakes.append("alternatives is not a table of devices by the number of ranks on a host")
        return {}
    found = {int(key): _device(reading, f"alternatives.{key}", inner) for key, inner in value.items()}
    return {key: device for key, device in sorted(found.items()) if device is not None}


def _algorithms(reading: Reading, value: Any) -> dict[str, Link]:
    if not isinstance(value, dict):
        reading.mistakes.append("algorithms is not a table of links by the name of an all_reduce")
        return {}
    found = {name: _link(reading, f"algorithms.{name}", inner) for name, inner in value.items()}
    return {name: link for name, link in found.items() if link is not None}


def _notes(reading: Reading, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        reading.mistakes.append(f"notes = {value!r} is not a list of texts")
        return ()
    return tuple(reading.read("notes", text, note) for note in value)


def dump(cluster: Cluster, beside: Mapping[str, Any] | None = None) -> str:
    """The cluster as TOML text, which `load` reads back; `beside` has tables for people that it passes over."""
    return _written(to_mapping(cluster) | dict(beside or {}))


def to_mapping(cluster: Cluster) -> dict[str, Any]:
    """The cluster as a mapping of TOML's types; what is not there is left out."""
    document: dict[str, Any] = {"schema": SCHEMA, "name": cluster.name}
    document |= {"devices_per_host": cluster.devices_per_host, "num_hosts": cluster.num_hosts}
    document |= {key: value for key in _NUMBERS if (value := getattr(cluster, key)) is not None}
    if cluster.notes:
        document["notes"] = list(cluster.notes)
    document["device"] = to_table(cluster.device)
    for name in ("within", "between"):
        if (link := getattr(cluster, name)) is not None:
            document[name] = to_table(link)
    if cluster.algorithms:
        document["algorithms"] = {name: to_table(link) for name, link in cluster.algorithms.items()}
    if cluster.prices:
        document["prices"] = dict(cluster.prices)
    if cluster.alternatives:
        document["alternatives"] = {str(n): to_table(device) for n, device in cluster.alternatives.items()}
    return document


def _written(document: Mapping[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(document)
