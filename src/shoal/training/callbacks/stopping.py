"""Callbacks that watch a metric: EarlyStopping ends a run without improvement, KeepBest keeps the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from shoal.errors import JobError
from shoal.jobs.job import Job, meant_metric
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
