"""Fused step of torch's own optimizers on CPUs by a direct kernel call, without the overhead of `Optimizer.step`.

SGD.step makes about sixty calls around one kernel.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.distributed.process_setup import BY_ELEMENT, is_hooked
from shoal.training.update.fused_step import can_fuse

# The steps as torch defines them. A class with a replaced `step` uses the replacement.
_STEPS: dict[type[torch.optim.Optimizer], Any] = {
    kind: getattr(kind.step, "__wrapped__", kind.step) if getattr(kind.step, "hooked", False) else kind.step
    for kind in BY_ELEMENT
}
# Instance attributes that change what an optimizer's step does.
_OWN = {"step", "grad_scale", "found_inf"}
_DTYPES = (torch.float32, torch.float64)
# For use with `map`, which avoids a Python loop over the parameters.
_PLAIN, _kind, _is_contiguous = {Tensor}, operator.attrgetter("layout", "dtype"), Tensor.is_contiguous


@dataclass(frozen=True)
class _KernelGroup:
    """Group of an optimizer with its parameters, all of one dtype, and their states."""

    values: dict[str, Any]
    parameters: list[Tensor]
    count: int
    states: list[dict[str, Any]]
    dtype: torch.dtype
    keeps: bool  # momentum, or the maximum squares of amsgrad


class DirectStep:
    """Direct step of an optimizer, valid while groups, states and gradients are as in the last fused step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._groups = optimizer, list[_KernelGroup]()
        self._is_adam = not isinstance(optimizer, torch.optim.SGD)
        self._states: list[dict[str, Any]] = []
        self._step: Any = None

    def learn(self) -> None:
        """Store groups and states after an ordinary step if the next step would be fused on the CPU."""
        optimizer, self._groups = self._optimizer, []
        step = type(optimizer).step
        original = getattr(step, "__wrapped__", None) if getattr(step, "hooked", False) else step
        if original is not _STEPS.get(type(optimizer)):
            return
        groups = []
        for values in optimizer.param_groups:
            parameters, state = values["params"], optimizer.state
            kinds = {p.dtype for p in parameters}
            fits = len(kinds) == 1 and kinds.issubset(_DTYPES) and all(p.is_cpu for p in parameters)
            if not fits or not can_fuse(values, optimizer):
                return
            keeps = bool(values["amsgrad" if self._is_adam else "momentum"])
            needed = ["step", "exp_avg", "exp_avg_sq"] if self._is_adam else []
            if keeps:
                needed.append("max_exp_avg_sq" if self._is_adam else "momentum_buffer")
            states = [state[p] for p in parameters if p in state]
            complete = all(isinstance(own.get(key), Tensor) for own in states for key in needed)
            if needed and not (complete and len(states) == len(parameters)):
                return
            groups.append(_KernelGroup(values, parameters, len(parameters), states, kinds.pop(), keeps))
        self._groups, self._states, self._step = groups, list(optimizer.state.values()), step

    def take(self) -> bool:
        """Step the optimizer. Return False, without any change, if something differs from the stored state."""
        optimizer = self._optimizer
        groups, states = optimizer.param_groups, optimizer.state
        if not self._groups or len(groups) != len(self._groups) or len(states) != len(self._states):
            return False
        if type(optimizer).step is not self._step or is_hooked(optimizer) or not _OWN.isdisjoint(vars(optimizer)):
            return False
        if not all(map(operator.is_, states.values(), self._states)) or torch._C._autograd._profiler_enabled():
            return False
        gradients = []
        for now, group in zip(groups, self._groups, strict=True):
            own = _gradients(group) if now is group.values and _is_plain(group) else None
            if own is None:
                return False
            gradients.append(own)
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for group, own in zip(self._groups, gradients, strict=True):
                (_adam if self._is_adam else _sgd)(group, own)
        finally:
            torch._C._set_grad_enabled(enabled)
        return True


def _adam(group: _KernelGroup, gradients: list[Tensor]) -> None:
    values, states = group.values, group.states
    steps = [own["step"] for own in states]
    torch._foreach_add_(steps, 1)
    beta1, beta2 = values["betas"]
    (torch._fused_adamw_ if values["decoupled_weight_decay"] else torch._fused_adam_)(
        group.parameters,
        gradients,
        [own["exp_avg"] for own in states],
        [own["exp_avg_sq"] for own in states],
        [own["max_exp_avg_sq"] for own in states] if group.keeps else [],
        steps,
        amsgrad=group.keeps,
        lr=values["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=values["weight_decay"],
        eps=values["eps"],
        maximize=False,
    )


def _sgd(group: _KernelGroup, gradients: list[Tensor]) -> None:
    values = group.values
    torch._fused_sgd_(
        group.parameters,
        gradients,
        [own["momentum_buffer"] for own in group.states] if group.keeps else [],
        weight_decay=values["weight_decay"],
        momentum=values["momentum"],
        lr=values["lr"],
        dampening=values["dampening"],
        nesterov=values["nesterov"],
        maximize=False,
        is_first_step=False,
    )


def _is_plain(group: _KernelGroup) -> bool:
    """Check whether a group still has its parameters, the default kernels and a learning rate that is a float."""
    values = group.values
    if values["params"] is not group.parameters or len(group.parameters) != group.count:
        return False
    chosen = values["foreach"] is not None or values["fused"] is not None or values["maximize"]
    if chosen or values["differentiable"] or values.get("capturable") or type(values["lr"]) is not float:
        return False
    if "momentum" in values:
        return bool(values["momentum"]) is group.keeps
    return bool(values["amsgrad"]) is group.keeps and Tensor not in map(type, values["betas"])


def _gradients(group: _KernelGroup) -> list[Tensor] | None:
    """Return the gradients of a group, or None if a parameter lacks a gradient that the kernel accepts."""
    gradients: list[Any] = [p.grad for p in group.parameters]
    if set(map(type, gradients)) != _PLAIN or set(map(_kind, gradients)) != {(torch.strided, group.dtype)}:
        return None
    return gradients if all(map(_is_contiguous, gradients)) and all(map(_is_contiguous, group.parameters)) else None
