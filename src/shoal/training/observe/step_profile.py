"""Profile of some steps on all ranks with torch's profiler, plus the spans and microbatches of the engine."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.distributed.mesh import Mesh
from shoal.runs.chrome_trace import MICROBATCH_ROW, SPAN_ROW, OwnEvent, RankTrace, merged, write
from shoal.runs.options import TraceSteps
from shoal.training.observer import StepListener

if TYPE_CHECKING:
    from torch.profiler import profile

# The profiler allocates its tables in the first few marks; the quickest mark gives the offset of its clock.
_MARKS = 8
_MARK = "shoal clock"
_ROUNDS = 9
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class StepProfile(StepListener):
    """Profiler of a run's steps `steps`, which writes one file for all ranks after the last of these steps."""

    def __init__(self, steps: TraceSteps, mesh: Mesh, path: Path) -> None:
        self._steps, self._mesh, self._path = steps, mesh, path
        self._note: Callable[[str], None] = lambda text: None
        self._profiler: profile | None = None
        self._is_done = False
        self._own: list[OwnEvent] = []
        self._step, self._marks = 0, [0.0]
        self._step_began = self._span_began = 0.0
        self._span = "other"

    def attach(self, note: Callable[[str], None]) -> None:
        """Set the function that takes lines for people."""
        self._note = note

    def begins(self, step: int) -> None:
        self._step = step
        if self._profiler is None and not self._is_done and self._steps.first <= step <= self._steps.last:
            from torch.profiler import ProfilerActivity, profile, record_function

            cuda = [ProfilerActivity.CUDA] if self._mesh.device.type == "cuda" else []
            with _no_own_lines():
                self._profiler = profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)
                self._profiler.start()
            self._own, self._marks = [], []
            for _ in range(_MARKS):
                self._marks.append(time.perf_counter())
                with record_function(_MARK):
                    pass

    def began(self, now: float) -> None:
        self._step_began = self._span_began = now
        self._span = "other"

    def entered(self, span: str, now: float) -> None:
        if self._profiler is not None:
            if now > self._span_began:
                self._own.append(OwnEvent(self._span, SPAN_ROW, self._span_began, now, {"step": self._step}))
            self._span, self._span_began = span, now

    def ended(self, now: float) -> None:
        if self._profiler is None:
            return
        self._own.append(OwnEvent(f"step {self._step}", SPAN_ROW, self._step_began, now))
        if self._step >= self._steps.last:
            self._finish()

    @contextlib.contextmanager
    def labelled(self, name: str, **about: Any) -> Iterator[None]:
        if self._profiler is None:
            yield
            return
        began = time.perf_counter()
        try:
            yield
        finally:
            self._own.append(OwnEvent(name, MICROBATCH_ROW, began, time.perf_counter(), about))

    def conclude(self) -> None:
        """Write the traced steps if the run has ended before the last one. Collective: all ranks."""
        if self._profiler is not None:
            self._finish()
        elif not self._is_done:
            self._say(f"--trace {self._steps}: no such step was trained; nothing is written")

    def close(self) -> None:
        """Stop a profile that an error has interrupted, without a file."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    # -------------------------------------------------------------------------------------------------------- own

    def _finish(self) -> None:
        """Stop the profiler, gather the records of all ranks, and write them on rank 0. Collective: all ranks."""
        assert self._profiler is not None
        profiler, self._profiler, self._is_done = self._profiler, None, True
        profiler.stop()
        events = []
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-trace-") as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        except (OSError, ValueError, RuntimeError) as error:  # a trace is optional, and the other ranks wait
            self._say(f"the trace has no operators of rank {self._mesh.rank}: {error}")
        marks = sorted(event["ts"] for event in events if event.get("name") == _MARK and event.get("ph") == "X")
        lags = [began - mark / 1e6 for began, mark in zip(self._marks, marks, strict=False)]
        events = [event for event in events if event.get("name") != _MARK]
        mesh, own = self._mesh, tuple(self._own)
        trace = RankTrace(mesh.rank, mesh.host, own, events, max(lags, default=0.0), self._behind())
        # As compressed JSON, about a tenth of its length.
        text = json.dumps(asdict(trace), separators=(",", ":"), default=str)
        documents = [json.loads(gzip.decompress(row)) for row in mesh.send_to_first(gzip.compress(text.encode(), 6))]
        ranks = [RankTrace(**{**one, "own": tuple(OwnEvent(**event) for event in one["own"])}) for one in documents]
        if self._mesh.rank == 0:
            about = {"steps": str(self._steps), "world_size": len(ranks)}
            try:
                write(self._path, merged(ranks, about))
            except OSError as error:
                self._say(f"the trace was not written: {self._path}: {error}")
            else:
                self._say(f"traced: {self._path}, for https://ui.perfetto.dev or chrome://tracing")
        self._own = []

    def _behind(self) -> float:
        """Return the seconds by which this host's clock is behind rank 0's. Collective: all ranks.

        Ranks of one host share a clock. Between hosts, a gather ends on all ranks at nearly the same time, so the error
        is about the latency of a small message.
        """
        hosts = self._mesh.gather_json(self._mesh.host)
        if len(set(hosts)) == 1:
            return 0.0
        ends = []
        for _ in range(_ROUNDS):
            self._mesh.all_gather([0.0])
            ends.append(time.perf_counter())
        ends_of_ranks = self._mesh.gather_json(ends)
        first = ends_of_ranks[hosts.index(self._mesh.host)]
        behind: list[float] = [mine - other for mine, other in zip(ends_of_ranks[0], first, strict=True)]
        return median(behind)

    def _say(self, text: str) -> None:
        if self._mesh.rank == 0:
            self._note(text)


@contextlib.contextmanager
def _no_own_lines() -> Iterator[None]:
    """Return a context in which the first start of the profiler's library writes nothing to stderr."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]
