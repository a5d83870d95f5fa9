"""Records of a training's steps: their fields, the waits of ranks, stragglers, and the file that has them."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.bounded_files import MOST_LINE_BYTES, RefusedFileError, opened
from shoal.checkpoint.keeper import RunState
from shoal.distributed.mesh import Agreement, Mesh
from shoal.errors import IntegrityError
from shoal.parallel.base import StepSums
from shoal.plans.grains import share_sizes
from shoal.plans.plan import Plan
from shoal.plans.resolve import CompletePlan
from shoal.runs.attempts import Events
from shoal.runs.directory import Fence
from shoal.runs.record_blocks import MOST_AWAITED, OTHERS, WHOLE_STEPS, block_of, has_own_record, merged
from shoal.runs.records import SPANS, RankTimes, Spread, StepRecord, TrainedAgain, last_records
from shoal.training.observer import StepClock, StepTime
from shoal.training.update.optimizer_step import Update


@dataclass(frozen=True)
class Surroundings:
    """Callbacks and files around a training.

    `note`: takes a line for people. `on_step`: takes the record of a finished step and the slowest rank.
    `stop_requested`: whether to stop. `out`: the run directory. `events`: its event log, on rank 0. `settings`:
    arguments of the job function. `description`: content of job.json. `evaluate_every`: steps between evaluations,
    instead of one after each pass over the data. `rebalances`: whether shares of grains follow the ranks' speeds.
    """

    note: Callable[[str], None]
    on_step: Callable[[StepRecord, int], None]
    stop_requested: Callable[[], bool]
    out: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] = field(default_factory=dict)
    evaluate_every: int | None = None
    events: Events = field(default_factory=lambda: Events(None))
    rebalances: bool = False


_MOST_TIMES = 20_000  # step times of which a training stores the median


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
        measured: Callable[[int, Agreement], None] | None = None,
    ) -> None:
        """Create the writer. `measured`: takes the number of samples of each step, and the agreement on its times."""
        self._clock, self._around, self._writer, self._measured = clock, around, writer, measured
        # Records that are not written yet, in order: of the last step, and of two steps if steps are read late.
        self.waiting: deque[StepRecord] = deque()
        self._slowest = mesh.rank
        self._is_watched = mesh.world_size > 1
        self._waits = RankWaits(mesh.world_size)
        self.step_seconds: list[float] = []  # of each step, or of every second, fourth, ... step of a long training
        self._num_steps, self._every = 0, 1
        self._stragglers = StragglerWatch(plan, num_grains)
        self.after: dict[str, float] = {}  # seconds of work after the last record was written

    def forget_after(self, step: int) -> None:
        """Drop the records of steps after `step`, which are about to be trained again."""
        self.waiting.clear()
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
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            self.step_seconds.append(seconds)
            if len(self.step_seconds) == _MOST_TIMES:
                del self.step_seconds[::2]
                self._every *= 2
        self.waiting.append(record)
        return record

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Return a context that times an evaluation or a checkpoint (`kind`) outside of any step's time."""
        began = time.perf_counter()
        self._writer.flush()  # before long work
        try:
            yield
        finally:
            seconds = round(time.perf_counter() - began, 6)
            if self.waiting:
                self.waiting[-1] = self.waiting[-1].followed_by(kind, seconds)
            else:
                self.after[kind] = self.after.get(kind, 0.0) + seconds

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation to the record of the step before it, unless that record is written."""
        if self.waiting:
            self.waiting[-1] = self.waiting[-1].evaluated(metrics)

    def take_up(self, step: int) -> None:
        """Let the record of `step`, which an earlier start wrote, wait for an evaluation that the start left."""
        self.waiting.extend(self._writer.written(step))

    def write(self, agreement: Agreement | None = None) -> None:
        """Write the oldest waiting record, with all ranks' measures if there is an agreement."""
        if not self.waiting:
            return
        record, slowest = self.waiting.popleft(), self._slowest
        if agreement is not None:
            by_rank = self._waits.add(agreement) if self._is_watched else None
            record, slowest = record.with_ranks(agreement.spreads, by_rank), agreement.slowest_rank
            if self._measured is not None:
                self._measured(record.num_samples, agreement)
            straggler = self._stragglers.take(record.ranks) if self._is_watched else None
            if straggler is not None:
                self._around.note(f"step {record.step}: {straggler}")
                self._around.events.add(
                    "straggler",
                    step=record.step,
                    noticed=f"the times of {WINDOW} steps",
                    done="nothing: the others wait for it; --shares by-speed would give it fewer grains"
                    if self._measured is None
                    else "its share of the grains follows its speed",
                    rank=straggler.rank,
                    what=str(straggler),
                    ratio=round(straggler.ratio, 2),
                    cause=straggler.cause,
                )
        self._writer.write(record)
        self._around.on_step(record, slowest)

    def saves(self, step: int) -> None:
        """Write all records before the checkpoint of `step`, so that no checkpoint is ahead of the records."""
        self._writer.saves(step)


