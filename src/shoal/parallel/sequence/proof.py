"""Proof that a block may be divided: whole against divided, on all ranks together, in float64 on random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import ShoalError
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.sequence.attention import DROPOUTS, refusal
from shoal.parallel.sequence.layers import BlockWrapper, Chain, give_role
from shoal.parallel.sequence.plan import BlockPlan, ContextPlan
from shoal.parallel.sequence.trace import BlockTrace, copied, tensors_in, with_tensors
from shoal.parallel.tensor.proof import is_same, materialised

SEED = 20205198
# A gradient that is zero but for rounding is compared on the scale of the largest.
FLOOR = 1e-2
OUTPUT = "what it returns"
OF_PARAMETER = "the gradient of parameter "
_WHY = (
    "something in it mixes positions other than F.scaled_dot_product_attention (a convolution, a recurrence, a shift "
    "or a statistic over time), or looks at the number of positions"
)


class Prover:
    """Proves the blocks of one model with its own `values`, on `device`."""

    def __init__(
        self, model: nn.Module, values: Callable[[str], Tensor], axis: TensorAxis, device: torch.device
    ) -> None:
        self._model, self._values, self._axis, self._device = model, values, axis, device

    def prove(self, plan: ContextPlan, traces: Mapping[str, BlockTrace]) -> None:
        """Tries one block of each kind. Collective: the axis. Raises: JobError naming the block."""
        seen = set()
        for name, block in plan.blocks.items():
            trace = traces[name]
            kind = repr(self._model.get_submodule(name)), tuple(trace.operations), tuple(trace.shapes.items())
            if kind not in seen:
                seen.add(kind)
                self._prove(name, block, trace)

    def _prove(self, name: str, plan: BlockPlan, trace: BlockTrace) -> None:
        generator = torch.Generator().manual_seed(SEED)
        module = materialised(self._model, name, self._values, generator).to(self._device)
        arguments = numbers_for(trace, generator, self._device)
        divided = copy.deepcopy(module)  # before a forward, which may leave in it what cannot be copied
        try:
            whole = computed(module, arguments)
        except Exception:  # what makes float32 of its own does not compute in float64
            divided, arguments = divided.float(), narrowed(arguments)
            whole = computed(module.float(), arguments)
        give_role(divided, BlockWrapper(name, replace(plan, opens=True, closes=True), Chain(self._axis)))
        try:
            split = computed(divided, arguments)
        except ShoalError:
            raise
        except Exception as error:
            text = next(iter(str(error).strip().splitlines()), "")[:200]
            what = f"it raised {type(error).__name__} on a part of the positions: {text}"
            raise _refused(name, trace, what) from error
        self._compare(name, trace, whole, split)

    def _compare(self, name: str, trace: BlockTrace, whole: dict[str, Tensor], split: dict[str, Tensor]) -> None:
        for key, found in split.items():
            if key.startswith(OF_PARAMETER):
                dist.all_reduce(found, group=self._axis.group)
        floor = FLOOR * max(float(gradient.norm()) for key, gradient in whole.items() if key != OUTPUT)
        for key, wanted in whole.items():
            if not is_same(split[key], wanted, 0.0 if key == OUTPUT else floor):
                raise _refused(name, trace, f"{key} is another where each rank has a part of the positions")


def _refused(name: str, trace: BlockTrace, what: str) -> ShoalError:
    remedy = "use context = 1, or a block whose positions meet in F.scaled_dot_product_attention only"
    if "scaled_dot_product_attention" not in trace.operations:
        remedy += ' (in Transformers attn_implementation="sdpa")'
    return refusal(name, f"{what}: {_WHY}", remedy)


def numbers_for(trace: BlockTrace, generator: torch.Generator, device: torch.device) -> Any:
    """The arguments of the traced call with random numbers in them."""

    def numbers(path: Any, tensor: Tensor) -> Tensor:
        shape, dtype = tensor.shape, tensor.dtype
        if dtype == torch.bool:
            found = torch.rand(shape, generator=generator) < 0.7
            found[..., :1] = True  # a mask that hides everything from a position makes no sense
        elif dtype.is_complex:
            found = torch.randn(shape, dtype=torch.complex128, generator=generator)
        elif dtype.is_floating_point:
            found = torch.randn(shape, dtype=torch.float64, generator=generator)
        else:
            found = (torch.arange(tensor.numel()) % trace.length).view(shape).to(dtype)
        return found.to(device).requires_grad_(path == trace.hidden or tensor.requires_grad)

    found = {path: numbers(path, tensor) for path, tensor in tensors_in(trace.arguments)}
    return with_tensors(trace.arguments, found)


def narrowed(arguments: Any) -> Any:
    """The same in float32."""
    doubles = {path: t for path, t in tensors_in(arguments) if t.dtype == torch.float64}
    return with_tensors(
        arguments, {path: t.detach().float().requires_grad_(t.requires_grad) for path, t in doubles.items()}
    )


def computed(module: nn.Module, arguments: Any) -> dict[str, Tensor]:
    """What it returns, and gradients by name; the module and its arguments stay as they are."""
    leaves = {path: t.detach().clone().requires_grad_(t.requires_grad) for path, t in tensors_in(arguments)}
    devices = [d for d in {t.device for t in leaves.values()} if d.type == "cuda"]
    # Clones: a leaf that requires a gradient cannot be changed in place.
    args, kwargs = copied(with_tensors(arguments, {path: leaf.clone() for path, leaf in leaves.items()}))
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), _StillBlock():
        torch.manual_seed(SEED)
        _, output = next(tensors_in(module(*args, **kwargs)))
    weights = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    wanted = {f"the gradient of argument {path}": t for path, t in leaves.items() if t.requires_grad}
    wanted |= {f"{OF_PARAMETER} {name}": p for name, p in module.named_parameters() if p.requires_grad}
    total = (output * weights.to(output)).sum()
    gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    found = {OUTPUT: output.detach()}
    for (name, leaf), gradient in zip(wanted.items(), gradients, strict=True):
        found[name] = torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
    return found


class _StillBlock(TorchFunctionMode):
    """Nothing is dropped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))
