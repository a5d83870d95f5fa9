"""Event log of a run, `events.jsonl`, with one incident per line."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.runs.generation import Fence


class Events:
    """Writer of an event log. It writes nothing without a path, and ignores write errors.

    `fence`: generation of the writer. `add` raises FencedError if a later generation has started.
    """

    def __init__(self, path: Path | None, fence: Fence | None = None) -> None:
        self._path, self.fence = path, fence or Fence()

    def add(self, kind: str, error: ShoalError | None = None, **more: Any) -> None:
        """Append an event, with rank, host and cause if `error` has them.

        `more`: for an incident, the known ones of `step`, `what`, `noticed` (how), `done`, and the cost in `seconds`.
        """
        if self._path is None:
            return
        event: dict[str, Any] = {"at": instant(time.time()), "kind": kind, "generation": self.fence.generation}
        if error is not None:
            event |= {"rank": error.rank, "host": error.host, "who": error.given, "what": error.conflict}
        with contextlib.suppress(OSError):
            self.fence.append(self._path, json.dumps({**event, **more}))


def mtbf_seconds(path: Path, since: float, now: float) -> float | None:
    """Return the mean time between losses of ranks in an event log since an instant, or None without losses."""
    losses = 0
    with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                event = json.loads(line)
                losses += event["kind"] == "lost" and datetime.fromisoformat(event["at"]).timestamp() >= since
    return (now - since) / losses if losses else None


def instant(seconds: float) -> str:
    """Format an instant, in seconds since the epoch, as ISO 8601 in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
