"""Records of training steps and runs: written as JSON lines and read back without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic_core import to_json

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

    def __init__(self, names: tuple[str, ...], values: tuple[float, ...]) -> None:
        self._names, self._values = names, values

    def __getitem__(self, name: str) -> Spread:
        if name not in self._names:
            raise KeyError(name)
        value = self._values[self._names.index(name)]
        return Spread(value, value, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the spreads as a JSON value."""
        pairs = zip(self._names, self._values, strict=True)
        return {name: {"min": value, "max": value, "rank_of_max": 0} for name, value in pairs}


@dataclass(frozen=True)
class RankTimes:
    """Seconds of each rank, summed over the last `steps` steps up to a record's step.

    `busy_seconds`: by rank, the steps' seconds without exposed communication.
    `waits`: by the slowest rank of a step, the seconds that each rank waited for it. Key -1 sums up the waits for all
        other ranks, with the shortest waits.
    """

    steps: int
    busy_seconds: list[float]
    waits: dict[int, list[float]]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int
    epoch: int
    samples: int  # since the start of the run
    num_samples: int
    loss: float | None  # total / weight over the global batch
    weight: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float | None
    seconds: float
    spans: dict[str, float]  # rank 0's seconds by name
    ranks: Mapping[str, Spread]  # the spans over all ranks, `memory_bytes` and `step_seconds`
    memory_bytes: int
    digest: str  # of all sample ids up to and including this step
    skipped: str | None = None  # why the optimizer did not step: "nonfinite", "overflow" or "weightless"
    nonfinite: dict[str, Any] | None = None  # rank, grains, samples
    metrics: dict[str, float] | None = None  # evaluation after this step
    push: dict[str, Any] | None = None  # with servers: step of the job, workers, staleness
    compression: dict[str, Any] | None = None  # in sampled steps: cosine, residual, guard fallback
    at: float | None = None  # end of the step on rank 0's clock, in seconds since the epoch
    after: dict[str, float] | None = None  # seconds of the evaluation and checkpoint after it
    by_rank: RankTimes | None = None  # in some records: which ranks waited for which

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

    def to_line(self) -> str:
        """Return the record as one line of JSON. NaN and infinity are written as null."""
        # pydantic's writer takes 12 us, json 80 us, mostly for floats. Plain dictionaries take pydantic a third of
        # the time of dataclasses.
        own = self.ranks
        ranks = own.to_json() if isinstance(own, OwnSpreads) else {name: vars(spread) for name, spread in own.items()}
        return to_json({**vars(self), "ranks": ranks}, inf_nan_mode="null").decode()

    @classmethod
    def from_line(cls, line: str) -> StepRecord:
        """Parse a line that `to_line` wrote. Keys of newer versions are ignored."""
        document = json.loads(line)
        document["ranks"] = {name: Spread(**value) for name, value in document["ranks"].items()}
        if document.get("by_rank"):
            by_rank = document["by_rank"]
            waits = {int(rank): of for rank, of in by_rank["waits"].items()}  # JSON keys are strings
            document["by_rank"] = RankTimes(by_rank["steps"], by_rank["busy_seconds"], waits)
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Result of a run, stored in `result.json`."""

    status: str  # completed | preempted | failed
    steps: int
    samples: int
    world_size: int
    train_loss: float | None  # of the last step
    metrics: dict[str, float | None]  # of the last evaluation; None for a metric without value
    eval_samples: int
    weights_sha256: str | None  # over the state dict: names sorted, raw little-endian bytes
    sample_digest: str | None
    step_seconds: dict[str, float]  # median, p10 and p90 of this call's steps
    wall_seconds: float  # of this call, including the launch
    best: dict[str, Any] | None = None  # step, metric and value of the best evaluation, if watched
    first_step_seconds: float | None = None  # from the command's start to the end of its first step
    look_seconds: float | None = None  # for probes of the job, on rank 0
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

    def to_json(self) -> str:
        """Return the record as indented JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Parse a `result.json`. Keys of newer versions are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})


def read_steps(path: Path) -> Iterator[StepRecord]:
    """Yield the step records in a `records.jsonl`. An incomplete last line is skipped."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield StepRecord.from_line(line)
