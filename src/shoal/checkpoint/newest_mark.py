"""Mark beside a run's checkpoints: the newest one's step, which tells of checkpoints that are gone."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from shoal.runs.directory import read_json
from shoal.runs.generation import Fence


@dataclass(frozen=True)
class NewestMark:
    """Mark in a file, or none where `path` is None."""

    path: Path | None
    fence: Fence = field(default_factory=Fence)

    def note(self, step: int) -> None:
        """Writes the step. A disk that refuses is no error: the checkpoint itself is there."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.fence.write(self.path, json.dumps({"step": step}) + "\n")

    @property
    def step(self) -> int | None:
        """The step that was written last; None where there is none."""
        found = read_json(self.path) if self.path is not None else None
        step = found.get("step") if found is not None else None
        return step if isinstance(step, int) else None
