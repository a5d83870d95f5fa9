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
    """One quantity over the ranks: the smallest and the largest value, and the rank of the largest."""

    min: float
    max: float
    rank_of_max: int


class OwnSpreads(Mapping[str, Spread]):
    """Quantities of a single rank as spreads, each made where it is asked for; a value for each name."""

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
        """JSON value of them."""
        pairs = zip(self._names, self._values, strict=True)
        return {name: {"min": value, "max": value, "rank_of_max": 0} for name, value in pairs}


@dataclass(frozen=True)
class RankTimes:
    """Seconds of each rank, summed over the last `steps` steps up to a record's.

    `busy_seconds`: by rank, of steps without what communication exposes. `waits`: by the rank that was the last in a
    step, how long each rank waited for it; -1 has those of the ranks that were waited for least.
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
    loss: float | None  # total over weight, of the whole global batch
    weight: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float | None
    seconds: float
    spans: dict[str, float]  # rank 0's seconds by name
    ranks: Mapping[str, Spread]  # the same over all ranks (and `memory_bytes`, `step_seconds`)
    memory_bytes: int
    digest: str  # of every sample id up to and with this step
    skipped: str | None = None  # why the optimizer did not step: "nonfinite", "overflow" or "weightless"
    nonfinite: dict[str, Any] | None = None  # rank, grains, samples
    metrics: dict[str, float] | None = None  # evaluation after this step
    push: dict[str, Any] | None = None  # with servers: which step of the job it was, its workers, and its staleness
    compression: dict[str, Any] | None = None  # in a sampled step: cosine and residual, and whether the guard fell back
    at: float | None = None  # the end of the step, in seconds since the epoch, on rank 0's clock
    after: dict[str, float] | None = None  # seconds between this step and the next: of an evaluation, of a checkpoint
    by_rank: RankTimes | None = None  # in one record of so many: who waited for whom

    def with_ranks(self, ranks: Mapping[str, Spread], by_rank: RankTimes | None = None) -> StepRecord:
        """Copy with all ranks' measurements; a tenth of the time of dataclasses.replace."""
        copy = object.__new__(StepRecord)
        copy.__dict__.update(self.__dict__, ranks=ranks, by_rank=by_rank)
        return copy

    def evaluated(self, metrics: Mapping[str, float]) -> StepRecord:
        """The record with the metrics of an evaluation after its step, those that are finite."""
        return replace(self, metrics={name: value for name, value in metrics.items() if math.isfinite(value)})

    def followed_by(self, kind: str, seconds: float) -> StepRecord:
        """The record with the seconds of an evaluation or a checkpoint after its step."""
        after = self.after or {}
        return replace(self, after={**after, kind: after.get(kind, 0.0) + seconds})

    def to_line(self) -> str:
        """One line of JSON; a value that JSON has no number for is null."""
        # pydantic's writer takes 12 us where json takes 80, most of them for the shortest digits of floats; plain
        # dictionaries cost it a third of dataclasses.
        own = self.ranks
        ranks = own.to_json() if isinstance(own, OwnSpreads) else {name: vars(spread) for name, spread in own.items()}
        return to_json({**vars(self), "ranks": ranks}, inf_nan_mode="null").decode()

    @classmethod
    def from_line(cls, line: str) -> StepRecord:
        """The record in a line that `to_line` wrote; keys of newer versions are left out."""
        document = json.loads(line)
        document["ranks"] = {name: Spread(**value) for name, value in document["ranks"].items()}
        if document.get("by_rank"):
            told = document["by_rank"]
            waits = {int(rank): of for rank, of in told["waits"].items()}  # JSON has texts for keys
            document["by_rank"] = RankTimes(told["steps"], told["busy_seconds"], waits)
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The end of a run: `result.json`."""

    status: str  # completed | preempted | failed
    steps: int
    samples: int
    world_size: int
    train_loss: float | None  # of the last step
    metrics: dict[str, float | None]  # of the last evaluation; null where one has no value
    eval_samples: int
    weights_sha256: str | None  # over the state dict: names sorted, raw little-endian bytes
    sample_digest: str | None
    step_seconds: dict[str, float]  # median, p10 and p90 of this call's steps
    wall_seconds: float  # of this call, launch included
    best: dict[str, Any] | None = None  # step, metric and value of the best evaluation, where the job watches one
    first_step_seconds: float | None = None  # from the command's start to the end of its first step
    look_seconds: float | None = None  # in looks at the job before its first step and later ones, on rank 0
    resumed_from: int | None = None
    restarts: int = 0  # of this call's ranks, after one was lost
    ettr: float | None = None  # effective training time ratio of this call, 0 to 1: docs/recovery.md
    skipped_steps: int = 0
    ended_early: dict[str, int] | None = None  # a stream that gave less than the run's length wanted
    ended_by: dict[str, Any] | None = None  # the callback that asked for the end, its reason and the step
    error: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    certificate: str | None = None  # the SHA-256 of the certificate that the run demanded
    # Of one step by rank, as measured and as predicted: docs/traffic-and-memory.md.
    traffic: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    server: dict[str, Any] | None = None  # with servers, what came of the pushes: docs/parameter-server.md
    # Its scheme, and since which step the guard fell back: docs/compression.md.
    compression: dict[str, Any] | None = None
    computation: dict[str, Any] | None = None  # how grains were computed, and why not together: docs/exactness.md
    prediction: dict[str, Any] | None = None  # what the plan predicted beside what was measured: docs/plan.md

    def to_json(self) -> str:
        """The record as indented JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """The record in a `result.json`; keys of newer versions are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})


def read_steps(path: Path) -> Iterator[StepRecord]:
    """The step records in a `records.jsonl`; a last line cut short by a kill is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield StepRecord.from_line(line)
