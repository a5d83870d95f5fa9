"""Fallback from asynchronous to synchronous training, from the last good state, if staleness spoils the loss.

A stability limit follows from the momentum. A guard watches the losses.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean, variance
from typing import Any

import numpy as np
from torch import Tensor

from shoal.checkpoint.keeper import RunState
from shoal.checkpoint.state import OptimizerDocument, load_model, load_optimizer, model_tensors, optimizer_state
from shoal.errors import StorageError
from shoal.training.observe.step_records import Surroundings
from shoal.training.parameter_server.served_records import ServedRecords
from shoal.training.parameter_server.server import Servers
from shoal.training.parameter_server.task_queue import Rules, TaskQueue
from shoal.training.setup.engine import Engine

# Measured on the digits and on LeNet (docs/parameter-server.md), at the right rate for up-to-date gradients:
# with shares of 1/11 and more the training works, with 1/38 and less it ends at chance.
LEAST_SHARE = 1 / 20
# Updates in the first mean and in the window; limits of a rise (standard errors) and of a fall (squared ones).
# The limit of a fall grows with the number of updates: the lowest of many windows is low by chance.
# These values separate the 13 of 49 runs on the digits that end at chance; in 2,000 updates of pure noise without
# a trend they wrongly detect a fall and a rise in 1 % to 3 %.
BEGINNING, WINDOW, ERRORS, FALL = 10, 25, 3.0, 7.0
LAST = 3


def largest_rate(momentum: float, staleness: int) -> float:
    """Return the largest product of rate and curvature at which gradient descent on a quadratic stays bounded.

    The gradients are always `staleness` updates old. The roots of z^2 - (1 + momentum) z + momentum + rate curvature
    z^(1 - staleness) must lie within the unit circle.
    """
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        powers = np.zeros(max(staleness, 1) + 2)
        powers[:3] = 1.0, -(1.0 + momentum), momentum
        powers[staleness + 1 if staleness else 1] += middle
        low, high = (middle, high) if max(abs(np.roots(powers))) <= 1.0 + 1e-9 else (low, middle)
    return low


def foretold(groups: Iterable[Mapping[str, Any]], staleness: int) -> str | None:
    """Return a warning for an optimizer with gradients that are `staleness` updates old, or None.

    The check uses the momentum in `groups` alone: only a run can show the right rate for up-to-date gradients.
    """
    momentum = max((float(group.get("momentum") or 0.0) for group in groups), default=0.0)
    if not staleness or not 0.0 < momentum < 1.0:
        return None
    share = largest_rate(momentum, staleness) / largest_rate(momentum, 0)
    if share >= LEAST_SHARE:
        return None
    return (
        f"momentum {momentum:g} and gradients of parameters that are about {staleness} update(s) old: the largest "
        f"stable rate is about 1/{1 / share:.0f} of that of up-to-date ones; without momentum it is "
        f"1/{largest_rate(0.0, 0) / largest_rate(0.0, staleness):.1f}. Take momentum out, or a tenth of the rate, or "
        'server.mode = "synchronous"'
    )


@dataclass
class LossGuard:
    """Detector of a loss that has fallen and is back where it began. `fell_back`: the fallback, set once.

    `lowest`: the lowest mean over a window, the variance there, and the number of updates until then.
    """

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    lowest: tuple[float, float, int] | None = None
    counted: int = 0
    fell_back: dict[str, Any] | None = None

    @property
    def beginning(self) -> float:
        """The mean loss of the first updates; infinite before it is known."""
        return fmean(self.first) if len(self.first) == BEGINNING else math.inf

    @property
    def now(self) -> float:
        """The mean loss over the window; infinite before the window is full."""
        return fmean(self.recent) if len(self.recent) == WINDOW else math.inf

    @property
    def lately(self) -> float:
        """The mean loss over the last few updates; infinite before there are enough."""
        return fmean(self.recent[-BEGINNING:]) if len(self.recent) >= BEGINNING else math.inf

    @property
    def of_now(self) -> float:
        """The loss of the current state: `lately`, or the mean of the last three updates if it is higher."""
        return max(self.lately, fmean(self.recent[-LAST:])) if self.lately < math.inf else math.inf

    def add(self, loss: float | None) -> None:
        """Add the loss of one more update; None for a skipped update."""
        if loss is None:
            return
        self.counted += 1
        if len(self.first) < BEGINNING:
            self.first.append(loss)
        self.recent = [*self.recent, loss][-WINDOW:]
        if self.now < (math.inf if self.lowest is None else self.lowest[0]):
            self.lowest = self.now, variance(self.recent), self.counted

    @property
    def lost(self) -> bool:
        """True if all progress is lost: the loss is back where it began, by more than batch noise explains."""
        if self.lowest is None or self.now < self.beginning or self.now <= self.lowest[0]:
            return False
        lowest, spread, at = self.lowest
        fell = math.sqrt((variance(self.first) / BEGINNING + spread / WINDOW) * (FALL + 2 * math.log(at / WINDOW)))
        rose = math.sqrt((spread + variance(self.recent)) / WINDOW) * ERRORS
        return self.beginning - lowest > fell and self.now - lowest > rose

    @property
    def learnt(self) -> bool:
        """True if the loss is below its beginning, or if that is not certain yet."""
        return self.counted < 2 * BEGINNING or self.lately < self.beginning


@dataclass(frozen=True)
class _GoodState:
    """State of a run after a step, on the CPU, with the loss at that time."""

    state: RunState
    loss: float
    model: dict[str, Tensor]
    optimizer: tuple[dict[str, Tensor], OptimizerDocument]
    callbacks: dict[str, Any]


class Retreat:
    """Fallback of a run to synchronous training, triggered by its loss."""

    def __init__(self, engine: Engine, around: Surroundings, state: RunState, servers: Servers) -> None:
        self._engine, self._around, self._state, self._servers = engine, around, state, servers
        self._plan = engine.plan
        self._guard = LossGuard(**state.server or {})
        self._good: _GoodState | None = None
        self._mode = engine.plan.server.mode
        self.era = 0  # number of restarts of the versions: a version pulled before a restart is obsolete

    @property
    def ahead(self) -> bool:
        """True if workers run ahead of each other."""
        return self._mode != "synchronous" and self._guard.fell_back is None

    @property
    def rules(self) -> Rules:
        """The current rules for handing out steps."""
        if not self.ahead:
            return Rules(self._plan.layout.data, 0)
        return Rules(1, self._plan.server.staleness if self._mode == "bounded" else None)

    @property
    def due(self) -> bool:
        """True if the run has to fall back now."""
        return self.ahead and self._guard.lost

    def begin(self) -> None:
        """Warn of expected instability, and store the first state, which is in the model now."""
        if self._mode == "synchronous":
            return
        fell_back = self._guard.fell_back
        if fell_back is not None:
            self._around.note(f"  servers     fell back to synchronous at step {fell_back['step']}")
            return
        workers, bound = self._plan.layout.data, self._plan.server.staleness
        staleness = min(workers - 1, bound) if self._mode == "bounded" else workers - 1
        text = foretold(self._engine.updater.optimizer.param_groups, staleness)
        if text is not None:
            self._around.note(f"warning: {text}")
        self._keep(math.inf)

    def count(self) -> None:
        """Count the update that the state has counted last."""
        if self._mode != "synchronous":
            self._guard.add(self._state.loss)
            self._state.server = asdict(self._guard)

    def keep_if_best(self) -> None:
        """Store the servers' state at a pause if the loss was never lower at one."""
        loss = self._guard.of_now
        if self.ahead and self._good is not None and loss < min(self._good.loss, self._guard.beginning):
            self._servers.fetch(optimizer=True)
            self._keep(loss)

    def _keep(self, loss: float) -> None:
        model, optimizer = self._engine.model, self._engine.updater.optimizer
        self._good = _GoodState(
            copy.deepcopy(self._state),
            loss,
            model_tensors(model),
            optimizer_state(optimizer, model),
            copy.deepcopy(self._engine.callbacks.for_checkpoints.states()),
        )

    def go(self, logbook: ServedRecords, desk: TaskQueue) -> int:
        """Restore the best state between two steps, to continue synchronously; return the number of steps undone."""
        good, guard, state = self._good, self._guard, self._state
        assert good is not None, "kept from the beginning"
        assert guard.lowest is not None, "a loss that has risen"
        undone, self._good = state.step, None
        guard.fell_back = {
            "step": state.step,
            "to": "synchronous",
            "from_step": good.state.step,
            "loss": guard.now,
            "lowest": guard.lowest[0],
            "beginning": guard.beginning,
        }
        self._around.note(
            f"step {state.step}: the loss is {guard.now:.4g}, up from {guard.lowest[0]:.4g} to where it began "
            f"({guard.beginning:.4g}): gradients of parameters that are out of date do not train this. Back to step "
            f"{good.state.step}, and synchronous from there"
        )
        vars(state).update(vars(good.state), server=asdict(guard))
        load_model(self._engine.model, good.model)
        load_optimizer(self._engine.updater.optimizer, self._engine.model, *good.optimizer)
        self._engine.callbacks.for_checkpoints.restore(
            good.callbacks, {}
        )  # no parameter tensors: these are on the servers
        self._servers.load(state.step)
        self.era += 1
        desk.restart(self.rules, state.step)
        logbook.restart(guard.fell_back)
        with contextlib.suppress(StorageError):  # already reported
            self._engine.keeper.restart(state)
        return undone - state.step

    def to_json(self) -> dict[str, Any]:
        """Return fallback and warning for the run's result, as JSON values; empty in synchronous mode."""
        if self._mode == "synchronous":
            return {}
        guard, warning = self._guard, None
        if not guard.learnt:
            warning = (
                f"nothing was learnt: the loss of the last updates is {guard.lately:.4g}, "
                f"that of the first was {guard.beginning:.4g}"
            )
        return {"fell_back": guard.fell_back, "warning": warning}
