"""Observers of a step: their interface, which verification and measurements implement, and the clock.

The clock measures the time of a step by span. It never waits and never raises into the training.
"""

from __future__ import annotations

import contextlib
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.data.loader import Microbatch
from shoal.launch.supervise.heartbeat import Heartbeat
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.runs.records import SPANS


class Observer:
    """Interface of a step's hooks, called on every rank. This class does nothing. An observer must change nothing.

    If a step is computed again, its hooks are called again, from `begin`. Gradients are in `parameter.grad`.
    """

    @property
    def has_hooks(self) -> bool:
        """True if the hooks may do anything."""
        return type(self) is not Observer

    @property
    def looks(self) -> bool:
        """True if each coming step must be read before the next step is queued. Identical on all ranks."""
        return self.has_hooks

    @property
    def always_looks(self) -> bool:
        """True if the observer looks at every coming step, not only at the next few."""
        return self.looks

    def attach(self, sharded_model: ShardedModel, optimizer: Optimizer, strategy: Strategy) -> None:
        """Receive a run's parts before the first step. The code that builds the engine calls this, not the engine."""

    def begin(self, step: int, factor: float) -> None:
        """Handle the start of a step. Loss totals are multiplied by `factor` before the backward."""

    def microbatch(self, microbatch: Microbatch, batch: Any) -> None:
        """Handle a microbatch before its forward. `batch` is on the device."""

    def forwarded(self) -> None:
        """Handle the end of the microbatch's forward on a pipeline stage that computes no loss."""

    def loss(self, total: Tensor, weight: Tensor | float) -> None:
        """Handle the loss of the microbatch before its backward."""

    def computed(self) -> None:
        """Handle the end of the microbatch's backward."""

    def reduced(self, loss: float, weight: float, scale: float) -> None:
        """Handle the gradients' sums over all ranks. Times `scale` they are the mean. `loss` is the mean loss."""

    def clipped(self, norm: float) -> None:
        """Handle the mean gradients after clipping. `norm`: their norm before clipping."""

    def updated(self, skipped: str | None) -> None:
        """Handle the end of a step. `skipped`: why the step changed nothing, None after an update."""

    def pulled(self, version: int) -> None:
        """Handle the parameters after `version` steps, which a worker pulled from parameter servers."""

    def part_begins(self, part: int) -> None:
        """Handle the start of a part of a step, on a worker with parameter servers."""

    def part_computed(self) -> None:
        """Handle the end of a worker's part of a step. In fast mode its gradients are in `parameter.grad`."""


# A reading from the system takes about 50 us.
_MEMORY_SECONDS = 0.05
# A step and its spans as float32: much cheaper than a numpy array.
_SINGLES = struct.Struct(f"<{1 + len(SPANS)}f")


