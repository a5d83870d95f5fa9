"""Event log of a run, `events.jsonl`: what befell it, a line each."""

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
    """Writer of an event log; without a path it writes nothing. A disk that refuses is no error.

    `fence`: of the generation that writes; of an earlier one `add` raises FencedError and writes nothing.
    """

    def __init__(self, path: Path | None, fence: Fence | None = None) -> None:
        self._path, self.fence = path, fence or Fence()

    def add(self, kind: str, error: ShoalError | None = None, **more: Any) -> None:
        """Appends an event, with rank, host and cause where an error says them.

        `more`: of an incident `step`, `what`, how it was `noticed`, what was `done`, and what it cost, in `seconds`,
        where these are known.
        """
        if self._path is None:
            return
        event: dict[str, Any] = {"at": instant(time.time()), "kind": kind, "generation": self.fence.generation}
        if error is not None:
            event |= {"rank": error.rank, "host": error.host, "who": error.given, "what": error.conflict}
        with contextlib.suppress(OSError):
            self.fence.append(self._path, json.dumps({**event, **more}))


def mtbf_seconds(path: Path, since: float, now: float) -> float | None:
    """Mean time between the losses of ranks that an event log has since an instant; None where there is none."""
    losses = 0
    with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                event = json.loads(line)
                losses += event["kind"] == "lost" and datetime.fromisoformat(event["at"]).timestamp() >= since
    return (now - since) / losses if losses else None


def instant(seconds: float) -> str:
    """An instant, in seconds since the epoch, as ISO 8601 in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
