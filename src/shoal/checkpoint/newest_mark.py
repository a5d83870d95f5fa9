"""File next to a run's checkpoints that records the newest step, so that missing checkpoints are noticed."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from shoal.runs.directory import read_json
from shoal.runs.generation import Fence


@dataclass(frozen=True)
class NewestMark:
    """Mark in a file, or no mark if `path` is None."""

    path: Path | None
    fence: Fence = field(default_factory=Fence)

    def note(self, step: int) -> None:
        """Write the step. Write errors are ignored, since the checkpoint itself exists."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.fence.write(self.path, json.dumps({"step": step}) + "\n")

    @property
    def step(self) -> int | None:
        """The step that was written last, or None."""
        found = read_json(self.path) if self.path is not None else None
        step = found.get("step") if found is not None else None
        return step if isinstance(step, int) else None
