"""Traces of all ranks in one file, in the Trace Event Format that Perfetto and chrome://tracing read.

Times are in microseconds on rank 0's clock, from the start of the first traced step.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Rows of a rank above the rows of its threads: steps and spans, microbatches.
SPAN_ROW, MICROBATCH_ROW = 0, 1
_OWN_ROWS = ("shoal: steps and spans", "shoal: microbatches")
# Maximum number of rows of a process. Row numbers differ between ranks, since some viewers need unique thread numbers.
_ROWS = 1000
_ARROW_BITS = 32
# Arguments that the profiler gives for every operator and that no viewer shows usefully: half of the file.
_LEFT_OUT = frozenset({"Ev Idx", "Record function id", "Sequence number", "Fwd thread id"})


@dataclass(frozen=True)
class OwnEvent:
    """An interval that shoal recorded, in seconds of its rank's `time.perf_counter`."""

    name: str
    row: int
    began: float
    ended: float
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTrace:
    """Events of one rank: shoal's own intervals, and the profiler's events.

    `profiled`: traceEvents of the profiler. Their microseconds are `time.perf_counter` minus `lag` seconds.
    `clock`: seconds to add to get rank 0's clock.
    """

    rank: int
    host: str
    own: Sequence[OwnEvent]
    profiled: Sequence[Mapping[str, Any]]
    lag: float = 0.0
    clock: float = 0.0

    def events(self) -> list[dict[str, Any]]:
        """Return the events of this rank's process, in microseconds on rank 0's clock."""
        rows = _ThreadRows(self.rank)
        shift = (self.lag + self.clock) * 1e6
        rank_events: list[dict[str, Any]] = []
        for own in self.own:
            when = {"ts": round((own.began + self.clock) * 1e6, 3), "dur": round((own.ended - own.began) * 1e6, 3)}
            where = {"name": own.name, "pid": rows.pid, "tid": rows.first + own.row}
            rank_events.append({"ph": "X", "cat": "shoal", **where, **when, "args": dict(own.about)})
        names: dict[tuple[Any, Any], str] = {}
        for event in self.profiled:
            if event.get("ph") == "M" and event.get("name") == "thread_name":
                names[event["pid"], event["tid"]] = str(event["args"].get("name", ""))
        for event in self.profiled:
            if event.get("ph") in ("X", "s", "f") and event.get("cat") != "Trace" and "ts" in event:
                key = event.get("pid"), event.get("tid")
                rank_events.append(_moved(event, rows.pid, rows.of(key, names.get(key)), shift))
        return [*rows.titles(self.host), *rank_events]


class _ThreadRows:
    """Rows of a rank's process, numbered in order of appearance."""

    def __init__(self, rank: int) -> None:
        self.rank, self.pid, self.first = rank, rank + 1, (rank + 1) * _ROWS
        self._rows: dict[tuple[Any, Any], tuple[int, str]] = {}

    def of(self, key: tuple[Any, Any], name: str | None) -> int:
        """Return the row number of the profiler's process and thread."""
        if key not in self._rows:
            number = len(_OWN_ROWS) + len(self._rows)
            self._rows[key] = self.first + number, name or f"thread {key[1]}"
        return self._rows[key][0]

    def titles(self, host: str) -> list[dict[str, Any]]:
        """Return metadata events: names and order of the process and of its rows."""
        own = [(self.first + row, name) for row, name in enumerate(_OWN_ROWS)]
        rank_titles = [
            self._title("process_name", 0, name=f"rank {self.rank}"),
            self._title("process_labels", 0, labels=host),
            self._title("process_sort_index", 0, sort_index=self.rank),
        ]
        for tid, name in (*own, *self._rows.values()):
            rank_titles.append(self._title("thread_name", tid, name=name))
            rank_titles.append(self._title("thread_sort_index", tid, sort_index=tid))
        return rank_titles

    def _title(self, kind: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self.pid, "tid": tid or self.first, "args": args}


def _moved(event: Mapping[str, Any], pid: int, tid: int, shift: float) -> dict[str, Any]:
    moved = {**event, "pid": pid, "tid": tid, "ts": round(event["ts"] + shift, 3)}
    if "dur" in event:
        moved["dur"] = round(event["dur"], 3)
    if event["ph"] in ("s", "f"):  # Perfetto needs arrow ids that are unique in the file
        moved["id"] = (pid << _ARROW_BITS) + int(event.get("id", 0))
    args = {key: value for key, value in event.get("args", {}).items() if key not in _LEFT_OUT}
    moved.pop("args", None)
    return {**moved, "args": args} if args else moved


def merged(ranks: Iterable[RankTrace], about: Mapping[str, Any]) -> dict[str, Any]:
    """Merge all ranks' traces into one document that starts at time 0. `about`: facts for its `otherData`."""
    events = [event for rank in ranks for event in rank.events()]
    began = min((event["ts"] for event in events if event.get("cat") == "shoal"), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - began, 3)
    return {"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": events}


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a compressed document atomically. Raises: OSError."""
    aside = path.with_name(f".{path.name}.tmp")
    with gzip.open(aside, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(document, file, separators=(",", ":"), default=str)
    aside.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a document that `write` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document
