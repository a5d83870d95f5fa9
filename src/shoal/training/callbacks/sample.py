"""Sample: callback that calls a function of the whole model at intervals, to generate, draw or measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shoal.errors import JobError
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import Callback, RunControl


class Sample(Callback):
    """Calls `function(model, run)` on rank 0 every `every` steps, or after each evaluation if `every` is None.

    The model is a copy with all parameters on the CPU, in eval mode, on every layout. Divided parameters are gathered
    for it. Generators are restored. Memory: one model on rank 0.
    """

    watches_only = True

    def __init__(self, function: Callable[[nn.Module, RunControl], Any], *, every: int | None = None) -> None:
        """Raise JobError for an invalid function or interval."""
        if not callable(function) or not (every is None or (isinstance(every, int) and every >= 1)):
            raise JobError(
                given=f"Sample({function!r:.40}, every={every!r})",
                conflict="it calls a function of (model, run) each so many steps",
                remedy="write shoal.Sample(draw, every=500), say",
            )
        self.function, self.every = function, every

    def at_once(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        if self.every is not None and record.step % self.every == 0:
            self._sample(run)

    def on_evaluation(self, run: RunControl, metrics: Mapping[str, float]) -> None:
        if self.every is None:
            self._sample(run)

    def _sample(self, run: RunControl) -> None:
        model = run.whole_model()  # on every rank, since it may be gathered
        if model is not None:
            self.function(model, run)
