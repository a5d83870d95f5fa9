"""Hooks on parameters, called once a step with the mean gradient of the global batch.

Autograd would call them with the gradient of each microbatch on each rank. A hook that is not linear (clipping,
normalisation, noise) would then change the sums, and a parameter cut over ranks loses its hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.distributed.failures import user_error
from shoal.errors import JobError, ShoalError
from shoal.numerics.generators import generators_kept, seed_everything
from shoal.plans.plan import Plan

if TYPE_CHECKING:
    from shoal.parallel.model.sharded_model import TensorSlice

# Hooks by the id in their handles. A handle removes its hook from this very dict.
_Calls = dict[Any, Any]


@dataclass(frozen=True)
class _Hooks:
    """Hooks of one parameter: on its gradient, and after its accumulation."""

    on_gradient: _Calls
    on_parameter: _Calls


class ParameterHooks:
    """Hooks that the job's code has registered on parameters of a model before the first step.

    `by_name`: the hooks of each parameter that has some, in the order in which `take` removed them.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.by_name: dict[str, list[_Hooks]] = {}
        if model is not None:
            self.take(model)

    def take(self, model: nn.Module) -> None:
        """Remove the current hooks from the parameters and store them."""
        for name, parameter in model.named_parameters():
            hooks = _Hooks(parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {})
            if hooks.on_gradient:
                parameter._backward_hooks = None
            if hooks.on_parameter:  # after None, torch would still call the old hooks
                parameter._post_accumulate_grad_hooks = OrderedDict()
            if hooks.on_gradient or hooks.on_parameter:
                self.by_name.setdefault(name, []).append(hooks)

    def give_back(self, model: nn.Module) -> None:
        """Restore the hooks, so that autograd calls them again."""
        for name, own_hooks in self.by_name.items():
            parameter = model.get_parameter(name)
            for hooks in own_hooks:
                parameter._backward_hooks = hooks.on_gradient or parameter._backward_hooks
                parameter._post_accumulate_grad_hooks = hooks.on_parameter or parameter._post_accumulate_grad_hooks

    @torch.no_grad()
    def call(self, parameters: Mapping[str, nn.Parameter], key: int) -> None:
        """Call the hooks of parameters with a gradient, under the seed `key`; the hooks may replace `.grad`.

        Raises: UserCodeError for what a hook raises; JobError for a hook that updates its parameter.
        Collective: ranks with parts of a parameter gather its gradient and value.
        """
        with generators_kept():
            seed_everything(key)
            for name, own_hooks in self.by_name.items():
                parameter = parameters.get(name)
                if parameter is None or parameter.grad is None:
                    continue
                try:
                    _call_hooks(name, own_hooks, parameter)
                except ShoalError:
                    raise
                except Exception as error:
                    raise user_error(f"a hook on the parameter {name}", error) from error


def _call_hooks(name: str, own_hooks: list[_Hooks], parameter: nn.Parameter) -> None:
    whole: Any = parameter
    if hasattr(parameter, "full_tensor"):  # a DTensor; a hook sees the whole
        whole = nn.Parameter(parameter.full_tensor())
        whole.grad = parameter.grad.full_tensor()  # type: ignore[union-attr]
    before, version = whole.detach().clone() if whole is not parameter else None, whole._version
    for call in [call for hooks in own_hooks for call in hooks.on_gradient.values()]:
        replaced = call(whole.grad)
        if replaced is not None:
            whole.grad.copy_(replaced)
    for call in [call for hooks in own_hooks for call in hooks.on_parameter.values()]:
        if whole.grad is not None:
            call(whole)
    if whole._version != version or (before is not None and not torch.equal(before, whole)):
        raise JobError(
            given=f"a hook on the parameter {name} that changes the parameter itself",
            conflict="the job's optimizer updates the parameters, once a step, and a checkpoint has its state alone",
            remedy="let the hook change parameter.grad, and the optimizer of the job update the parameter",
        )
    if whole is not parameter:
        if whole.grad is None:
            parameter.grad = None
            return
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        own: Any = parameter.grad  # this rank's rows
        shape, offset = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)
        own.to_local().copy_(whole.grad[offset[0] : offset[0] + shape[0]])


def refuse_hooks(hooks: ParameterHooks, parts: Mapping[str, TensorSlice], plan: Plan) -> None:
    """Raise JobError for a parameter with hooks that a plan cannot call.

    `parts`: parameters cut over the tensor axis.
    """
    for name in hooks.by_name:
        if plan.serves:
            how, why = f'server.mode = "{plan.server.mode}"', "the servers have the summed gradients and call no hook"
        elif plan.shards_model and plan.shard.offload:
            how, why = "shard.offload = true", "a hook sees the whole gradient, and the ranks gather none on the host"
        elif name in parts and not parts[name].is_whole:
            how, why = "tensor > 1", "the tensor axis cuts this parameter, and a hook sees the whole gradient"
        else:
            continue
        raise JobError(
            given=f"a hook on the parameter {name}, with {how}",
            conflict=why,
            remedy="divide by the data, shard or pipeline axis without these, or leave the hook out",
        )
