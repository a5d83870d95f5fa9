"""What many tests compare with is made once, however many workers pytest has, and left as it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.launching import Ended, Run, run


@dataclass(frozen=True)
class Shared:
    """A folder that all workers of one session of pytest have."""

    root: Path

    def once(self, key: str, make: Callable[[Path], None]) -> Path:
        """The folder that `make` has filled, in this process or in another one. Nobody may change it."""
        folder = self.root / hashlib.sha256(key.encode()).hexdigest()[:24]
        self.root.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = folder.with_suffix(".done")
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # where `make` failed before
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    def run(self, wanted: Run) -> Ended:
        """An undisturbed run, wherever it lies."""

        def make(folder: Path) -> None:
            ended = run(replace(wanted, out=folder / "run")).expect(0)
            (folder / "said.json").write_text(json.dumps([ended.stdout, ended.stderr]), encoding="utf-8")

        folder = self.once(repr(replace(wanted, out=Path())), make)
        return Ended(0, *json.loads((folder / "said.json").read_text(encoding="utf-8")), folder / "run")
