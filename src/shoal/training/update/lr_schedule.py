"""Schedule: a torch learning-rate scheduler as a job's schedule. shoal's warm-up is `jobs/job.py:WarmupCosine`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.checkpoint.whole_optimizer import parts, rated
from shoal.distributed.failures import user_error
from shoal.errors import JobError, ShoalError
from shoal.jobs.job import Progress


class Schedule:
    """Learning rates, and cyclic momenta, as a torch scheduler sets them.

    `scheduler`: a class of torch.optim.lr_scheduler, or a function that returns a scheduler. Its arguments are an
    optimizer, `num_steps` and `settings`; the function may call `num_steps`, its second parameter, by another name or
    leave it out. `every`: number of steps between steps of the scheduler. The optimizer has the groups of the job's
    optimizer, but no parameters. A resumed run replays the scheduler from the first step, so it is not in checkpoints,
    and it is identical on every rank and server.
    """

    def __init__(self, scheduler: Callable[..., Any], *, every: int = 1, **settings: Any) -> None:
        """Set the scheduler and its settings. Raises: JobError for a scheduler that is not a function of the step."""
        self.scheduler, self.every, self.settings = scheduler, every, settings
        if isinstance(scheduler, type) and issubclass(scheduler, ReduceLROnPlateau):
            raise JobError(
                given="Schedule(ReduceLROnPlateau)",
                conflict="it follows a metric, and a schedule is a function of the step",
                remedy="write a schedule of progress, shoal.EarlyStopping, or a loop of your own with shoal.Session",
            )
        if not callable(scheduler) or isinstance(scheduler, LRScheduler):
            raise JobError(
                given=f"Schedule({scheduler!r:.60})",
                conflict="every rank makes its own scheduler",
                remedy="give its class and settings: shoal.Schedule(torch.optim.lr_scheduler.StepLR, step_size=30)",
            )
        if not isinstance(every, int) or every < 1:
            raise JobError(
                given=f"Schedule(every={every!r})",
                conflict="every is a number of steps, at least one",
                remedy="write every=1",
            )

    def __call__(self, progress: float) -> float:
        """Raise a JobError: a Schedule sets learning rates, and returns no multiplier of them."""
        raise JobError(
            given="shoal.Schedule where a multiplier of rates is asked for",
            conflict="a torch scheduler sets the rates of an optimizer's groups",
            remedy="in a loop of your own give the scheduler to Session.prepare; in a job to Job(schedule=...)",
        )

    def rates(self, optimizer: torch.optim.Optimizer) -> ScheduledRates:
        """Return the rates for an optimizer. Its groups must have their initial values."""
        return ScheduledRates(self, optimizer)

    def __repr__(self) -> str:
        return f"Schedule({getattr(self.scheduler, '__name__', 'function')})"


class _Rehearsed(torch.optim.Optimizer):
    """Optimizer for a scheduler to modify, with the groups of another optimizer and empty parameters."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__([{**group, "params": [torch.nn.Parameter(torch.empty(0))]} for group in groups], defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class ScheduledRates:
    """Learning rates of an optimizer's groups at any step, from a torch scheduler."""

    def __init__(self, schedule: Schedule, optimizer: torch.optim.Optimizer) -> None:
        self._schedule, self._parts = schedule, tuple(parts(optimizer).values())
        self._first = [{k: _plain(v) for k, v in g.items() if k != "params"} for g in rated(self._parts)]
        self._defaults = {name: _plain(value) for name, value in getattr(optimizer, "defaults", {}).items()}
        self._schedulers: tuple[_Rehearsed, Any] | None = None
        self._turn = 0

    def set(self, progress: Progress) -> float:
        """Set the groups' values for a step, and return the first group's rate. Raises: UserCodeError, JobError."""
        wanted = progress.step // self._schedule.every
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about resumed schedulers: this one is replayed
                if self._schedulers is None or wanted < self._turn:
                    make, settings = self._schedule.scheduler, dict(self._schedule.settings)
                    rehearsed = _Rehearsed(self._first, self._defaults)
                    positional = []
                    if not isinstance(make, type):
                        parameters = inspect.signature(make).parameters
                        second = next(
                            iter([p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]), None
                        )
                        if "num_steps" in parameters:
                            settings["num_steps"] = progress.num_steps
                        elif second and second.default is second.empty and second.name not in settings:
                            positional = [progress.num_steps]  # lambda optimizer, n: ...
                    own_scheduler = make(rehearsed, *positional, **settings)
                    if not isinstance(own_scheduler, LRScheduler) or isinstance(own_scheduler, ReduceLROnPlateau):
                        raise JobError(
                            given=f"{self._schedule!r}, which makes {type(own_scheduler).__name__}",
                            conflict="a schedule is one of torch.optim.lr_scheduler that follows from the step alone",
                            remedy="return one, for example torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, "
                            "num_steps)",
                        )
                    self._schedulers, self._turn = (rehearsed, own_scheduler), 0
                optimizer, scheduler = self._schedulers
                while self._turn < wanted:
                    optimizer.step()
                    scheduler.step()
                    self._turn += 1
                groups = optimizer.param_groups
        except ShoalError:
            raise
        except Exception as error:
            raise user_error("the schedule", error) from error
        for group, values in zip(rated(self._parts), groups, strict=True):
            for name, value in values.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                elif name not in ("params", "initial_lr"):
                    group[name] = value
        return float(groups[0]["lr"]) if groups else 0.0


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