class StepListener:
    """Interface for observers of the step clock; this class does nothing. The clock calls it on every rank.

    `now` is a time of `time.perf_counter`, the same instant that the clock records.
    """

    def begins(self, step: int) -> None:
        """Handle the approach of a step, counted from 1, before its time runs."""

    def began(self, now: float) -> None:
        """Handle the start of the step's time, in the span `other`."""

    def entered(self, span: str, now: float) -> None:
        """Handle the end of the running span and the start of `span`."""

    def ended(self, now: float) -> None:
        """Handle the end of the step, after all of its spans."""

    def labelled(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """Return a context around a named part of a step, such as a microbatch."""
        return contextlib.nullcontext()


_UNLABELLED = contextlib.nullcontext()


@dataclass  # made in every step
class StepTime:
    """Time of a step that has ended on the host, but maybe not on the device.

    `total`: seconds of the step. `seconds`: by span, as measured on the host. `events`: starts of spans on a CUDA
    device.
    """

    total: float
    seconds: dict[str, float]
    events: list[tuple[str, torch.cuda.Event]]

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the values of `StepClock.end`, after a wait for the device if it is still at the step."""
        seconds = dict(self.seconds)
        if self.events:
            self.events[-1][1].synchronize()
            for (span, event), (_, following) in zip(self.events, self.events[1:], strict=False):
                seconds[span] += event.elapsed_time(following) / 1000.0
            seconds["other"] = max(0.0, self.total - sum(v for k, v in seconds.items() if k != "other"))
        total, *spans = _SINGLES.unpack(_SINGLES.pack(self.total, *seconds.values()))
        return total, dict(zip(seconds, spans, strict=True))


class StepClock:
    """Clock that divides wall time among the spans of a step. One span runs at a time, so the spans sum to the step.

    On a CUDA device the marks are events on the current stream, which are read after the step's one synchronization. A
    span is then the stream's time, including idle time, not the time to enqueue the work.
    """

    def __init__(
        self,
        device: torch.device,
        enabled: bool = True,
        heartbeat: Heartbeat | None = None,
        listener: StepListener | None = None,
    ) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._memory_bytes, self._memory_until = 0, 0.0
        self.enabled, self.heartbeat, self._listener = enabled, heartbeat or Heartbeat(None), listener
        self.is_listened_to = listener is not None  # whether a listener uses the names of parts
        self._is_still = not enabled and listener is None
        self._seconds = dict.fromkeys(SPANS, 0.0)
        self._current, self._since, self._began = "other", 0.0, 0.0
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context without marks, since nobody can read events that a captured step would record."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def begin(self, step: int = 0) -> None:
        """Start the clock of step `step`; the first step is 1. Time counts as `other` until the first `mark`."""
        if self._listener is not None:
            self._listener.begins(step)
        if self.heartbeat.writes:
            self.heartbeat.begin_step()
        self._seconds = dict.fromkeys(SPANS, 0.0)
        self._events = []
        self._current = "other"
        self._began = self._since = time.perf_counter()
        if self._listener is not None:
            self._listener.began(self._began)
        if self._cuda and self.enabled:
            self._record("other")

    def mark(self, span: str) -> None:
        """End the running span and start `span`."""
        if self._paused:
            return
        if self.heartbeat.writes:
            self.heartbeat.enter(span)
        if self._is_still:
            return
        now = time.perf_counter()
        if self._listener is not None:
            self._listener.entered(span, now)
        if self._cuda:
            if self.enabled:
                self._record(span)
            return
        self._seconds[self._current] += now - self._since
        self._current, self._since = span, now

    def end(self) -> tuple[float, dict[str, float]]:
        """End the step; return its seconds and its seconds by span, in float32 precision as other ranks get them."""
        return self.stop().read()

    def stop(self) -> StepTime:
        """End the step on the host, without a wait for the device."""
        self.mark("other")
        if self.heartbeat.writes:
            self.heartbeat.enter("away")
        spans_end = not (self._cuda or self._is_still)  # the step ends with its last span
        total = (self._since if spans_end else time.perf_counter()) - self._began
        if self._listener is not None:
            self._listener.ended(self._began + total)
        return StepTime(total, self._seconds, self._events)

    def labelled(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """Return a context around a named part of a step, for a listener."""
        return _UNLABELLED if self._listener is None else self._listener.labelled(name, **about)

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of this process in bytes. On CPUs the reading is up to 50 ms old."""
        if self._cuda:
            return peak_memory_bytes(self._device)
        now = time.monotonic()
        if now >= self._memory_until:
            self._memory_bytes, self._memory_until = peak_memory_bytes(self._device), now + _MEMORY_SECONDS
        return self._memory_bytes

    def _record(self, span: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((span, event))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes, rounded to float32: GPU allocator's, or resident on CPUs."""
    if device.type == "cuda":
        return int(np.float32(torch.cuda.max_memory_allocated(device)))
    try:  # not ru_maxrss: on Linux a new program inherits it from the program that started it
        status = Path("/proc/self/status").read_bytes()
        line = status.index(b"VmHWM:") + len(b"VmHWM:")
        kibibytes = int(status[line : status.index(b"kB", line)])
    except (OSError, ValueError):
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(np.float32(kibibytes * 1024))
