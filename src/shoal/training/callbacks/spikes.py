"""Callback that watches the training loss for spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from shoal.errors import JobError
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import Callback, RunControl

_LEAST_STEPS = 20  # minimum number of earlier losses
_SCALE = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_LEAST_SHARE = 0.01  # minimum deviation as a share of the median, for losses that hardly vary


class LossSpikes(Callback):
    """Reports a training loss far above the losses before it, also in the event log; `stop` ends the run there.

    A spike is more than `deviations` standard deviations above the median of the last `window` steps. The standard
    deviation is estimated from the median absolute deviation. Only the first of several spikes in a row is reported.
    """

    required = True

    def __init__(self, *, deviations: float = 8.0, window: int = 100, stop: bool = False) -> None:
        """Raise JobError for an invalid number of deviations or steps."""
        if not deviations > 0.0 or not isinstance(window, int) or window < _LEAST_STEPS:
            raise JobError(
                given=f"LossSpikes(deviations={deviations!r}, window={window!r})",
                conflict=f"deviations are more than 0, and a window has at least {_LEAST_STEPS} steps",
                remedy="write LossSpikes(deviations=8, window=100), say",
            )
        self.deviations, self.window, self.stop = deviations, window, stop
        self.losses: deque[float] = deque(maxlen=window)
        self.in_spike = False

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        loss = record.loss
        if loss is None or not math.isfinite(loss):
            return
        median, spread = 0.0, 0.0
        if len(self.losses) >= _LEAST_STEPS:
            median = statistics.median(self.losses)
            deviation = _SCALE * statistics.median(abs(earlier - median) for earlier in self.losses)
            spread = max(deviation, _LEAST_SHARE * abs(median))
        # Without a spread there are too few losses, or most losses are 0 and any other is far above.
        spikes = spread > 0.0 and loss > median + self.deviations * spread
        if spikes and not self.in_spike:
            what = f"the loss of step {record.step} is {loss:.6g}; the median before was {median:.6g}"
            run.note(what)
            run.incident("spike", what, "the run ends" if self.stop else "nothing")
            if self.stop:
                run.request_end(what)
        self.in_spike = spikes
        self.losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "in_spike": self.in_spike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.window)
        self.in_spike = state["in_spike"]
