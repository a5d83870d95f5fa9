"""Microbatch policy of a run, which says whether several grains share a forward, and the values that lead to it.

The first batch determines the policy. Later steps may only make it more conservative. No policy changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shoal.errors import JobError
from shoal.jobs.job import Job

# none: the model draws no random numbers and has no batch statistics. scoped: it computes under a GrainScope. opaque:
# its draws cannot be divided by grain, so each grain is computed separately with generators seeded for this grain.
RANDOMNESS = ("none", "scoped", "opaque")
# Relative and absolute tolerance for ranks with the same weights and samples. They differ by rounding, at most that of
# bfloat16 on unlike devices. A loss that is a small difference of large terms consists of rounding errors.
_OTHER_LOSS, _NO_LOSS = 1e-2, 1e-4


@dataclass(frozen=True)
class MicrobatchPolicy:
    """Rules for the computation of microbatches.

    `fuse`: neighbouring grains may share a forward. `coupled`: why they may not, in words, as far as it is known.
    `buffers`: names of the buffers that the forward changes. `rules`: (name, rule) of each such buffer with a known
    rule, sorted. `by_hash`: the training began with random numbers by hash (decision 0060). Older checkpoints
    lack it, which means False. `kept_state`: Python state that the job allows to differ by layout.
    """

    grains_per_microbatch: int
    randomness: str = "none"
    fuse: bool = True
    buffers: tuple[str, ...] = ()
    coupled: str = ""
    by_hash: bool = True
    kept_state: tuple[str, ...] = ()
    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, job: Job, grains_per_microbatch: int) -> MicrobatchPolicy:
        """Return the policy before the probe of the first batch."""
        randomness = "scoped" if job.batch_norm == "batch" else "none"
        return cls(grains_per_microbatch, randomness, fuse=job.fuse)

    @property
    def effective_grains(self) -> int:
        """Number of grains that one forward computes."""
        return self.grains_per_microbatch if self.fuse and self.randomness != "opaque" else 1

    def to_json(self) -> dict[str, Any]:
        """Return the policy as a JSON value."""
        return {**asdict(self), "rules": dict(self.rules)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> MicrobatchPolicy:
        """Build a policy from the value of `to_json`."""
        lists = {name: tuple(document.get(name, ())) for name in ("buffers", "kept_state")}
        known = {"by_hash": False, **document, **lists, "rules": tuple(sorted(document.get("rules", {}).items()))}
        known.pop("by_position", None)  # of older versions
        return cls(**known)

    def with_care_of(self, other: MicrobatchPolicy) -> MicrobatchPolicy:
        """Combine both policies. Each field takes the more conservative value."""
        return MicrobatchPolicy(
            min(self.grains_per_microbatch, other.grains_per_microbatch),
            max(self.randomness, other.randomness, key=RANDOMNESS.index),
            self.fuse and other.fuse,
            tuple(sorted({*self.buffers, *other.buffers})),
            self.coupled or other.coupled,
            self.by_hash and other.by_hash,
            tuple(sorted({*self.kept_state, *other.kept_state})),
            tuple(sorted({**dict(other.rules), **dict(self.rules)}.items())),
        )


@dataclass(frozen=True)
class BufferLook:
    """Rules that explain how some grains changed each buffer, best rule first.

    `rules`: only buffers that any grain has changed. `ordered`: buffers that keep samples in order. `mixes`: whether
    the loss of grains computed together is not the sum of their losses. `conclusive`: False if a loss was not finite.
    """

    rules: dict[str, tuple[str, ...]]
    ordered: tuple[str, ...] = ()
    mixes: bool = False
    conclusive: bool = True


@dataclass(frozen=True)
class ProbeResult:
    """Microbatch policy that one batch indicates. `conclusive`: False if the batch's loss was not finite.

    `too_large`: memory ran out, so the probe needs fewer grains. `seen`: a loss that other ranks compute too.
    """

    computation: MicrobatchPolicy
    conclusive: bool = True
    too_large: bool = False
    seen: GrainLoss | None = None


class GrainLoss(NamedTuple):
    """Loss of a grain on one rank: index of the grain, checksum of its batch, total and weight of the loss."""

    grain: float
    batch: float
    total: float
    weight: float


def refuse_other_losses(losses: Sequence[tuple[float, float, float, float] | None]) -> None:
    """Refuse ranks that compute different losses for the same samples. Raises: JobError."""
    first: dict[tuple[float, float], tuple[int, GrainLoss]] = {}
    for rank, loss in enumerate(GrainLoss(*seen) if seen is not None else None for seen in losses):
        if loss is None or not math.isfinite(loss.total):
            continue
        of, other = first.setdefault((loss.grain, loss.batch), (rank, loss))
        for name in ("total", "weight"):
            one, two = getattr(other, name), getattr(loss, name)
            if not math.isclose(one, two, rel_tol=_OTHER_LOSS, abs_tol=_NO_LOSS):
                raise JobError(
                    given=f"a loss that gives the same samples the {name} {one:.6g} on rank {of} and {two:.6g} on rank "
                    f"{rank}",
                    conflict="the ranks have the same weights and compute with other numbers: what the job draws while "
                    "it is loaded, from Python's or NumPy's generators, differs by rank, and so does what follows from "
                    "RANK or get_rank()",
                    remedy="seed the generator with a constant (random.seed(0), numpy.random.default_rng(0)), or make "
                    "the number a parameter of the job function and give it with --set",
                )


class RedoError(Exception):
    """Request to compute a step again under a more conservative policy. The step has changed nothing."""

    def __init__(self, proposal: MicrobatchPolicy, reason: str) -> None:
        super().__init__(reason)
        self.proposal = proposal
