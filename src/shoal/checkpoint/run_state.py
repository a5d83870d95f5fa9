"""Training progress other than tensors, as stored in a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.data.sample_digest import EMPTY_DIGEST, chain_digest
from shoal.numerics.precision import LossScale
from shoal.parallel.base import StepSums


@dataclass
class RunState:
    """Training progress other than tensors: counters, sums and schedules. It is the same on all ranks.

    `step`: number of finished steps.
    `digest`: digest of the ids of all samples read so far.
    `bad_steps`: findings by step; a rollback skips these steps when it reaches them again.
    `server`: state of the guard against stale parameters.
    `grains`: the job's number of grains.
    `bad_samples`: error text by sample id; these samples are no longer read.
    Random state is not stored, since every draw is a function of seed, step and grain.
    """

    step: int = 0
    samples: int = 0
    digest: str = EMPTY_DIGEST
    loss: float | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    skipped_steps: int = 0
    bad_streak: int = 0
    bad_steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    computation: dict[str, Any] | None = None
    server: dict[str, Any] | None = None
    grains: int | None = None
    best: dict[str, Any] | None = None  # step, metric and value of the best evaluation
    bad_samples: dict[int, str] = field(default_factory=dict)

    def improves(self, watched: tuple[str, bool], metrics: dict[str, float]) -> bool:
        """Return True if this step's metrics are the best so far, and store them in `best` if so."""
        name, largest = watched
        value, best = metrics.get(name, math.nan), self.best
        if not math.isfinite(value):
            return False
        same = best is not None and (best["metric"], best["largest"]) == watched
        if best is not None and same and not (value > best["value"] if largest else value < best["value"]):
            return False
        self.best = {"step": self.step, "metric": name, "largest": largest, "value": value}
        return True

    def advance(self, sums: StepSums, skipped: str | None) -> None:
        """Count a step with these sums. `skipped`: the reason why the update was skipped, as in Update."""
        self.adapt(skipped)
        self.count(sums, skipped)

    def adapt(self, skipped: str | None) -> None:
        """Adjust the loss scale after an update."""
        if self.loss_scale.dynamic and skipped in (None, "overflow"):
            self.loss_scale = self.loss_scale.after(skipped == "overflow")

    def count(self, sums: StepSums, skipped: str | None) -> None:
        """Count a step and its samples."""
        self.samples += sums.num_samples
        self.digest = chain_digest(self.digest, sums.digest)
        self.loss = sums.loss if math.isfinite(sums.loss) else None
        if skipped is not None:
            self.skipped_steps += 1
        elif self.step > max(self.bad_steps, default=-1):  # not while steps before a bad step are replayed
            self.bad_streak = 0
        self.step += 1

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON value."""
        now = self.loss_scale
        scale = {"scale": now.scale, "good_steps": now.good_steps} if now.active else None
        return {
            **vars(self),
            "loss_scale": scale,
            "bad_steps": dict(self.bad_steps),
            "bad_samples": dict(self.bad_samples),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], loss_scale: LossScale) -> RunState:
        """Restore the state from `to_json`. The current plan decides whether the loss scale is dynamic."""
        saved = document["loss_scale"]
        scale = replace(loss_scale, **saved) if loss_scale.dynamic and saved is not None else loss_scale
        bad_steps = {int(step): entry for step, entry in document["bad_steps"].items()}  # JSON keys are strings
        bad_samples = {int(sample): text for sample, text in document.get("bad_samples", {}).items()}
        return cls(**{**document, "loss_scale": scale, "bad_steps": bad_steps, "bad_samples": bad_samples})
