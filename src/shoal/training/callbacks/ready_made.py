"""Ready-made callbacks: early stopping, the best checkpoint, spikes of the loss, and samples of the model."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from torch import nn

from shoal.errors import JobError
from shoal.jobs.job import Job, meant_metric
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import Callback, RunControl

Mode = Literal["min", "max"]


class EarlyStopping(Callback):
    """Ends the training after `patience` evaluations in a row that did not improve a metric by more than `min_delta`.

    `mode`: "min" if smaller values are better, "max" if larger values are. A non-finite value is no improvement.
    Source: Prechelt, Early Stopping - But When? (Neural Networks: Tricks of the Trade, 1998).
    """

    required = True

    def __init__(self, metric: str = "loss", *, patience: int = 3, mode: Mode = "min", min_delta: float = 0.0) -> None:
        """Raise JobError for an invalid patience, mode or difference."""
        _refuse_mode("EarlyStopping", metric, mode)
        if not isinstance(patience, int) or patience < 1 or not (min_delta >= 0.0 and math.isfinite(min_delta)):
            raise JobError(
                given=f"EarlyStopping({metric!r}, patience={patience!r}, min_delta={min_delta!r})",
                conflict="patience counts evaluations, at least one, and min_delta is a difference of at least 0",
                remedy=f'write EarlyStopping({metric!r}, patience=3, mode="{mode}")',
            )
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best: float | None = None
        self.waited = 0

    def on_start(self, run: RunControl) -> None:
        self._judge(run)

    def on_evaluation(self, run: RunControl, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:  # another evaluation of a Session's loop
            return
        value = metrics[self.metric]
        sign = 1.0 if self.mode == "max" else -1.0
        if math.isfinite(value) and (self.best is None or sign * (value - self.best) > self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._judge(run)

    def _judge(self, run: RunControl) -> None:
        if self.waited >= self.patience:
            best = "was never finite" if self.best is None else f"is not better than {self.best:.6g}"
            run.request_end(f"{self.metric} {best} in {self.waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["metric"] == self.metric:  # the state of another metric does not apply
            self.best, self.waited = state["best"], state["waited"]

    def mistakes(self, job: Job) -> Iterator[tuple[str, str, str]]:
        yield from unknown_metric(self, self.metric, job)


class KeepBest(Callback):
    """Keeps the checkpoint of the best evaluation as `checkpoints/best`; the same as `Job(watch="METRIC:MODE")`."""

    def __init__(self, metric: str = "loss", *, mode: Mode = "min") -> None:
        """Raise JobError for an invalid mode."""
        _refuse_mode("KeepBest", metric, mode)
        self.metric, self.mode = metric, mode

    @property
    def watch(self) -> str:
        """The metric and its mode, as `Job.watch`."""
        return f"{self.metric}:{self.mode}"

    def mistakes(self, job: Job) -> Iterator[tuple[str, str, str]]:
        yield from unknown_metric(self, self.metric, job)


def _refuse_mode(name: str, metric: object, mode: object) -> None:
    if mode not in ("min", "max") or not isinstance(metric, str):
        raise JobError(
            given=f"{name}({metric!r}, mode={mode!r})",
            conflict="the best of a metric is its smallest or its largest",
            remedy=f'write {name}("loss", mode="min") or {name}("accuracy", mode="max"), say',
        )


def unknown_metric(callback: Callback, metric: str, job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield a mistake if no evaluation of the job gives the metric."""
    known = job.metric_names
    if metric not in known:
        name = type(callback).__name__
        meant = meant_metric(metric, known)
        yield f"{name}({metric!r})", f"an evaluation gives {', '.join(known)}", f"write {name}({meant!r}, ...)"


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
                conflict="it calls a function of (model, run) every `every` steps",
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
