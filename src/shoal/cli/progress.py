"""Progress display of a training run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from shoal.runs.records import StepRecord


class Reporter:
    """Display of a run's progress; this one, of every rank but the first, prints nothing."""

    def note(self, text: str) -> None:
        """Prints one line that stays."""

    def step(self, record: StepRecord, slowest_rank: int) -> None:
        """Counts a finished step."""

    def close(self) -> None:
        """Puts the terminal back as it was."""


@dataclass
class Pace:
    """Throughput since this call began: steps, samples and seconds; `first` and `last` are step numbers."""

    first: int
    last: int
    world_size: int
    began: float = 0.0
    samples: int = 0

    def count(self, record: StepRecord) -> float:
        """Counts a finished step; the time now."""
        now = time.monotonic()
        self.began = self.began or now - record.seconds
        self.samples += record.num_samples
        return now

    def line(self, record: StepRecord, slowest_rank: int) -> str:
        """Step, loss, samples per second, time left and the slowest rank."""
        elapsed = max(1e-9, time.monotonic() - self.began)
        done = record.step - self.first
        left = (self.last - record.step) * elapsed / max(1, done)
        loss = "-" if record.loss is None else f"{record.loss:.4f}"
        text = (
            f"step {record.step}/{self.last}  loss {loss}  {self.samples / elapsed:,.0f} samples/s  eta {_clock(left)}"
        )
        if self.world_size > 1:
            text += f"  slowest rank {slowest_rank}"
        if record.skipped:
            text += f"  skipped: {record.skipped}"
        return text


class Plain(Reporter):
    """Progress display for logs: the first step, then a line every two seconds, evaluations and the last step."""

    every_seconds = 2.0

    def __init__(self, pace: Pace) -> None:
        self._pace, self._next = pace, 0.0

    def note(self, text: str) -> None:
        """Prints one line."""
        print(text, flush=True)

    def step(self, record: StepRecord, slowest_rank: int) -> None:
        """Prints a line now and then."""
        now = self._pace.count(record)
        if now >= self._next or record.step == self._pace.last:
            self._show(self._pace.line(record, slowest_rank))
            self._next = now + self.every_seconds
        if record.metrics:
            self.note(metrics_line(record))

    def _show(self, line: str) -> None:
        self.note(line)


class Live(Plain):
    """Progress display of a terminal: one line that changes a few times a second."""

    every_seconds = 0.2

    def __init__(self, pace: Pace) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive
        from rich.text import Text

        super().__init__(pace)
        self._console, self._make = Console(highlight=False), Text
        self._live = RichLive(Text(""), console=self._console, auto_refresh=False)
        self._live.start()

    def note(self, text: str) -> None:
        """Prints one line above the live one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _show(self, line: str) -> None:
        self._live.update(self._make(line), refresh=True)

    def close(self) -> None:
        """Ends the live line."""
        self._live.stop()


def metrics_line(record: StepRecord) -> str:
    """An evaluation in words."""
    values = "  ".join(f"{name} {value:.4f}" for name, value in (record.metrics or {}).items())
    return f"step {record.step}  evaluation: {values}"


def choose_reporter(rank: int, pace: Pace) -> Reporter:
    """Live in a terminal; plain where there is none, under CI, NO_COLOR or TERM=dumb; silent but on rank 0."""
    if rank != 0:
        return Reporter()
    plain = any(os.environ.get(name) for name in ("CI", "NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Plain(pace) if plain or not sys.stdout.isatty() else Live(pace)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
