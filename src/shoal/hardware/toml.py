"""Cluster files in TOML: read with exact keys, devices and links by name or in full, and written whole."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import HardwareError
from shoal.hardware.catalogue import described_device, described_link
from shoal.hardware.toml_values import checked, to_table
from shoal.hardware.values import Cluster

SCHEMA = 1
# Not the cluster's: `shoal bench` adds for people the spread of each measurement, and where and when it ran.
_BESIDE = ("schema", "measurements", "machine")
_DESCRIBED = {"device": described_device, "within": described_link, "between": described_link}
_DESCRIBED_BY_NAME = {"alternatives": described_device, "algorithms": described_link}


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
    for key, complete in _DESCRIBED.items():
        if key in table:
            table[key] = complete(table[key])
    for key, complete in _DESCRIBED_BY_NAME.items():
        if isinstance(table.get(key), dict):
            table[key] = {name: complete(value) for name, value in table[key].items()}
    return checked(Cluster, table, str(path))


def dump(cluster: Cluster, beside: Mapping[str, Any] | None = None) -> str:
    """The cluster as TOML text, which `load` reads back; `beside` has tables for people that it passes over."""
    import tomli_w

    return tomli_w.dumps({"schema": SCHEMA, **to_table(cluster), **(beside or {})})
