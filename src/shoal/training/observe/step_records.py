"""Step records, evaluations and the outcome of a training, with or without parameter servers."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint.run_state import RunState
from shoal.distributed.agreement import Agreement
from shoal.distributed.mesh import Mesh
from shoal.parallel.base import StepSums
from shoal.plans.resolve import CompletePlan
from shoal.runs.attempts import Events
from shoal.runs.records import StepRecord
from shoal.training.observe.rank_waits import RankWaits
from shoal.training.observe.record_writer import RecordWriter
from shoal.training.observe.stragglers import WINDOW, StragglerWatch
from shoal.training.step_clock import StepClock, StepTime
from shoal.training.update.optimizer_step import Update


@dataclass(frozen=True)
class Surroundings:
    """Callbacks and files around a training.

    `note`: takes a line for people. `on_step`: takes the record of a finished step and the slowest rank.
    `stop_requested`: whether to stop. `out`: the run directory. `events`: its event log, on rank 0. `settings`:
    arguments of the job function. `description`: content of job.json. `evaluate_every`: steps between evaluations,
    instead of one after each pass over the data.
    """

    note: Callable[[str], None]
    on_step: Callable[[StepRecord, int], None]
    stop_requested: Callable[[], bool]
    out: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] = field(default_factory=dict)
    evaluate_every: int | None = None
    events: Events = field(default_factory=lambda: Events(None))


class StepRecords:
    """Writer of step records, once the measures of all ranks and the evaluation after the step are known."""

    def __init__(
        self,
        mesh: Mesh,
        clock: StepClock,
        plan: CompletePlan,
        *,
        num_grains: int,
        around: Surroundings,
        writer: RecordWriter,
    ) -> None:
        self._clock, self._around, self._writer = clock, around, writer
        self._waiting: deque[StepRecord] = deque()  # the last step's record; two records if steps are read late
        self._slowest = mesh.rank
        self._is_watched = mesh.world_size > 1
        self._waits = RankWaits(mesh.world_size)
        self.step_seconds: list[float] = []
        self._stragglers = StragglerWatch(plan, num_grains)
        self.after: dict[str, float] = {}  # seconds of work after the last record was written

    def forget_after(self, step: int) -> None:
        """Drop the records of steps after `step`, which are about to be trained again."""
        self._waiting.clear()
        self._waits.clear()
        self._writer.forget_after(step)

    def add(
        self,
        state: RunState,
        sums: StepSums,
        update: Update,
        nonfinite: dict[str, Any] | None,
        time_taken: StepTime | None = None,
        **own: Any,
    ) -> StepRecord:
        """Add and return the record of the last step in `state`; `own` gives further fields.

        `time_taken`: the step's time. If it is None, the step ends now.
        """
        clock = self._clock
        seconds, spans = time_taken.read() if time_taken is not None else clock.end()
        record = StepRecord(
            step=state.step,
            samples=state.samples,
            num_samples=sums.num_samples,
            loss=state.loss,
            weight=sums.weight if math.isfinite(sums.weight) else None,
            grad_norm=update.grad_norm if math.isfinite(update.grad_norm) else None,
            learning_rate=update.learning_rate if math.isfinite(update.learning_rate) else 0.0,
            loss_scale=state.loss_scale.scale if state.loss_scale.active else None,
            seconds=seconds,
            spans=spans,
            memory_bytes=clock.peak_memory_bytes(),
            digest=state.digest,
            skipped=update.skipped,
            nonfinite=nonfinite,
            at=round(time.time(), 3),
            **own,
        )
        self.step_seconds.append(seconds)
        self._waiting.append(record)
        return record

    @property
    def waiting(self) -> Sequence[StepRecord]:
        """Records that are not written yet, in order."""
        return self._waiting

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Return a context that times an evaluation or a checkpoint (`kind`) outside of any step's time."""
        began = time.perf_counter()
        self.flush()
        try:
            yield
        finally:
            seconds = round(time.perf_counter() - began, 6)
            if self._waiting:
                self._waiting[-1] = self._waiting[-1].followed_by(kind, seconds)
            else:
                self.after[kind] = self.after.get(kind, 0.0) + seconds

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation to the record of the step before it, unless that record is written."""
        if self._waiting:
            self._waiting[-1] = self._waiting[-1].evaluated(metrics)

    def write(self, agreement: Agreement | None = None) -> None:
        """Write the oldest waiting record, with all ranks' measures if there is an agreement."""
        if not self._waiting:
            return
        record, slowest = self._waiting.popleft(), self._slowest
        if agreement is not None:
            by_rank = self._waits.add(agreement) if self._is_watched else None
            record, slowest = record.with_ranks(agreement.spreads, by_rank), agreement.slowest_rank
            if self._is_watched:
                self._tell(record)
        self._writer.write(record)
        self._around.on_step(record, slowest)

    def _tell(self, record: StepRecord) -> None:
        """Report a straggler if one is detected."""
        straggler = self._stragglers.take(record.ranks)
        if straggler is None:
            return
        self._around.note(f"step {record.step}: {straggler}")
        about: dict[str, Any] = {
            "rank": straggler.rank,
            "what": str(straggler),
            "ratio": round(straggler.ratio, 2),
            "cause": straggler.cause,
        }
        done = "nothing: the others wait for it"
        self._around.events.add(
            "straggler", step=record.step, noticed=f"the times of {WINDOW} steps", done=done, **about
        )

    def flush(self) -> None:
        """Write all records, before long work and so that no checkpoint is ahead of the records."""
        self._writer.flush()
