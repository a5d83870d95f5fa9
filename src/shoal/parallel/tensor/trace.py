"""Trace of the loss for tensor parallelism, with the linear layers that feed others, and the uses of parameters.

The run is value-free: floats are shapes, integers have values. Every tensor carries the names of its sources: linear
modules from which it was computed by operations that may act on each slice separately. `tensor.proof` checks whether
they do.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.numerics.operators import tensors_in
from shoal.parallel.model.trial import DROPOUTS, FunctionCall, FunctionTrace, dropout_arguments, on_copies
from shoal.parallel.tensor.layers import feature_dim, kind

# Marks a source that is no linear layer's output, or was computed from one in an unknown way.
OPAQUE = "*"

# Functions that act on each feature, or each head, separately; names without surrounding underscores.
_LOCAL = frozenset(
    """
    add radd iadd sub rsub isub mul rmul imul div truediv rtruediv itruediv true_divide neg abs pow rpow square sqrt
    rsqrt exp log sin cos tanh sigmoid erf clamp clamp_min clamp_max minimum maximum where masked_fill tril triu
    relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign logsigmoid glu
    dropout view reshape flatten unflatten transpose permute swapaxes swapdims movedim moveaxis t contiguous clone
    squeeze unsqueeze expand expand_as broadcast_to repeat repeat_interleave cat concat concatenate stack split chunk
    tensor_split split_with_sizes unbind getitem narrow select index_select roll flip view_as reshape_as
    matmul rmatmul bmm baddbmm einsum softmax log_softmax scaled_dot_product_attention sum mean var std amax amin norm
    rms_norm addcmul addcdiv lerp to type float bfloat16 half double type_as T.get mT.get H.get
    """.split()  # noqa: SIM905
)
_READS = frozenset("item tolist bool float int index numpy equal allclose repr str format".split())  # noqa: SIM905
_IN_PLACE = frozenset("add_ mul_ sub_ div_ relu_ __iadd__ __imul__ __isub__ __itruediv__ tanh_ sigmoid_".split())  # noqa: SIM905
_VIEWS = frozenset(("view", "reshape", "unflatten"))
_SPLITS = frozenset(("split", "chunk", "tensor_split", "split_with_sizes"))

# Origin of a tensor's values: the last of these that contributes to it.
_OF_SHAPES, _OF_BATCH, _OF_MODEL = range(3)

Sources = frozenset[str]
_NOTHING: Sources = frozenset()


@dataclass
class Output:
    """Uses of the output of one linear module, over all of its calls."""

    width: int = 0
    feeds: set[str] = field(default_factory=set)  # linear modules with an input that depends on it
    leaks: list[str] = field(default_factory=list)  # operations after which it is no longer a slice
    heads: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)  # of a view as [groups, members, width]
    sections: set[tuple[int, ...]] = field(default_factory=set)
    slices: set[tuple[int, int]] = field(default_factory=set)  # (start, size) of slices taken from it


@dataclass(frozen=True)
class LayerShapes:
    """Shapes of one call of a layer: input, output, features' dim, and whether the input has a gradient."""

    input: tuple[int, ...]
    output: tuple[int, ...]
    feature_dim: int
    needs_gradient: bool


@dataclass
class TensorTrace:
    """Observations of the run."""

    outputs: dict[str, Output] = field(default_factory=dict)
    inputs: dict[str, list[Sources]] = field(default_factory=dict)  # of linear modules, by call
    # (args, kwargs) of the first call of modules with linear ones inside
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    foreign_uses: dict[int, str] = field(default_factory=dict)  # by id of a parameter: what used it outside its module
    decided_by_values: str | None = None  # a module that reads values: other batches may differ
    decided_by_batch: set[str] = field(default_factory=set)  # modules that read only the batch's values
    shapes: dict[str, list[LayerShapes]] = field(default_factory=dict)  # of linear modules and similar ones, by call
    has_values: bool = False  # whether the run needed the model's values
    real: dict[int, Tensor] = field(default_factory=dict)  # values of the batch's tensors, by id

    def reader_within(self, owner: str) -> str | None:
        """Return a module that reads the model's values, or, inside `owner`, the batch's values; None if there is none.

        A reader of the batch outside of a pair's module only decides how that module is called, like a reader of
        shapes.
        """
        inside = (name for name in sorted(self.decided_by_batch) if f"{name}.".startswith(f"{owner}.") or not owner)
        return self.decided_by_values or next((name or "the model" for name in inside), None)


