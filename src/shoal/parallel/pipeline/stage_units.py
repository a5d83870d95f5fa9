"""FSDP units of pipeline stages: parameters cut over the shard axis, gathered when a stage computes them.

torch's fully_shard cuts and moves the parameters; this module decides when. torch's own hooks assume a model that runs
as a whole. A stage stubs modules and leaves the model in the middle. Several microbatches are between forward and
backward at a time, and under zero bubble their gradients come in two halves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves

from shoal.parallel.shard.torch_release import param_groups, release_gathered
from shoal.plans.schedule import Action, ActionKind, Actions

# Backwards that compute gradients of weights.
_WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass
class GatherUnit:
    """Parameters that are gathered together, and the stages of this rank that use them; `name`: their module."""

    name: str
    group: Any  # torch's FSDPParamGroup
    stages: frozenset[int]

    def weights(self) -> list[Tensor]:
        """Return the parameters that autograd uses, gathered or not; none before a first forward."""
        return [p._unsharded_param for p in self.group.fsdp_params if hasattr(p, "_unsharded_param")]

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the unit for a forward; return the forward's arguments. Collective: the shard axis, an all-gather."""
        return self.group.pre_forward(None, args, kwargs)  # type: ignore[no-any-return]

    def leave(self, output: Any) -> None:
        """Release the unit after the forward that returned `output`. The output's gradient gathers the unit again."""
        self.group.post_forward(None, None, output)
        for leaf in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.group.pre_backward(False))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Return the context of a forward that a backward recomputes: the unit is gathered meanwhile."""
        lacking = not self.group.is_unsharded
        if lacking:
            self.gather()
        try:
            yield
        finally:
            if lacking:
                self.group._to_sharded()

    def gather(self) -> None:
        """Gather the unit for a backward. Collective: the shard axis, an all-gather if it is not gathered yet."""
        self.group._training_state = TrainingState.PRE_BACKWARD
        self.group.unshard(False)
        self.group.wait_for_unshard()

    def end(self) -> None:
        """Scatter, after a stage's backward, the gradients for which autograd did not call the hook."""
        if self.weights() and self.group._training_state != TrainingState.POST_BACKWARD:
            self.group.post_backward()
        self.group._training_state = TrainingState.IDLE
        self.group.finalize_backward()


class StageUnits:
    """Units of one rank's stages; `used[s]` names the parameters of its stage s.

    `keep`: parameters stay gathered within a step (level "gradients"). Otherwise each forward and backward gathers
    again, under zero bubble both halves of a backward. `late`: only the last microbatch scatters gradients.
    """

    def __init__(self, model: nn.Module, used: Mapping[int, set[str]], *, keep: bool, late: bool) -> None:
        self._model, self._keep, self._late = model, keep, late
        names = {id(p): name for name, p in model.named_parameters()}
        self.inner: dict[str, GatherUnit] = {}
        self.own: GatherUnit | None = None  # parameters in no other unit, gathered for a stage as a whole
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                state._pre_forward_hook_handle.remove()
                state._post_forward_hook_handle.remove()
                for group in param_groups(module):
                    inside = {names[id(p.sharded_param)] for p in group.fsdp_params}
                    unit = GatherUnit(name, group, frozenset(stage for stage in used if used[stage] & inside))
                    if not name:
                        self.own = unit
                    else:
                        self.inner[name] = unit
        self._lasts: dict[int, Action] = {}

    @property
    def units(self) -> list[GatherUnit]:
        """All units of this rank."""
        return [*self.inner.values(), *([self.own] if self.own is not None else [])]

    def of(self, stage: int) -> list[GatherUnit]:
        """Return the units that a stage uses."""
        return [unit for unit in self.units if stage in unit.stages]

    def weights(self) -> list[Tensor]:
        """Return the parameters that autograd uses, gathered or not; call after a first forward."""
        plain = [p for p in self._model.parameters() if not hasattr(p, "to_local") and not p.is_meta]
        return [p for p in (*plain, *(p for unit in self.units for p in unit.weights())) if p.requires_grad]

    # ------------------------------------------------------------------------------------------------ one step

    def begin(self, own: Actions) -> None:
        """Prepare a rank's actions of one step: record each unit's last backward."""
        if self.units:
            root: Any = self._model
            root._get_fsdp_state()._lazy_init()  # after the cut parameters have memory, and before any unit by itself
        self._lasts = {}
        for action in own:
            if action.kind in _WEIGHTS:
                self._lasts |= {id(unit): action for unit in self.of(action.stage)}

    def end(self) -> None:
        """Free all gathered parameters before the update. After an evaluation they may stay gathered."""
        for unit in self.units:
            unit.group.reshard()

    @contextlib.contextmanager
    def forward(self, stage: int) -> Iterator[Callable[[Any], None]]:
        """Return the context of a stage's forward; it yields a function to call with the forward's output."""
        own = self.own if self.own is not None and stage in self.own.stages else None
        if own is not None:
            own.enter((), {})
        yield own.leave if own is not None else lambda _: None
        for unit in self.of(stage)[:1]:
            release_gathered(unit.group)
            unit.group.comm_ctx.post_forward_order.clear()

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Return the context of an action, without effect on a forward.

        Collective: the shard axis, an all-gather per unit that is not gathered and a reduce-scatter per unit that is
        due.
        """
        units = self.of(action.stage) if action.kind is not ActionKind.FORWARD else []
        for unit in units:
            last = self._lasts[id(unit)] == action
            due = action.kind in _WEIGHTS and (last or not self._late)
            unit.group.reduce_grads = unit.group.all_reduce_grads = due
            unit.group.reshard_after_backward = last or not self._keep
        yield
        for unit in units:
            unit.end()
        for unit in units[:1]:
            scattered = unit.group.comm_ctx.reduce_scatter_states
            for state in scattered:
                if state.event is not None:
                    unit.group.device_handle.current_stream().wait_event(state.event)
            scattered.clear()

    def turns(self, stage: int, groups: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Yield before each group of weights, for the computation of their gradients, and once at the end.

        A unit is gathered before the first group with a weight of the unit, and scattered after the last.
        """
        units = self.of(stage)
        homes = {id(w): number for number, unit in enumerate(units) for w in unit.weights()}
        due = [{homes[id(w)] for w in group if id(w) in homes} for group in groups]
        for place, numbers in enumerate(due):
            for number in sorted(numbers):
                units[number].gather()
            yield
            for number in numbers.difference(*due[place + 1 :]):
                units[number].group.post_backward()
        yield
