"""EMA: exponential moving average of the weights, on each rank's own slices, with evaluation and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import JobError
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import Callback, RunControl

# Prefix of the averaged weights' metrics.
PREFIX = "ema_"
_MOSTLY = 0.5  # share of the first weights in the final average that triggers a warning


class EMA(Callback):
    """Average of the weights, updated after each optimizer step: average = decay * average + (1 - decay) * weights.

    The average covers all trained floating-point parameters, in float32 at least. Buffers are the model's. Every
    operation is elementwise and rounded once, so that the average does not depend on the layout.
    Memory: one copy of a rank's parameters, two while evaluating. No communication.
    Source: Polyak and Juditsky (SIAM J. Control Optim. 30, 1992); warm-up as in TensorFlow's ExponentialMovingAverage.

    Args:
        decay: a number in [0, 1).
        warmup: limit the decay of update n (from 0) to (1 + n) / (10 + n).
        evaluate: add `ema_NAME` to evaluations for each metric.
    """

    required = True
    watches_only = True

    def __init__(self, decay: float = 0.999, *, warmup: bool = False, evaluate: bool = True) -> None:
        """Raise JobError for an invalid decay."""
        if not (isinstance(decay, int | float) and not isinstance(decay, bool) and 0.0 <= decay < 1.0):
            raise JobError(
                given=f"EMA({decay!r})",
                conflict="a decay is a number in [0, 1)",
                remedy="write EMA(0.999), say: the average then reaches back some 1000 steps",
            )
        self.decay, self.warmup, self.evaluate = float(decay), warmup, evaluate
        self.num_updates = 0
        self._averages: dict[str, Tensor] = {}

    def on_start(self, run: RunControl) -> None:
        own = dict(run.trained_parameters(watched=False))
        for name in self._averages.keys() - own.keys():  # frozen since the checkpoint
            del self._averages[name]
        for name, weights in own.items():
            self._averages.setdefault(name, weights.to(_wide(weights.dtype), copy=True))
        # Warn if the average at the run's end consists mostly of the initial weights.
        count = self.num_updates + run.num_steps - run.step
        begun = self.decay**count
        if not self.warmup and begun >= _MOSTLY:
            run.note(
                f"warning: EMA({self.decay:g}) over {count} steps: {begun:.0%} of the average at the end is of the "
                f"weights that it begins with; write shoal.EMA({max(0.0, 1.0 - 5.0 / max(5, count)):.2g}), say, or "
                f"EMA({self.decay:g}, warmup=True)"
            )
        self._order = [(self._averages[name], weights) for name, weights in own.items()]

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        if record.skipped is not None:
            return
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else self.decay
        for average, weights in self._order:
            # Not lerp_: its vectorized part may round once for multiply and add, the rest of a slice twice.
            average.mul_(decay).add_(weights.to(average.dtype) * (1.0 - decay))
        self.num_updates += 1

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which the model has the averaged weights."""
        with torch.no_grad():
            own_weights = [weights.clone() for _, weights in self._order]
            for average, weights in self._order:
                weights.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, weights), before in zip(self._order, own_weights, strict=True):
                    weights.copy_(before)

    def metric_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{PREFIX}{name}" for name in names) if self.evaluate else ()

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates = state["num_updates"]

    def parameter_tensors(self) -> Mapping[str, Tensor]:
        return self._averages

    def load_parameter_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name in self._averages:  # a rollback: others reference these tensors
                self._averages[name].copy_(tensor)
            else:
                self._averages[name] = tensor.to(_wide(tensor.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