def observe(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    values: Callable[[str], Tensor] | None = None,
) -> TensorTrace:
    """Run `loss(model, batch)` on copies and return the trace.

    `values`: function that returns a tensor of the model by its name; the copies are then on the CPU. Without it the
        run is value-free.

    Raises: what the model or the loss raises.
    """
    with on_copies(model, loss, batch, values) as (copied, shown):
        own = {id(a): b for a, b in zip(copied.parameters(), model.parameters(), strict=True)}
        tracer = _Tracer(copied, own, tensors_in(shown))
        tracer.trace.has_values = values is not None
        tracer.trace.real = {id(a): b for a, b in zip(tensors_in(shown), tensors_in(batch), strict=True)}
        with tracer:
            for tensor in tensors_in(loss(copied, shown)):
                tracer.leak(tensor, "the loss")
        return tracer.trace


class _Tracer(FunctionTrace):
    def __init__(self, model: nn.Module, own: dict[int, nn.Parameter], batch: Iterable[Tensor]) -> None:
        super().__init__()
        self.trace = TensorTrace()
        self._own = own
        self._origins: dict[int, int] = {}
        self._stack: list[tuple[str, nn.Module]] = []
        self._owners: dict[int, set[str]] = {}
        for origin, tensors in ((_OF_MODEL, (*model.parameters(), *model.buffers())), (_OF_BATCH, batch)):
            for tensor in tensors:
                self.mark(tensor, _NOTHING)
                self._origins[id(tensor)] = origin
        for name, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), set()).add(name)
            self.hook(module, functools.partial(self._after, name), functools.partial(self._before, name))

    def leak(self, tensor: Tensor, why: str) -> None:
        """Record that a tensor's sources are used in a way that does not work on slices."""
        for source in self._of(tensor) - {OPAQUE}:
            self.trace.outputs[source].leaks.append(why)

    def _of(self, tensor: Tensor) -> Sources:
        sources: Sources = self._sources.get(id(tensor), frozenset((OPAQUE,)))
        return sources

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stack.append((name, module))
        given = tensors_in((args, kwargs))
        what = kind(module)
        if what not in (None, "dropout") and given:
            sources = self._of(given[0])
            self.trace.inputs.setdefault(name, []).append(sources)
            for source in sources - {OPAQUE}:
                self.trace.outputs[source].feeds.add(name)
        elif what is None and name not in self.trace.calls:
            num_linear = sum(kind(m) in ("linear", "transposed") for m in module.modules())
            if num_linear > 1:
                self.trace.calls[name] = tree_map(_snapshot, (args, kwargs))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        if kind(module) not in (None, "dropout") and isinstance(output, Tensor) and args:
            dim = feature_dim(module, output)
            shapes = LayerShapes(tuple(args[0].shape), tuple(output.shape), dim, args[0].requires_grad)
            self.trace.shapes.setdefault(name, []).append(shapes)
        if kind(module) in ("linear", "transposed") and isinstance(output, Tensor):
            self.trace.outputs.setdefault(name, Output(output.shape[-1]))
            self.mark(output, frozenset((name,)))

    def seen(self, call: FunctionCall) -> None:
        """Record what a call computes from sources, and which parameters it uses."""
        raw = getattr(call.func, "__name__", str(call.func))
        if raw == "__get__":  # of a property
            name = f"{getattr(getattr(call.func, '__self__', None), '__name__', '')}.get"
        else:
            name = str(raw).strip("_")
        origin = max((self._origins.get(id(tensor), _OF_MODEL) for tensor in call.given), default=_OF_SHAPES)
        if not call.results:
            if name in _READS and call.given:  # values that follow from shapes do not count
                for tensor in call.given:
                    self.leak(tensor, f"{name}()")
                if self._stack and origin == _OF_BATCH:
                    self.trace.decided_by_batch.add(self._stack[-1][0])
                elif self._stack and origin == _OF_MODEL:
                    self.trace.decided_by_values = self._stack[-1][0] or "the model"
            return
        self._origins |= {id(tensor): origin for tensor in call.results}
        where, module = self._stack[-1] if self._stack else (None, None)
        for tensor in call.given:
            owners = self._owners.get(id(tensor))
            if owners is None or name == "get":
                continue
            if where not in owners or module is None or kind(module) is None:
                by = f"{name}() in {where or 'the model'}" if where is not None else f"{name}() in the loss"
                self.trace.foreign_uses.setdefault(id(self._own[id(tensor)]), by)
        sources: Sources = _NOTHING.union(*map(self._of, call.given))
        inside = module is not None and kind(module) in ("linear", "transposed", "dropout")
        why = None if inside else self._objection(call, name)
        if why is not None:
            for tensor in call.given:
                self.leak(tensor, why)
            has_parameters = any(isinstance(tensor, nn.Parameter) for tensor in call.given)
            sources = frozenset((OPAQUE,)) if sources or has_parameters else _NOTHING
        if name in _VIEWS or name in _SPLITS or name == "getitem":
            self._record_sections(name, call.given[0], call.results)
        for tensor in call.results:
            if not (isinstance(tensor, nn.Parameter) and id(tensor) in self._sources):
                self.mark(tensor, sources)

    def _objection(self, call: FunctionCall, name: str) -> str | None:
        """Return why a function does not act on slices, or None."""
        if name not in _LOCAL:
            return f"{name}()"
        raw = getattr(call.func, "__name__", "")
        if (raw in _IN_PLACE or call.kwargs.get("inplace")) and len({self._of(tensor) for tensor in call.given}) > 1:
            return f"{raw}() in place"
        if raw.endswith("_") and not raw.endswith("__") and raw not in _IN_PLACE:
            return f"{raw}() in place"
        if call.func in DROPOUTS and dropout_arguments(*call.args, **call.kwargs)[2]:
            return "dropout by a function, whose mask cannot be cut"
        dropped = call.argument(4, "dropout_p", 0.0) if "attention" in name else 0.0
        return "dropout inside of the attention, whose mask cannot be cut" if dropped else None

    def _record_sections(self, name: str, whole: Tensor, results: list[Tensor]) -> None:
        """Record how a linear module's output is divided into sections and heads."""
        sources = self._of(whole)
        if len(sources) != 1 or OPAQUE in sources or not whole.ndim:
            return
        output = self.trace.outputs[next(iter(sources))]
        width = whole.shape[-1]
        if name in _SPLITS and all(part.ndim == whole.ndim for part in results):
            if sum(part.shape[-1] for part in results) == width:
                output.sections.add(tuple(part.shape[-1] for part in results))
        elif name == "getitem":
            part = results[0]
            is_slice = part.ndim == whole.ndim and part.shape[:-1] == whole.shape[:-1] and part.shape[-1] < width
            if is_slice and width == output.width:
                output.slices.add((int(part.storage_offset() - whole.storage_offset()), part.shape[-1]))
        elif name in _VIEWS:
            shape = results[0].shape  # its last dims may be those into which the view has divided the width
            extras = next((tuple(shape[-k:]) for k in range(1, len(shape) + 1) if math.prod(shape[-k:]) == width), ())
            if len(extras) == 3:
                output.sections.add((extras[1] * extras[2],) * extras[0])
                output.groups.add(extras[0])
            if len(extras) >= 2:
                output.heads.add(extras[-2])


def _snapshot(value: Any) -> Any:
    """Return a snapshot of an argument, a copy if a module may change it; None for a cache that has no copy."""
    if isinstance(value, Tensor | int | float | str | bool | None):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return None