# Bytes of the end of a file that are read at a time.
_TAIL_BYTES = 1 << 16
# Maximum records that wait for a disk (older ones are dropped), and the time between two attempts.
_MOST_LATE, _RETRY_SECONDS = 10_000, 1.0
# Records are written when this many wait, or with the first record after this time.
_TOGETHER, _TOGETHER_SECONDS = 64, 0.05


class RecordWriter:
    """Writer of step records, one line each. If the disk refuses, it warns once and writes the records later.

    Lines of short steps are written together, about 50 ms late: single writes would cost a step several times as much.
    Beyond the first `whole_steps` steps, a line is of a block of steps: `runs/record_blocks.py`. Without a number, each
    step has a line. `forgotten` is called with the records of steps that are about to be trained again.
    """

    def __init__(
        self,
        path: Path | None,
        forgotten: Callable[[list[StepRecord]], None] | None = None,
        fence: Fence | None = None,
        whole_steps: int | None = WHOLE_STEPS,
    ) -> None:
        self._path, self._forgotten, self._fence = path, forgotten, fence or Fence()
        self._file = _opened(path) if path else None
        self._waiting: deque[StepRecord | TrainedAgain] = deque()
        self._next = 0.0  # earliest time of the next write
        self._refused = False
        self._whole_steps = whole_steps
        self._block: list[StepRecord] = []  # records of the open block, most of them merged into the first one
        self._saved = 0  # step of the newest checkpoint

    def write(self, record: StepRecord) -> None:
        """Append a step. Its line is written at once, by `flush`, with the first record after 50 ms, or as a block."""
        if self._file is None:
            return
        if self._whole_steps is None or record.step <= self._whole_steps:
            self._append(record)
            return
        is_apart = has_own_record(record)
        if is_apart or (self._block and self._block[-1].step not in block_of(record.step, self._whole_steps)):
            self._end_block()
        self._block.append(record)
        if is_apart or record.step <= self._saved:
            self._end_block(apart=True)
        elif len(self._block) > _TOGETHER:  # the last one stays whole, in case that the block ends with it
            self._block = [merged(self._block[:-1]), self._block[-1]]

    def _end_block(self, *, apart: bool = False) -> None:
        """Append the open block. `apart`: its last step has a record of its own."""
        whole = self._block[-1:] if apart else []
        for part in (self._block[: len(self._block) - len(whole)], whole):
            if part:
                self._append(merged(part))
        self._block = []

    def _append(self, line: StepRecord | TrainedAgain) -> None:
        if len(self._waiting) >= _MOST_LATE:  # the oldest record: without a mark steps would count twice
            del self._waiting[next((i for i, one in enumerate(self._waiting) if isinstance(one, StepRecord)), 0)]
        self._waiting.append(line)
        if time.monotonic() >= self._next or (len(self._waiting) >= _TOGETHER and not self._refused):
            self.flush()

    def flush(self) -> None:
        """Write the waiting lines; they keep waiting if the operating system refuses them."""
        if self._file is None or not self._waiting:
            return
        lines = "".join(f"{line.to_line(self._fence.generation)}\n" for line in self._waiting).encode()
        try:
            written = self._file.write(lines)
            if written != len(lines):  # half a line would spoil the next one
                os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except (OSError, ValueError) as error:
            self._next = time.monotonic() + _RETRY_SECONDS
            if not self._refused:
                self._refused = True
                text = f"step records are kept until they can be written: {self._path}: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        else:
            self._waiting.clear()
            self._next, self._refused = time.monotonic() + _TOGETHER_SECONDS, False

    def saves(self, step: int) -> None:
        """Write the steps up to `step`, whose checkpoint is about to be written.

        The open block ends before that step, which has a record of its own, now or when it is known.
        """
        self._saved = step
        if self._block:
            self._end_block(apart=self._block[-1].step >= step)
        self.flush()

    def forget_after(self, step: int) -> None:
        """Mark the records of steps after `step`, which are about to be trained again."""
        if self._path is None or self._file is None:
            return
        self._end_block()
        self.flush()
        self._saved = step
        try:
            late = last_records(self._path, after=step)
        except OSError as error:
            self._waiting.clear()
            self.close()
            warnings.warn(f"no more step records: {self._path}: {error}", RuntimeWarning, stacklevel=3)
            return
        for one in [one for one in self._waiting if isinstance(one, StepRecord) and one.step > step]:
            self._waiting.remove(one)
        if late:
            self._fence.check()
            self._waiting.append(TrainedAgain(step))
            self.flush()
            if self._forgotten is not None:
                self._forgotten(late)

    def written(self, step: int) -> list[StepRecord]:
        """Return the record of `step` of an earlier start, which a record of this start replaces, if it is the last."""
        now, last = self._fence.generation, list[StepRecord]()
        with contextlib.suppress(OSError):
            last = last_records(self._path) if self._path is not None else []
        return [one for one in last if one.step == step and one.generation < now]

    def close(self) -> None:
        """Write the open block and the waiting lines if possible, and close the file."""
        if self._file is not None:
            self._end_block(apart=True)
        self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _opened(path: Path) -> io.FileIO:
    """Open a file of lines to append to, and remove an incomplete last line, which a killed process left.

    Raises: IntegrityError for a file that no run writes; OSError.
    """
    try:
        file = io.FileIO(opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+")
    except (RefusedFileError, IsADirectoryError) as error:
        raise _no_records(path, error.strerror or str(error)) from None
    end = size = file.seek(0, os.SEEK_END)
    last = b""
    while end and b"\n" not in last:
        if len(last) > MOST_LINE_BYTES:
            file.close()
            raise _no_records(path, "what it ends with is no line of a run")
        end = max(0, end - _TAIL_BYTES)
        file.seek(end)
        last = file.read(size - end)
    if not last.endswith(b"\n"):
        file.truncate(end + last.rfind(b"\n") + 1)
    return file


def _no_records(path: Path, conflict: str) -> IntegrityError:
    return IntegrityError(
        given=str(path), conflict=conflict, remedy="move it elsewhere: the run goes on without the earlier records"
    )


_LEAST_STEPS = 10


class RankWaits:
    """Sums over as many steps as there are ranks, but at least ten, to bound a record's size per step."""

    def __init__(self, world_size: int) -> None:
        self._every = max(_LEAST_STEPS, world_size)
        self._alone = world_size == 1
        self.clear()

    def clear(self) -> None:
        """Reset the sums before steps are trained again."""
        self._steps = 0
        self._busy: npt.NDArray[np.float64] | float = 0.0
        self._waits: dict[int, npt.NDArray[np.float64]] = {}

    def add(self, agreement: Agreement) -> RankTimes | None:
        """Add a step, and return the sums if it completes them."""
        if self._alone:
            return None
        busy, last = agreement.busy_seconds, agreement.slowest_rank
        self._busy = self._busy + busy
        self._waits[last] = self._waits.get(last, 0.0) + (busy[last] - busy)
        self._steps += 1
        if self._steps < self._every:
            return None
        ordered = sorted(self._waits, key=lambda rank: -float(self._waits[rank].sum()))
        waits = {rank: _rounded(self._waits[rank]) for rank in ordered[:MOST_AWAITED]}
        if rest := ordered[MOST_AWAITED:]:
            waits[OTHERS] = _rounded(np.sum([self._waits[rank] for rank in rest], axis=0))
        times = RankTimes(self._steps, _rounded(np.asarray(self._busy)), waits)
        self.clear()
        return times


def _rounded(seconds: npt.NDArray[np.float64]) -> list[float]:
    return [round(value, 6) for value in seconds.tolist()]


WINDOW = 20  # steps
_EVERY = 5  # steps: a check costs some percent of a short step
_MOST_OF_THEM = 16  # steps of the window in which the same rank has to be the slowest
# Thresholds beyond the difference that the shares of grains explain: a ratio, and an absolute excess.
_RATIO, _SECONDS = 1.3, 0.001
# Only a rank's own work: a rank that waits for others is not slow.
_CAUSES = {
    "data_wait": "reading samples",
    "host_to_device": "copying samples to the device",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the update",
    "other": "what the host does beside the model",
}


@dataclass(frozen=True)
class Straggler:
    """Rank with a median step time of `ratio` times the fastest rank's; `cause`: the span with most of the excess."""

    rank: int
    ratio: float
    cause: str
    seconds: float  # excess per step

    def __str__(self) -> str:
        slower = f"rank {self.rank} takes {self.ratio:.1f} times as long for its steps as the fastest rank"
        return f"{slower}, {1e3 * self.seconds:.1f} ms more, mostly in {self.cause}"


class StragglerWatch:
    """Watch over the slowest rank of each step, which reports each straggler once until it recovers."""

    def __init__(self, plan: Plan, num_grains: int) -> None:
        ranks = plan.layout.divides_grains
        # Off for pipelines, since stages differ in their layers, and for ranks without grains.
        self._is_on = plan.layout.world_size > 1 and plan.layout.pipeline == 1 and num_grains >= ranks
        sizes = share_sizes(num_grains, ranks, plan.layout.shares)
        self._expected = max(sizes) / max(1, min(sizes))
        self._steps: deque[Mapping[str, Spread]] = deque(maxlen=WINDOW)
        self._num_steps = 0
        self._known: int | None = None

    def take(self, spreads: Mapping[str, Spread]) -> Straggler | None:
        """Add a step's measures over the ranks, and return a straggler that was not reported yet."""
        if not self._is_on or "busy_seconds" not in spreads:
            return None
        self._steps.append(spreads)
        self._num_steps += 1
        if len(self._steps) < WINDOW or self._num_steps % _EVERY:
            return None
        slowest = [step["busy_seconds"].rank_of_max for step in self._steps]
        rank = statistics.mode(slowest)
        busy = [step["busy_seconds"] for step in self._steps]
        longest, least = statistics.median(s.max for s in busy), statistics.median(s.min for s in busy)
        more = longest - self._expected * least
        is_slow = least > 0.0 and longest >= _RATIO * self._expected * least and more >= _SECONDS
        if slowest.count(rank) < _MOST_OF_THEM or not is_slow:
            self._known = None
            return None
        if self._known == rank:
            return None
        self._known = rank
        # The median excess of each span in seconds, counting 0 for steps in which another rank is the slowest.
        excess = {span: 0.0 for span in SPANS if span in _CAUSES}
        for span in excess:
            of_span = [step[span] for step in self._steps if span in step]
            if of_span:
                excess[span] = statistics.median(s.max - s.min if s.rank_of_max == rank else 0.0 for s in of_span)
        return Straggler(rank, longest / least, _CAUSES[max(excess, key=lambda span: excess[span])], more)
