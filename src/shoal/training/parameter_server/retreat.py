"""Fallback from asynchronous to synchronous training, from the last good state, if staleness spoils the loss."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from shoal.checkpoint.run_state import RunState
from shoal.checkpoint.state import OptimizerDocument, load_model, load_optimizer, model_tensors, optimizer_state
from shoal.errors import StorageError
from shoal.training.observe.step_records import Surroundings
from shoal.training.parameter_server.served_records import ServedRecords
from shoal.training.parameter_server.server import Servers
from shoal.training.parameter_server.staleness import LossGuard, foretold
from shoal.training.parameter_server.task_queue import Rules, TaskQueue
from shoal.training.setup.engine import Engine


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
