"""Optimizer costs: bytes of state and bytes moved for each element, measured on one step with fake parameters."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.planner.profile.operators import costs
from shoal.planner.profile.trace import OperatorRecorder, OperatorTrace, StorageRef
from shoal.training.update.fused_step import fused
from shoal.training.update.job_optimizer import Parameters

# Number of parameters in the traced step; the others cost the same per element.
_FEW = 6
# Tensors in one kernel of torch's multi_tensor_apply. A kernel takes fewer large tensors (320 chunks of 65536
# elements), but those kernels start without Python between them and run 100 times longer than a launch takes.
_TENSORS_A_LAUNCH = 30


@dataclass(frozen=True)
class OptimizerCost:
    """Cost of an optimizer step; `note` is set if the cost is a guess.

    `state_bytes_per_element`: bytes of state for each trainable element. `passes`: reads and writes of each element.
    """

    state_bytes_per_element: float = 8.0
    passes: float = 7.0
    launches: int = 0
    note: str | None = None


def update(
    make: Callable[[Any], Any], model: nn.Module, mode: contextlib.AbstractContextManager[Any], device: str
) -> OptimizerCost:
    """Return the cost of the second step of the torch-style optimizer `make(parameters)`."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        return OptimizerCost(0.0, 0.0, 0)
    text = ""
    try:
        for capturable in (False, True):  # True for optimizers whose step count is a tensor that cannot be read here
            try:
                with mode, torch.no_grad():
                    return _measured(make(Parameters(model)), [p for _, p in named], device, capturable)
            except Exception as error:
                text = text or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return OptimizerCost(note=f"the optimizer could not be traced, and counts as a fused Adam: {text}")
    finally:
        for _, parameter in named:
            parameter.grad = None


def _measured(optimizer: Any, parameters: list[nn.Parameter], device: str, capturable: bool) -> OptimizerCost:
    """Return the cost of the second step on the largest parameters, extrapolated to all."""
    choosing = [g for g in optimizer.param_groups if "foreach" in g and g["foreach"] is None and not g.get("fused")]
    if device != "cpu":
        for group in choosing:
            group["foreach"] = True  # torch's default if all parameters are on a GPU
    for group in optimizer.param_groups:
        if "capturable" in group and capturable:
            group["capturable"] = True
    largest = sorted(parameters, key=lambda p: -p.numel())[:_FEW]
    for parameter in largest:
        parameter.grad = torch.empty_like(parameter)
    trace = OperatorTrace(1)
    # The same optimizer step as in the engine's fast mode (training/update/optimizer_step.py).
    kinds = (nn.Parameter, Tensor, FakeTensor)
    with _capturable_anywhere(), fused(optimizer, kinds) if device == "cpu" else contextlib.nullcontext():
        optimizer.step()
        with OperatorRecorder(trace):
            optimizer.step()
    launches, moved_bytes = 0.0, 0.0
    for event in trace.events:
        lists = (v for v in event.arguments.values() if isinstance(v, list) and v and isinstance(v[0], StorageRef))
        length = len(next(lists, []))
        for cost in costs(event):
            moved_bytes += cost.read_bytes + cost.written_bytes
            if "_foreach_" in event.name or "_fused_" in event.name:
                launches += max(1, -(-len(parameters) * length / len(largest) // _TENSORS_A_LAUNCH))
            else:
                launches += len(parameters) / len(largest)
    elements = sum(p.numel() for p in largest)
    state = [v for p in largest for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    width = sum(p.numel() * p.itemsize for p in largest) / elements
    return OptimizerCost(sum(t.nbytes for t in state) / elements, moved_bytes / elements / width, round(launches))


@contextlib.contextmanager
def _capturable_anywhere() -> Iterator[None]:
    """Allow `capturable` on the CPU, whose fake tensors stand for an accelerator's here."""
    name = "_get_capturable_supported_devices"
    changed = [m for key, m in sys.modules.items() if key.startswith("torch.optim.") and hasattr(m, name)]
    allowed = getattr(sys.modules["torch.optim.optimizer"], name)

    def devices(*args: Any, **kwargs: Any) -> list[str]:
        return [*allowed(*args, **kwargs), "cpu"]

    for module in changed:
        setattr(module, name, devices)
    try:
        yield
    finally:
        for module in changed:
            setattr(module, name, allowed)
