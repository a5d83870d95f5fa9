"""Files of this machine with JSON values by key, beside what `shoal bench` measured: trials, predictions."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from shoal.hardware.detect import measured_file
from shoal.runs.directory import read_json, write_file


class MachineRecords:
    """File of this machine, which keeps the newest values. `name`: end of its name. `most`: number of values."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most

    @property
    def path(self) -> Path:
        """The path of the file, which depends on host, processor, cores and GPUs."""
        known = measured_file()
        return known.with_name(f"{known.stem}-{self._name}.json")

    def read(self) -> dict[str, Any]:
        """Return all values, the newest last; none of a missing or damaged file."""
        return read_json(self.path.resolve(), exactly=True) or {}

    def store(self, key: str, value: Any) -> None:
        """Store a value. Raises: OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            values = self.read()
            values.pop(key, None)
            newest = list(values.items())[-(self._most - 1) :]
            write_file(self.path, json.dumps({**dict(newest), key: value}, indent=1) + "\n")
