"""Steps of torch's optimizers with fused kernels: masked steps, and direct steps.

A flag on the device can suppress a masked step. A direct step calls a kernel without the overhead of `Optimizer.step`:
SGD.step makes about sixty calls around one kernel.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.distributed.process_setup import BY_ELEMENT, is_hooked, is_torchs
from shoal.parallel.model.sharded_model import laid_out, local

# One kernel over all parameters replaces several passes over each parameter: a step of SGD with momentum on 5.8 M
# parameters reads and writes half as much.
_ON_CUDA = tuple(kind.__name__ for kind in BY_ELEMENT)
_FUSED = (*_ON_CUDA, "Adagrad")
_CPU, _DEVICES = {"cpu"}, {"cpu", "cuda"}
_FUSED_DTYPES = {torch.float32, torch.float64}
_PLAIN = (nn.Parameter, Tensor)


@contextlib.contextmanager
def fused(optimizer: torch.optim.Optimizer, kinds: tuple[type, ...] = _PLAIN) -> Iterator[None]:
    """Use torch's fused kernels for steps within the context, unless the job chose others, on tensors of `kinds`.

    DTensors are replaced by this rank's own memory: torch's kernels cannot mask steps of DTensors, and each operation
    on a DTensor is a dispatch in Python.
    """
    own = is_torchs(optimizer) and type(optimizer).__name__ in _FUSED
    with contextlib.ExitStack() as stack:
        groups = [g for g in optimizer.param_groups if own and _fuses(g, optimizer, kinds, stack)]
        for group in groups:
            group["fused"] = True
        try:
            yield
        finally:
            for group in groups:  # checkpoints store the groups as the job made them
                group["fused"] = None


def _fuses(
    group: dict[str, Any], optimizer: torch.optim.Optimizer, kinds: tuple[type, ...], stack: contextlib.ExitStack
) -> bool:
    """Check whether torch's kernels accept a group. DTensors are replaced by local memory until `stack` closes."""
    if can_fuse(group, optimizer, kinds):
        return True
    if _is_plain(group):
        return False
    with contextlib.ExitStack() as own:
        own.enter_context(_on_local(group, optimizer))
        fuses = can_fuse(group, optimizer, kinds)
        if fuses:
            stack.push(own.pop_all())
    return fuses


def _is_plain(group: dict[str, Any]) -> bool:
    return {*map(type, group["params"])}.issubset(_PLAIN)


