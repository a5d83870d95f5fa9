"""Steps of torch's optimizers by its fused kernels, and such as change nothing where a number on the device says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.distributed.process_setup import is_hooked, is_torchs

# One kernel over all parameters where the default is several passes over each: a step of SGD with momentum on 5.8 M
# parameters reads and writes half as much.
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
_ON_CUDA = ("SGD", "Adam", "AdamW")
_CPU, _DEVICES = {"cpu"}, {"cpu", "cuda"}
_FUSED_DTYPES = {torch.float32, torch.float64}
_PLAIN = (nn.Parameter, Tensor)


@contextlib.contextmanager
def fused(optimizer: torch.optim.Optimizer, kinds: tuple[type, ...] = _PLAIN) -> Iterator[None]:
    """A context in which a step uses torch's fused kernels, where nobody chose others, for tensors of `kinds`."""
    own = is_torchs(optimizer) and type(optimizer).__name__ in _FUSED
    groups = [g for g in optimizer.param_groups if own and _can_fuse(g, optimizer, kinds)]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:  # what a checkpoint says of the groups stays what the job said
            group["fused"] = None


@contextlib.contextmanager
def masked(optimizer: torch.optim.Optimizer, good: Tensor) -> Iterator[None]:
    """As `fused`; the step changes nothing where not `good`, a bool []. Of an optimizer that is `maskable`."""
    scaled: Any = optimizer
    scaled.found_inf = good.logical_not().float()
    try:
        with fused(optimizer):
            yield
    finally:
        del scaled.found_inf


def maskable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the next step, of the parameters that have gradients now, may be `masked`.

    torch's fused kernels do it for float32 of which they have all the state: what a masked first step of SGD with
    momentum leaves is not set.
    """
    if not is_torchs(optimizer) or is_hooked(optimizer) or type(optimizer).__name__ not in _FUSED:
        return False
    return all(_can_fuse(g, optimizer, _PLAIN) and _is_begun(g, optimizer) for g in optimizer.param_groups)


def _is_begun(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    trained = [p for p in group["params"] if p.grad is not None]
    plain = type(optimizer).__name__ == "SGD"
    keeps = bool(group.get("momentum")) if plain else True
    key = "momentum_buffer" if plain else "step"
    known = not keeps or all(optimizer.state.get(p, {}).get(key) is not None for p in trained)
    return known and all(p.dtype == torch.float32 for p in trained)


def _can_fuse(group: dict[str, Any], optimizer: torch.optim.Optimizer, kinds: tuple[type, ...]) -> bool:
    chosen = any(group.get(name) for name in ("fused", "foreach", "differentiable", "capturable", "maximize"))
    if chosen or group.get("fused", False) is not None or group.get("foreach") is not None:
        return False
    if isinstance(group["lr"], Tensor):
        return False
    tensors = [tensor for p in group["params"] for tensor in (p, p.grad) if tensor is not None]
    # In each step, and so with few calls: a generator's every turn is one.
    fits = (
        {*map(type, tensors)}.issubset(kinds)
        and {tensor.dtype for tensor in tensors} <= _FUSED_DTYPES
        and {tensor.device.type for tensor in tensors} <= (_DEVICES if type(optimizer).__name__ in _ON_CUDA else _CPU)
        and {tensor.layout for tensor in tensors} <= {torch.strided}
        and False not in [tensor.is_contiguous() for tensor in tensors]
    )
    if not fits or _half_begun(group, optimizer):
        return False
    if group["params"] and group["params"][0].is_cuda:
        _count_on_device(group, optimizer)
    return True


def _count_on_device(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Fused kernels want step counters beside the parameters; a checkpoint has given them to the CPU."""
    for p in group["params"]:
        counter = optimizer.state[p].get("step") if p.is_cuda and p in optimizer.state else None
        if isinstance(counter, Tensor) and counter.device != p.device:
            optimizer.state[p]["step"] = counter.to(p.device)


def _half_begun(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Whether only some of a group have a momentum yet, as after an unfreezing, which torch's fused SGD cannot."""
    if not group.get("momentum"):
        return False
    begun = [
        optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in group["params"] if p.grad is not None
    ]
    return any(begun) and not all(begun)
