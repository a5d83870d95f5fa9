"""Records of training steps and runs: written as JSON lines and read back without torch.

`records.jsonl` is only appended to. A line is the record of a step, of a block of steps (`record_blocks`), or the mark
that the steps after a checkpoint are trained again. `CountedRecords` drops the earlier records of these steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from shoal.bounded_files import json_value, opened, whole_lines
from shoal.runs.sound_values import Amount, Ranks, Seconds, SomeSeconds, Steps, adapter

# Parts of a step's wall time, in seconds; they sum to the step.
SPANS = (
    "data_wait",
    "host_to_device",
    "forward",
    "backward",
    "exposed_communication",
    "optimizer",
    "checkpoint",
    "other",
)


@dataclass(frozen=True)
class Spread:
    """One quantity over the ranks: the smallest and largest value, and the rank with the largest."""

    min: float
    max: float
    rank_of_max: int


class OwnSpreads(Mapping[str, Spread]):
    """Measurements of a run's only rank as spreads, created on access: minimum and maximum are the same value."""

    def __init__(self, names: tuple[str, ...], measured: tuple[float, ...]) -> None:
        self.names, self.measured = names, measured

    def __getitem__(self, name: str) -> Spread:
        if name not in self.names:
            raise KeyError(name)
        value = self.measured[self.names.index(name)]
        return Spread(value, value, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the spreads as a JSON value."""
        pairs = zip(self.names, self.measured, strict=True)
        return {name: {"min": value, "max": value, "rank_of_max": 0} for name, value in pairs}


@dataclass(frozen=True)
class RankTimes:
    """Seconds of each rank, summed over the last `steps` steps up to a record's step.

    `busy_seconds`: by rank, the steps' seconds without exposed communication.
    `waits`: by the slowest rank of a step, the seconds that each rank waited for it. Key -1 sums up the waits for all
        other ranks, with the shortest waits.
    """

    steps: Steps
    busy_seconds: list[float]
    waits: dict[int, list[float]]


@dataclass(frozen=True)
class BlockExtremes:
    """Extremes of the steps of a block, in the record of the block.

    `min`, `max`: of the steps' numbers and rank 0's spans, by name.
    `slowest`: the whole record of the step with the most seconds.
    `began_at`: start of the first step, in seconds since the epoch.
    """

    min: dict[str, float]
    max: dict[str, float]
    slowest: StepRecord
    began_at: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, or a block of successive steps.

    In the record of a block, `num_samples`, `seconds` and `spans` are sums over the steps, and `memory_bytes` is the
    most. `loss`, `weight`, `grad_norm`, `learning_rate`, `loss_scale`, `expert_imbalance` and the numbers in `ranks`
    are means. The other fields are those of the last step.
    """

    step: Steps
    epoch: Amount
    samples: Amount  # since the start of the run
    num_samples: Amount
    loss: float | None  # total / weight over the global batch
    weight: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float | None
    seconds: SomeSeconds
    spans: dict[str, float]  # rank 0's seconds by name
    ranks: Mapping[str, Spread]  # the spans over all ranks, `memory_bytes` and `step_seconds`
    memory_bytes: Amount
    digest: str  # of all sample ids up to and including this step
    skipped: str | None = None  # why the optimizer did not step: "nonfinite", "overflow" or "weightless"
    nonfinite: dict[str, Any] | None = None  # rank, grains, samples
    metrics: dict[str, float] | None = None  # evaluation after this step
    push: dict[str, Any] | None = None  # with servers: step of the job, workers, staleness
    expert_imbalance: float | None = None  # of rank 0's rows for divided experts: the busiest rank's over the mean
    compression: dict[str, Any] | None = None  # in sampled steps: cosine, residual, guard fallback
    at: Seconds | None = None  # end of the step on rank 0's clock, in seconds since the epoch
    after: dict[str, float] | None = None  # seconds of the evaluation and checkpoint after it
    by_rank: RankTimes | None = None  # in some records: which ranks waited for which
    steps: Ranks = 1  # number of steps in the record, up to and including `step`
    block: BlockExtremes | None = None  # if the record is of several steps
    generation: Amount = 0  # start of the run's ranks that wrote the record

    @property
    def first(self) -> int:
        """The first step of the record."""
        return self.step - self.steps + 1

    @property
    def began_at(self) -> float | None:
        """Start of the first step, in seconds since the epoch."""
        if self.block is not None:
            return self.block.began_at
        return None if self.at is None else self.at - self.seconds

    def per_step(self) -> StepRecord:
        """Return the record with means instead of sums, which is the record itself for a single step."""
        if self.steps == 1:
            return self
        copy, steps = object.__new__(StepRecord), self.steps
        spans = {name: seconds / steps for name, seconds in self.spans.items()}
        own = {"spans": spans, "seconds": self.seconds / steps, "num_samples": self.num_samples / steps}
        copy.__dict__.update(self.__dict__, **own)
        return copy

    def with_ranks(self, ranks: Mapping[str, Spread], by_rank: RankTimes | None = None) -> StepRecord:
        """Return a copy with all ranks' measurements, in a tenth of the time of dataclasses.replace."""
        copy = object.__new__(StepRecord)
        copy.__dict__.update(self.__dict__, ranks=ranks, by_rank=by_rank)
        return copy

    def evaluated(self, metrics: Mapping[str, float]) -> StepRecord:
        """Return a copy with the finite metrics of the evaluation after the step."""
        return replace(self, metrics={name: value for name, value in metrics.items() if math.isfinite(value)})

    def followed_by(self, kind: str, seconds: float) -> StepRecord:
        """Return a copy with the seconds of an evaluation or a checkpoint after the step."""
        after = self.after or {}
        return replace(self, after={**after, kind: after.get(kind, 0.0) + seconds})

    def to_line(self, generation: int = 0) -> str:
        """Return the record as one line of JSON. NaN and infinity are written as null."""
        # pydantic's writer takes 12 us, json 80 us, mostly for floats. Plain dictionaries take pydantic a third of
        # the time of dataclasses.
        return to_json(self._document(generation), inf_nan_mode="null").decode()

    def _document(self, generation: int) -> dict[str, Any]:
        own, block = self.ranks, self.block
        ranks = own.to_json() if isinstance(own, OwnSpreads) else {name: vars(spread) for name, spread in own.items()}
        blocks = {**vars(block), "slowest": block.slowest._document(generation)} if block is not None else None
        return {**vars(self), "ranks": ranks, "block": blocks, "generation": generation}

    @classmethod
    def from_line(cls, line: str | bytes) -> StepRecord:
        """Parse a line that `to_line` wrote. Keys of newer versions are ignored. Raises: ValueError."""
        record: StepRecord = adapter(StepRecord).validate_json(line)
        return record


def sample_rate(num_samples: int, elapsed_seconds: float) -> str:
    """Return samples per second in words or, below one, the seconds of a sample."""
    rate = num_samples / max(1e-9, elapsed_seconds)
    return f"{rate:,.0f} samples/s" if rate >= 1.0 or not rate else f"{1.0 / rate:,.1f} s a sample"


@dataclass(frozen=True)
class TrainedAgain:
    """Mark in `records.jsonl`: the steps after `after` are trained again, so that earlier records of them are over."""

    after: int
    generation: int = 0

    def to_line(self, generation: int = 0) -> str:
        """Return the mark as one line of JSON."""
        return json.dumps({"trained_again": {"after": self.after, "generation": generation}})


def parsed(line: str | bytes) -> StepRecord | TrainedAgain:
    """Parse a line of `records.jsonl`. Raises: ValueError."""
    mark = '{"trained_again"'
    if not line.startswith(mark if isinstance(line, str) else mark.encode()):  # type: ignore[arg-type]
        return StepRecord.from_line(line)
    return TrainedAgain(**{name: int(value) for name, value in json_value(line)["trained_again"].items()})


class CountedRecords:
    """Records that count, in order of training, from the lines of `records.jsonl`.

    A late line of an earlier generation, whose process was paused, does not count. If it was written before the first
    line of the next generation, the next generation's record of that step replaces it.
    """

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._generation = 0

    def add(self, line: StepRecord | TrainedAgain) -> None:
        """Add the next line."""
        if line.generation < self._generation:
            return
        first = line.first if isinstance(line, StepRecord) else line.after + 1
        if isinstance(line, TrainedAgain) or line.generation > self._generation:
            while self.records and self.records[-1].step >= first:
                self.records.pop()
        self._generation = line.generation
        if isinstance(line, StepRecord):
            self.records.append(line)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Result of a run, stored in `result.json`."""

    status: str  # completed | preempted | failed; running from the first step on, if no launcher watches the process
    steps: int
    samples: int
    world_size: int
    train_loss: float | None  # of the last step
    metrics: dict[str, float | None] = field(default_factory=dict)  # of the last evaluation; None: one without value
    eval_samples: int = 0
    weights_sha256: str | None = None  # over the state dict: names sorted, raw little-endian bytes
    sample_digest: str | None
    step_seconds: dict[str, float] = field(default_factory=dict)  # median, p10 and p90 of this call's steps
    wall_seconds: float  # of this call, including the launch
    best: dict[str, Any] | None = None  # step, metric and value of the best evaluation, if watched
    first_step_seconds: float | None = None  # from the command's start to the end of its first step
    look_seconds: float | None = None  # for probes of the job, on rank 0
    compile_seconds: float | None = None  # in torch's compiler, on rank 0, if the plan compiles
    # Operations that run uncompiled between parts of a compiled region, with their modules, on rank 0.
    compile_cuts: list[str] | None = None
    resumed_from: int | None = None
    restarts: int = 0  # number in this call, after lost ranks
    ettr: float | None = None  # effective training time ratio of this call, 0 to 1: docs/recovery.md
    skipped_steps: int = 0
    ended_early: dict[str, int] | None = None  # if a stream was shorter than the run's length
    ended_by: dict[str, Any] | None = None  # the callback that requested the end, its reason, the step
    error: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    certificate: str | None = None  # SHA-256 of the certificate that the run required
    # Measured and predicted values of one step by rank: docs/traffic-and-memory.md.
    traffic: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    server: dict[str, Any] | None = None  # with servers: statistics of pushes, docs/parameter-server.md
    # The scheme, and the step of the guard's fallback: docs/compression.md.
    compression: dict[str, Any] | None = None
    computation: dict[str, Any] | None = None  # how grains were computed, and why: docs/model-rules.md
    prediction: dict[str, Any] | None = None  # predicted and measured values: docs/plan.md
    trial: dict[str, Any] | None = None  # of step modes: docs/execution.md

    def to_json(self) -> str:
        """Return the record as indented JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Parse a `result.json`. Keys of newer versions are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})


def read_steps(path: Path) -> Iterator[StepRecord]:
    """Yield the records in a `records.jsonl` that count. An incomplete last line is skipped. Raises: ValueError."""
    counted = CountedRecords()
    with open(opened(path), "rb") as file:
        for line in whole_lines(file):
            counted.add(parsed(line))
    yield from counted.records


_MOST_NOISE_BYTES = 1 << 24
_TAIL_BYTES = 1 << 16  # the end of a file that is read first; a record has about 2 kB, a block 4 kB


def last_records(path: Path, after: int | None = None) -> list[StepRecord]:
    """Return the records of steps after `after`, or the last one, from the end of a file. Damaged lines are skipped.

    Raises: OSError.
    """
    tail = _TAIL_BYTES
    with open(opened(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        while True:
            file.seek(max(0, size - tail))
            counted, lines = CountedRecords(), file.read(tail).split(b"\n")[:-1]
            for line in lines[size > tail :]:  # the first line may be cut
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    counted.add(parsed(line))
            records = counted.records
            is_noise = not records and tail >= _MOST_NOISE_BYTES
            if size <= tail or is_noise or (records and (after is None or records[0].step <= after)):
                return records[-1:] if after is None else [record for record in records if record.step > after]
            tail *= 8