@contextlib.contextmanager
def _on_local(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace a group's DTensors and their states by this rank's own memory within the context."""
    whole, state = group["params"], optimizer.state
    if _is_plain(group):
        yield
        return
    with torch.no_grad():  # otherwise autograd records each conversion
        group["params"] = [local(p) for p in whole]
    pairs = [(p, own) for p, own in zip(whole, group["params"], strict=True) if own is not p]
    for parameter, own in pairs:
        own.grad = None if parameter.grad is None else local(parameter.grad)
        if parameter in state:
            state[own] = {key: local(v) if isinstance(v, Tensor) else v for key, v in state[parameter].items()}
    try:
        yield
    finally:
        group["params"] = whole
        for parameter, own in pairs:
            own.grad = None
            # Store new state of the local tensor as the parameter's: scalars unchanged, other tensors as DTensors.
            for key, value in state.pop(own, {}).items():
                earlier, is_tensor = state[parameter].get(key), isinstance(value, Tensor)
                if is_tensor and isinstance(earlier, Tensor) and local(earlier).data_ptr() == value.data_ptr() != 0:
                    continue
                state[parameter][key] = laid_out(value, parameter) if is_tensor and value.ndim > 0 else value


@contextlib.contextmanager
def masked(optimizer: torch.optim.Optimizer, good: Tensor) -> Iterator[None]:
    """Do the same as `fused`, but steps change nothing if `good`, a bool [], is False. Requires `maskable`."""
    scaled: Any = optimizer
    scaled.found_inf = good.logical_not().float()
    try:
        with fused(optimizer):
            yield
    finally:
        del scaled.found_inf


@contextlib.contextmanager
def captured(optimizer: torch.optim.Optimizer, good: Tensor, rates: Sequence[Tensor] | None) -> Iterator[None]:
    """Do the same as `masked`, for a capture in a CUDA graph. `rates`: float32 [] on the device, one for each group.

    torch's kernels read such a rate in each replay. A rate that is a number is a constant of the graph.
    """
    groups = optimizer.param_groups
    own: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "capturable") if name in group} for group in groups
    ]
    with masked(optimizer, good):
        try:
            for number, group in enumerate(groups):
                if rates is not None:
                    group["lr"] = rates[number]
                if "capturable" in group:  # Adam refuses a capture without it, and its fused kernels ignore it
                    group["capturable"] = True
            yield
        finally:
            for group, values in zip(groups, own, strict=True):
                group.update(values)


def maskable(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether the next step, of the parameters that have gradients now, may be `masked`.

    torch's fused kernels can mask a step of float32 parameters with complete state. A masked first step of SGD with
    momentum would leave uninitialised momenta.
    """
    if not is_torchs(optimizer) or is_hooked(optimizer) or type(optimizer).__name__ not in _FUSED:
        return False
    for group in optimizer.param_groups:
        with _on_local(group, optimizer):
            if not can_fuse(group, optimizer):
                return False
            trained = [p for p in group["params"] if p.grad is not None]
            is_sgd = type(optimizer).__name__ == "SGD"
            key = "momentum_buffer" if is_sgd else "step"
            has_state = not is_sgd or bool(group.get("momentum"))
            if has_state and any(optimizer.state.get(p, {}).get(key) is None for p in trained):
                return False
            if any(p.dtype != torch.float32 for p in trained):
                return False
    return True


def can_fuse(group: dict[str, Any], optimizer: torch.optim.Optimizer, kinds: tuple[type, ...] = _PLAIN) -> bool:
    """Check whether a step of a group with its current gradients may use a fused kernel."""
    chosen = any(group.get(name) for name in ("fused", "foreach", "differentiable", "capturable", "maximize"))
    if chosen or group.get("fused", False) is not None or group.get("foreach") is not None:
        return False
    if isinstance(group["lr"], Tensor):
        return False
    tensors = [tensor for p in group["params"] for tensor in (p, p.grad) if tensor is not None]
    # This runs in each step. Comprehensions need fewer calls than generators.
    fits = (
        {*map(type, tensors)}.issubset(kinds)
        and {tensor.dtype for tensor in tensors} <= _FUSED_DTYPES
        and {tensor.device.type for tensor in tensors} <= (_DEVICES if type(optimizer).__name__ in _ON_CUDA else _CPU)
        and {tensor.layout for tensor in tensors} <= {torch.strided}
        and False not in [tensor.is_contiguous() for tensor in tensors]
    )
    if not fits:
        return False
    if group.get("momentum"):
        # Only some parameters may have one, as after unfreezing. torch's fused SGD cannot handle it.
        trained = [p for p in group["params"] if p.grad is not None]
        begun = [optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in trained]
        if any(begun) and not all(begun):
            return False
    if group["params"] and group["params"][0].is_cuda:
        # Fused kernels require step counters on the parameters' device. A checkpoint loads them on the CPU.
        for p in group["params"]:
            counter = optimizer.state[p].get("step") if p.is_cuda and p in optimizer.state else None
            if isinstance(counter, Tensor) and counter.device != p.device:
                optimizer.state[p]["step"] = counter.to(p.device)
    return True


# ----------------------------------------------------------------------------------------------------- direct steps


# The steps as torch defines them. A class with a replaced `step` uses the replacement.
_STEPS: dict[type[torch.optim.Optimizer], Any] = {
    kind: getattr(kind.step, "__wrapped__", kind.step) if getattr(kind.step, "hooked", False) else kind.step
    for kind in BY_ELEMENT
}
# Instance attributes that change what an optimizer's step does.
_OWN = {"step", "grad_scale", "found_inf"}
_DIRECT_DTYPES = (torch.float32, torch.float64)
# For use with `map`, which avoids a Python loop over the parameters.
_TENSOR, _kind, _is_contiguous = {Tensor}, operator.attrgetter("layout", "dtype"), Tensor.is_contiguous


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
            fits = len(kinds) == 1 and kinds.issubset(_DIRECT_DTYPES) and all(p.is_cpu for p in parameters)
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
            # The group still has its parameters, the default kernels and a learning rate that is a float.
            values, parameters = group.values, group.parameters
            if now is not values or values["params"] is not parameters or len(parameters) != group.count:
                return False
            chosen = values["foreach"] is not None or values["fused"] is not None or values["maximize"]
            if chosen or values["differentiable"] or values.get("capturable") or type(values["lr"]) is not float:
                return False
            if bool(values["amsgrad" if self._is_adam else "momentum"]) is not group.keeps:
                return False
            if self._is_adam and Tensor in map(type, values["betas"]):
                return False
            own: list[Any] = [p.grad for p in parameters]
            if set(map(type, own)) != _TENSOR or set(map(_kind, own)) != {(torch.strided, group.dtype)}:
                return False
            if not (all(map(_is_contiguous, own)) and all(map(_is_contiguous, parameters))):
                return False
            gradients.append(own)
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for group, own in zip(self._groups, gradients, strict=True):
                values, parameters, own_states = group.values, group.parameters, group.states
                if self._is_adam:
                    steps = [state["step"] for state in own_states]
                    torch._foreach_add_(steps, 1)
                    beta1, beta2 = values["betas"]
                    (torch._fused_adamw_ if values["decoupled_weight_decay"] else torch._fused_adam_)(
                        parameters,
                        own,
                        [state["exp_avg"] for state in own_states],
                        [state["exp_avg_sq"] for state in own_states],
                        [state["max_exp_avg_sq"] for state in own_states] if group.keeps else [],
                        steps,
                        amsgrad=group.keeps,
                        lr=values["lr"],
                        beta1=beta1,
                        beta2=beta2,
                        weight_decay=values["weight_decay"],
                        eps=values["eps"],
                        maximize=False,
                    )
                else:
                    torch._fused_sgd_(
                        parameters,
                        own,
                        [state["momentum_buffer"] for state in own_states] if group.keeps else [],
                        weight_decay=values["weight_decay"],
                        momentum=values["momentum"],
                        lr=values["lr"],
                        dampening=values["dampening"],
                        nesterov=values["nesterov"],
                        maximize=False,
                        is_first_step=False,
                    )
        finally:
            torch._C._set_grad_enabled(enabled)
        return True
