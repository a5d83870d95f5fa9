"""Numerical equivalence tests of a block, whole and divided: output and gradients by name."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.numerics.operators import tensors_in
from shoal.parallel.model.trial import SEED, Values, WithoutDropout, floor_of, gradients, is_same, materialised
from shoal.parallel.sequence.positions import tensors_by_path, with_tensors
from shoal.parallel.sequence.trace import BlockTrace, copied

OUTPUT = "what it returns"
OF_PARAMETER = "the gradient of parameter "


@dataclass(frozen=True)
class BlockResult:
    """Output and gradients of a block by name. `shapes`: output shapes of the inner modules, by module name."""

    values: dict[str, Tensor]
    shapes: dict[str, list[torch.Size]]


@dataclass(frozen=True)
class BlockTrial:
    """Whole block on random numbers, and an equal block to divide."""

    whole: BlockResult
    floor: float  # smaller gradients are compared on this scale
    divided: nn.Module
    arguments: Any

    @classmethod
    def of(cls, model: nn.Module, name: str, values: Values, trace: BlockTrace, device: torch.device) -> BlockTrial:
        """Return the trial of a block of the model, in float64 if the block supports it.

        Raises: what the block raises.
        """
        generator = torch.Generator().manual_seed(SEED)
        module = materialised(model, name, values, generator).to(device)

        def numbers(path: Any, tensor: Tensor) -> Tensor:
            shape, dtype = tensor.shape, tensor.dtype
            if dtype == torch.bool:
                value = torch.rand(shape, generator=generator) < 0.7
                value[..., :1] = True  # a position needs at least one key that is not masked
            elif dtype.is_complex:
                value = torch.randn(shape, dtype=torch.complex128, generator=generator)
            elif dtype.is_floating_point:
                value = torch.randn(shape, dtype=torch.float64, generator=generator)
            else:
                value = (torch.arange(tensor.numel()) % trace.length).view(shape).to(dtype)
            return value.to(device).requires_grad_(path == trace.hidden or tensor.requires_grad)

        values_by_path = {path: numbers(path, tensor) for path, tensor in tensors_by_path(trace.arguments)}
        arguments = with_tensors(trace.arguments, values_by_path)
        divided = copy.deepcopy(module)  # before a forward, which may leave state that cannot be copied
        try:
            whole = computed(module, arguments)
        except Exception:  # code that creates float32 tensors does not compute in float64
            doubles = ((path, t) for path, t in tensors_by_path(arguments) if t.dtype == torch.float64)
            floats = {path: t.detach().float().requires_grad_(t.requires_grad) for path, t in doubles}
            divided, arguments = divided.float(), with_tensors(arguments, floats)
            whole = computed(module.float(), arguments)
        floor = floor_of(gradient for key, gradient in whole.values.items() if key != OUTPUT)
        return cls(whole, floor, divided, arguments)

    def is_same(self, key: str, value: Tensor, wanted: Tensor) -> bool:
        """Return True if the result for a name is the wanted one, but for rounding."""
        return is_same(value, wanted, 0.0 if key == OUTPUT else self.floor)


def computed(module: nn.Module, arguments: Any) -> BlockResult:
    """Return output and gradients of a module by name; the module and its arguments do not change."""
    leaves = {path: t.detach().clone().requires_grad_(t.requires_grad) for path, t in tensors_by_path(arguments)}
    devices = [d for d in {t.device for t in leaves.values()} if d.type == "cuda"]
    # Clones: a leaf that requires a gradient cannot be changed in place.
    args, kwargs = copied(with_tensors(arguments, {path: leaf.clone() for path, leaf in leaves.items()}))
    shapes: dict[str, list[torch.Size]] = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        shapes.setdefault(name, []).extend(t.shape for t in tensors_in(output))

    handles = [m.register_forward_hook(partial(note, name)) for name, m in module.named_modules() if name]
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), WithoutDropout():
            torch.manual_seed(SEED)
            _, output = next(tensors_by_path(module(*args, **kwargs)))
    finally:
        for handle in handles:
            handle.remove()
    wanted = {f"the gradient of argument {path}": t for path, t in leaves.items() if t.requires_grad}
    wanted |= {f"{OF_PARAMETER} {name}": p for name, p in module.named_parameters() if p.requires_grad}
    return BlockResult({OUTPUT: output.detach(), **gradients([output], wanted)}, shapes)
