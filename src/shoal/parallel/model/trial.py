"""Trials of a model that leave no trace: equivalence tests in float64, and one run of a loss on a copy of its model."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.numerics.no_trace import NoTrace
from shoal.numerics.operators import replace_leaves, tensors_in
from shoal.parallel.model.adapters.quantized import QuantizedLinear
from shoal.parallel.model.value_free import ValueFree, twin

# In float64 both results agree to about 1e-13, and if the user's code goes through float32 to about 1e-6. A wrong cut
# changes the first digits.
TOLERANCE = 1e-4
# A gradient that is zero but for rounding (of a bias before a softmax) is compared on the scale of the largest
# gradient.
_FLOOR = 1e-2
# Initial values are often zeros and ones, which would hide an error.
_NOISE = 0.05
SEED = 20205198

Values = Callable[[str], Tensor]


@dataclass(frozen=True)
class ModelTrial:
    """Whole model (possibly on the meta device) with its loss, a small batch, and the initial values by name."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batch: Any
    values: Values


def materialised(
    model: nn.Module,
    owner: str,
    values: Values | None,
    generator: torch.Generator,
    given: Mapping[int, nn.Parameter] | None = None,
) -> nn.Module:
    """Return a copy of one module of the model in float64, with the model's values and some noise, or random values.

    `given`: other parameters to use instead of the module's own, by the ids of the module's own.
    """
    module = model.get_submodule(owner)
    named = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    memo: dict[int, Any] = dict(given or {})
    for layer in module.modules():  # bytes have no noise: dense random weights replace quantized ones
        if isinstance(layer, QuantizedLinear) and id(layer.weight) not in memo:
            dense = torch.randn(layer.quantization.shape, dtype=torch.float64, generator=generator)
            memo[id(layer.weight)] = nn.Parameter(dense / math.sqrt(layer.in_features))
    for parameter in module.parameters():
        if id(parameter) in memo:
            continue
        noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        if values is None:
            memo[id(parameter)] = nn.Parameter(noise)
            continue
        value = values(named[id(parameter)]).detach().to("cpu", torch.float64)
        scale = _NOISE + float(value.std()) * _NOISE if value.numel() > 1 else _NOISE
        memo[id(parameter)] = nn.Parameter(value + scale * noise)
    for buffer in module.buffers():
        if values is None and buffer.is_floating_point():
            memo[id(buffer)] = torch.randn(buffer.shape, dtype=torch.float64, generator=generator)
            continue
        if values is None:  # zeros, which are valid as index and count
            memo[id(buffer)] = torch.full(buffer.shape, buffer.dtype == torch.bool, dtype=buffer.dtype)
            continue
        value = values(named[id(buffer)]).detach().to("cpu")
        memo[id(buffer)] = value.double() if value.is_floating_point() else value.clone()
    return copy.deepcopy(module, memo)


class WithoutDropout(TorchFunctionMode):
    """Context without dropout. `inside_attention`: also without dropout of fused attention's weights."""

    def __init__(self, *, inside_attention: bool = False) -> None:
        super().__init__()
        self._inside_attention = inside_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and self._inside_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def gradients(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients, by the leaves' names, of a random weighted sum of the outputs; zeros for unused leaves."""
    generator = torch.Generator().manual_seed(SEED)
    total: Any = 0.0
    for output in outputs:
        total = total + (output * torch.randn(output.shape, dtype=torch.float64, generator=generator).to(output)).sum()
    results = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), results, strict=True)
    return {name: torch.zeros_like(leaf) if g is None else g.contiguous() for (name, leaf), g in pairs}


def floor_of(values: Iterable[Tensor]) -> float:
    """Return the norm below which gradients are compared on this scale."""
    return _FLOOR * max(float(gradient.norm()) for gradient in values)


def is_same(value: Tensor, wanted: Tensor, floor: float = 0.0) -> bool:
    """Return True if two tensors agree but for rounding. Values smaller than `floor` are compared on that scale."""
    if value.shape != wanted.shape:
        return False
    if not value.is_floating_point():
        return bool(torch.equal(value, wanted))
    distance, size = float((value.double() - wanted.double()).norm()), float(wanted.double().norm())
    return math.isfinite(distance) and distance <= TOLERANCE * max(size, floor)


DROPOUTS = (F.dropout, torch.dropout)


@dataclass(frozen=True)
class FunctionCall:
    """Call of a torch function: its arguments, the tensors among them, and the tensors that it returned."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]
    results: list[Tensor]

    @property
    def name(self) -> str:
        """The function's Python name."""
        return str(getattr(self.func, "__name__", self.func))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


def dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> tuple[Tensor, float, bool, bool]:
    """Return a dropout call's tensor and probability, whether it drops anything, and whether it works in place."""
    return input, p, (training if train is None else train) and p > 0.0, inplace


class FunctionTrace(TorchFunctionMode):
    """Context that records calls of torch functions. It keeps their tensors alive, so that ids stay unique."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: list[Tensor] = []
        self._sources: dict[int, Any] = {}  # by id of a tensor: the sources that it was computed from
        self._handles: list[Any] = []

    def seen(self, call: FunctionCall) -> None:
        """Record a call that has returned."""
        raise NotImplementedError

    def mark(self, tensor: Tensor, sources: Any) -> None:
        """Record a tensor's sources."""
        self._alive.append(tensor)
        self._sources[id(tensor)] = sources

    def hook(self, module: nn.Module, after: Callable[..., None], before: Callable[..., None] | None = None) -> None:
        """Call `before(module, args, kwargs)` and `after(module, args, output)` around a module's forward."""
        if before is not None:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(after))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        call = FunctionCall(func, args, kwargs, tensors_in((args, kwargs)), tensors_in(result))
        self._alive += call.results
        self.seen(call)
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._alive.clear()


@contextlib.contextmanager
def on_copies(
    model: nn.Module, loss: Callable[..., Any], batch: Any, values: Callable[[str], Tensor] | None
) -> Iterator[tuple[nn.Module, Any]]:
    """Return a context to run a loss on copies of a model and a batch.

    Integers of the batch have their values in both cases. The run leaves no trace, for example in a cache of a
    function.
    """

    def real(name: str, tensor: Tensor) -> Tensor:
        assert values is not None
        return values(name).detach().to("cpu", tensor.dtype, copy=True)

    with NoTrace(model, {"loss": loss}), torch.enable_grad():
        if values is not None:
            yield twin(model, real), replace_leaves(batch, Tensor, lambda leaf: leaf.detach().cpu())
            return
        value_free = ValueFree()
        with value_free.running():
            yield (
                twin(model, lambda _, t: value_free.fake(t)),
                replace_leaves(batch, Tensor, value_free.fake_or_integers),
            )
