"""Tracker: callback that passes a run's metrics, settings, plan and result to a process of an experiment tracker."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import JobError
from shoal.launch.supervise.child import Child
from shoal.runs.options import TrackerName
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import Callback, Ending, RunControl

# Maximum entries that wait for the tracker; more are dropped, so that a hanging tracker costs no memory.
_MOST_WAITING = 10_000
# Time limit of the wait for a tracker at a run's end.
CLOSING_SECONDS = 30.0


def track(tracker: str, *, every: int = 1) -> Tracker:
    """Return a callback for a tracker, as `shoal run --track` does.

    Args:
        tracker: `NAME[:WHERE]`, with the name tensorboard, mlflow, wandb or trackio.
        every: steps between two records that are sent.

    Raises: CommandError; JobError.
    """
    if not isinstance(every, int) or every < 1:
        raise JobError(
            given=f"track({tracker!r}, every={every!r})",
            conflict="every is a number of steps, at least one",
            remedy="write for example every=10",
        )
    return Tracker(TrackerName.parse(tracker, f"track({tracker!r})"), every)


class Tracker(Callback):
    """Sends rank 0's records of a run to a tracker. Failures of the tracker do not end the run.

    The tracker's package runs in a separate process: in this process its imports would race with torch's, and its draws
    would change the training's. A thread passes on the waiting entries. If the tracker fails or is too slow, the run
    reports this once and continues without it.
    """

    watches_only = True

    def __init__(self, name: TrackerName, every: int = 1, *, closing_seconds: float = CLOSING_SECONDS) -> None:
        self.name, self.every, self._closing_seconds = name, every, closing_seconds
        self._channel: _TrackerProcess | None = None
        self._has_noted = False

    def on_start(self, run: RunControl) -> None:
        if run.rank != 0:
            return
        described = {k: v for k, v in run.description.items() if isinstance(v, bool | int | float | str)}
        about = {"settings": dict(run.settings), "plan": run.plan.to_mapping(), "job": described}
        out = run.out.absolute() if run.out is not None else None
        opening = {
            "service": self.name.name,
            "where": self.name.where,
            "out": str(out) if out is not None else None,
            "name": out.name if out is not None else "run",
            "about": {**about, "world_size": run.world_size},
            "first_step": run.step,
        }
        log = out / "logs" / f"tracker-{self.name.name}.txt" if out is not None else Path(os.devnull)
        self._channel = _TrackerProcess(opening, log)

    def at_once(self, step: int) -> bool:
        return False

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        if self._channel is None:
            return
        self._tell(run, self._channel)
        if record.step % self.every:
            return
        metrics = {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/learning_rate": record.learning_rate,
            "train/samples": record.samples,
            "time/step_seconds": record.seconds,
            "time/samples_per_second": record.num_samples / record.seconds if record.seconds else None,
            "memory/peak_bytes": record.memory_bytes,
        }
        self._channel.put({"step": record.step, "metrics": _finite(metrics)})

    def on_evaluation(self, run: RunControl, metrics: Mapping[str, float]) -> None:
        if self._channel is not None:
            named = {f"eval/{name}": value for name, value in metrics.items()}
            self._channel.put({"step": run.step, "metrics": _finite(named)})

    def on_end(self, run: RunControl, ending: Ending) -> None:
        if self._channel is None:
            return
        result: dict[str, Any] = {"status": ending.status, "steps": ending.step, **_finite(ending.metrics)}
        result |= {k: v for k, v in (("reason", ending.reason), ("error", ending.error)) if v}
        self._channel.close(result, self._closing_seconds)
        self._tell(run, self._channel)
        if self._channel.left_out:
            run.note(f"tracker {self.name.name}: {self._channel.left_out} entries left out, since it did not keep up")

    def _tell(self, run: RunControl, channel: _TrackerProcess) -> None:
        if channel.failure is not None and not self._has_noted:
            self._has_noted = True
            run.note(f"tracker {self.name.name}: {channel.failure}; the run goes on without it")


class _TrackerProcess:
    """Process of a tracker, and the thread that writes to it. `failure`: why it accepts no entries any more."""

    def __init__(self, opening: Mapping[str, Any], log: Path) -> None:
        self._opening, self._log = opening, log
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._child: Child | None = None
        self._given_up = False
        self.failure: str | None = None
        self.left_out = 0
        title = f"tracker {opening['service']}"
        self._thread = threading.Thread(target=self._work, name=title, daemon=True)
        self._thread.start()

    def put(self, entry: dict[str, Any] | None) -> None:
        """Queue an entry, unless too many wait."""
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.left_out += 1

    def close(self, result: dict[str, Any], seconds: float) -> None:
        """Queue the result, and kill the process if it has not ended within `seconds`."""
        with contextlib.suppress(queue.Full):
            self._queue.put({"result": result}, timeout=seconds)
            self._queue.put(None, timeout=seconds)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._given_up = True
            self.failure = f"it has not taken everything within {seconds:.0f} s of the run's end"
            if self._child is not None:
                self._child.kill()
            with contextlib.suppress(queue.Empty):  # make room for the end if the queue is full
                while True:
                    self._queue.get_nowait()
            self.put(None)
            self._thread.join(seconds)

    def _work(self) -> None:
        """Run in the thread: start the process, write one line per entry, and wait for the end."""
        said: list[str] = []
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-P", "-m", "shoal.training.trackers.child"]
            with self._log.open("a", encoding="utf-8") as log:
                child = self._child = Child(command, listens=True, output=said.append, errors=log)
            entry: dict[str, Any] | None = {"open": self._opening}
            while entry is not None and child.tell(entry):  # a process that has ended says why in its output
                entry = self._queue.get()
            code = child.finish()
            if code and not self._given_up:
                self.failure = "\n".join(said).strip()[:300] or f"its process ended with {code}"
        except Exception as error:
            if not self._given_up:
                self.failure = f"{type(error).__name__}: {error}"


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
