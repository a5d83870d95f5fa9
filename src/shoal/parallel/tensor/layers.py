"""Tensor-parallel layers: the user's own modules with slices of their weights, and with their names and hooks.

A divided module still appears to be of its class (it is of a subclass with the same name). It computes as its *role*
defines. Its parameters are plain and have the slice's shape.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.numerics.float8 import Float8Linear
from shoal.numerics.isolation import undisturbed
from shoal.parallel.axis_collectives import Change, TensorAxis, enter, gather, leave
from shoal.parallel.model.adapters.quantized import QuantizedLinear
from shoal.parallel.model.sharded_model import Outputs, Runs
from shoal.parallel.tensor.logits import Head, divided

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


def foreign(module: nn.Module) -> Outputs | None:
    """Return how a layer that is not of torch divides its outputs, from its own `tensor_outputs`; None without one."""
    describe: Any = getattr(type(module), "tensor_outputs", None)
    outputs: Outputs | None = describe(module) if describe is not None else None
    return outputs


def kind(module: nn.Module) -> str | None:
    """Return the kind of a module that computes as its class does: linear, transposed, convolution, embedding...

    `transposed` is a Linear with weight [in, out], such as GPT-2's Conv1D in transformers. A `foreign` layer describes
    its own outputs.
    """
    forward = type(module).forward
    if isinstance(module, QuantizedLinear):
        return "linear" if module.can_be_cut else None
    if isinstance(module, nn.Linear):
        is_plain = forward in (nn.Linear.forward, Float8Linear.forward) or _is_linear(module)
        return "linear" if is_plain else None
    if isinstance(module, _CONVOLUTIONS):
        return "convolution" if forward in {c.forward for c in _CONVOLUTIONS} else None
    if isinstance(module, nn.Embedding):
        return "embedding" if forward is nn.Embedding.forward else None
    if isinstance(module, nn.Dropout):
        return "dropout" if forward is nn.Dropout.forward else None
    if foreign(module) is not None:
        return "foreign"
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx"):
        return "transposed"
    return None


def _is_linear(module: nn.Linear) -> bool:
    """Return True if a subclass of nn.Linear with its own forward, and nothing else, computes the same as nn.Linear."""
    plain = {"in_features", "out_features", "training", "forward"}
    own = {name for name in vars(module) if not name.startswith("_")} - plain
    if own or module._modules or module._buffers or module._parameters.keys() != {"weight", "bias"}:
        return False
    cls: Any = type(module)
    return _multiplies(cls, module.bias is not None)


@functools.lru_cache(maxsize=256)
def _multiplies(cls: Any, with_bias: bool) -> bool:
    with undisturbed():
        module = nn.Linear(3, 2, with_bias, dtype=torch.float64)
        value = torch.randn(2, 5, 3, dtype=torch.float64)
        wanted = module(value)
        module.__class__ = cls
        try:
            results = [module.forward(value), torch.stack([module.forward(row) for row in value])]
        except Exception:
            return False
        return all(isinstance(f, Tensor) and f.shape == wanted.shape and torch.allclose(f, wanted) for f in results)


def num_features(module: nn.Module) -> tuple[int, int]:
    """Return the input and output features (channels) of a linear, transposed or convolution module."""
    weight: Any = module.weight
    if isinstance(module, QuantizedLinear):
        return module.features
    first, second = weight.shape[:2]
    return (first, second) if kind(module) == "transposed" else (second, first)


def output_dim(module: nn.Module) -> int:
    """Return the dim of the module's weight that contains its outputs."""
    return 1 if kind(module) == "transposed" else 0


def num_outputs(module: nn.Module) -> int:
    """Return the number of outputs along which a layer can be cut; for an embedding, its rows."""
    outputs = foreign(module)
    if outputs is not None:
        return outputs.size
    return module.num_embeddings if isinstance(module, nn.Embedding) else num_features(module)[1]


def output_dims(module: nn.Module) -> dict[str, int]:
    """Return, for each parameter of a layer, the dim that contains the outputs."""
    outputs = foreign(module)
    if isinstance(module, QuantizedLinear):
        return {"weight": 0, "absmax": 0, "bias": 0}
    return outputs.dims if outputs is not None else {"weight": output_dim(module), "bias": 0}


def input_runs(module: nn.Module, runs: Runs) -> dict[str, Runs]:
    """Return, for each parameter of a layer that a cut of the inputs cuts, the indices along the inputs' dim."""
    return module.input_runs(runs) if isinstance(module, QuantizedLinear) else {"weight": runs}


def feature_dim(module: nn.Module, output: Tensor) -> int:
    """Return the dim of a layer's output that contains its features."""
    outputs = foreign(module)
    if outputs is not None:
        return output.ndim + outputs.feature_dim
    return 1 if kind(module) == "convolution" else output.ndim - 1


def product(module: nn.Module, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product of the module's class with other tensors than its own.

    A quantized layer multiplies by its own weight; in a proof `weight` has random numbers instead.
    """
    if isinstance(module, QuantizedLinear) and not weight.is_floating_point():
        return module.product(value, bias)
    if kind(module) == "transposed":
        flat = value.reshape(-1, value.shape[-1])
        product = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
        return product.view(*value.shape[:-1], weight.shape[1])
    if isinstance(module, _CONVOLUTIONS):
        result: Tensor = module._conv_forward(value, weight, bias)
        return result
    if isinstance(module, Float8Linear):
        return module.multiply(value, weight, bias)
    return F.linear(value, weight, bias)


class DividedLayer:
    """First base of a divided module's class."""

    tensor_role: Any

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the forward of the role."""
        output: Tensor = self.tensor_role(self, *args, **kwargs)
        return output


def with_base(module: nn.Module, base: type) -> None:
    """Insert `base` before all bases of a module's class; the name stays."""
    own = type(module)  # a class of its own, as fully_shard creates
    module.__class__ = type(own.__name__, (base, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def give_role(module: nn.Module, role: Any) -> None:
    """Make a module compute as `role` defines."""
    with_base(module, DividedLayer)
    module.tensor_role = role


@dataclass
class Entry:
    """Input of column-parallel layers with the same activation: one collective, `into`, for all of them.

    `always`: share the result even if no gradient flows back. `cut`: `into` within a compiled region, which shares
    equal calls by itself.
    """

    into: Callable[[Tensor], Tensor]
    num_users: int = 1
    always: bool = False
    cut: Callable[[Tensor], Tensor] | None = None
    _seen: Any = field(default=None, repr=False)
    _entered: Tensor | None = field(default=None, repr=False)
    _uses: int = 0
    _version: int = 0

    def __call__(self, value: Tensor) -> Tensor:
        """Return `into(value)`, shared by consecutive users of the same tensor."""
        if self.cut is not None and torch.compiler.is_compiling():
            return self.cut(value)
        is_shared = self.always or (value.requires_grad and torch.is_grad_enabled())
        if self.num_users == 1 or not is_shared:
            return self.into(value)
        if self._entered is None or self._seen() is not value or self._version != value._version:
            self._seen, self._entered, self._uses = weakref.ref(value), self.into(value), 0
            self._version = value._version
        entered = self._entered
        assert entered is not None
        self._uses += 1
        if self._uses == self.num_users:  # from here on only the graph references it
            self._seen, self._entered = None, None
        return entered

    def __deepcopy__(self, memo: Any) -> Entry:
        """Return a new entry without a stored result."""
        return Entry(copy.deepcopy(self.into, memo), self.num_users, self.always)


@dataclass
class Column:
    """Column-parallel layer: output features are cut; the output stays a slice."""

    entry: Entry

    def __call__(self, module: Any, input: Tensor) -> Tensor:
        """Return this rank's output features."""
        return product(module, self.entry(input), module.weight, module.bias)


@dataclass
class GatheredLayer:
    """Column-parallel layer with gathered outputs, `sizes[i]` on rank i. It is valid wherever the module itself is."""

    axis: TensorAxis
    sizes: tuple[int, ...]

    def __call__(self, module: Any, input: Tensor) -> Tensor:
        """Return all output features. Collective: the axis, an all-gather; in the backward an all-reduce."""
        own = product(module, enter(input, self.axis), module.weight, module.bias)
        spatial = {nn.Conv1d: 1, nn.Conv2d: 2}
        trailing = next((n for base, n in spatial.items() if isinstance(module, base)), 0)
        return gather(own, self.axis, own.ndim - 1 - trailing, self.sizes)


@dataclass
class SlicedOutputLayer(GatheredLayer):
    """Column-parallel output head with a consumer that needs only slices: a cross entropy."""

    def __call__(self, module: Any, input: Tensor) -> Tensor:
        """Return this rank's classes as `Logits`. Collective in the backward: the axis, an all-reduce.

        Without gradients, as in an evaluation, return all classes: metrics may read them in any way.
        """
        if not torch.is_grad_enabled():
            return super().__call__(module, input)
        own = product(module, enter(input, self.axis), module.weight, module.bias)
        return divided(own, own.ndim - 1, Head(self.axis, self.sizes))


@dataclass
class Foreign(GatheredLayer):
    """Gathered layer that is not torch's own: the layer's own forward with slices as parameters.

    `forward`: its class's. `dim`: the features' dim of its output, counted from the end.
    """

    forward: Any
    dim: int

    def __call__(self, module: nn.Module, input: Tensor, **kwargs: Any) -> Tensor:
        """Return all outputs. Collective: as GatheredLayer."""
        own: Tensor = self.forward(module, enter(input, self.axis), **kwargs)
        return gather(own, self.axis, own.ndim + self.dim, self.sizes)


@dataclass
class Row:
    """Row-parallel layer: its weight is cut along the input features, like its input.

    The bias is added after the sum.
    """

    sum: Callable[[Tensor], Tensor]

    def __call__(self, module: Any, input: Tensor) -> Tensor:
        """Return all output features. Collective: the axis, an all-reduce."""
        weight, bias = module.weight, module.bias
        narrow = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        if isinstance(module, QuantizedLinear):
            narrow = module.product_dtype(input)
        if input.device.type != "cpu" or narrow not in (torch.bfloat16, torch.float16):
            output = self.sum(product(module, input, weight, None))
            return output if bias is None else output + bias.to(output.dtype)
        if isinstance(module, Float8Linear) and module.is_on(input.device):
            output = self.sum(module.multiply(input, weight, None, wide=True))
            return (output if bias is None else output + bias.to(narrow).float()).to(narrow)
        # Round once, after the sum, as in the whole model: its products are computed in float32 anyway (see
        # numerics/precision.py).
        with torch.autocast("cpu", enabled=False):
            rounded = input.to(narrow).float()
            if isinstance(module, QuantizedLinear):
                output = module.multiplied(rounded, None, narrow)
            else:
                output = product(module, rounded, weight.to(narrow).float(), None)
            output = self.sum(output)
            output = (output if bias is None else output + bias.to(narrow).float()).to(narrow)
        return output.to(input.dtype) if getattr(module, "compute_dtype", None) is not None else output


def cut_at_collectives(block: Sequence[nn.Module], cut: Callable[[Change], Change]) -> bool:
    """Replace the collectives of a block's divided layers by what `cut` returns for them, within compiled regions.

    Return False, and change nothing, if a layer communicates in another way than by one tensor in and one out.
    """
    roles = [m.tensor_role for part in block for m in part.modules() if isinstance(m, DividedLayer)]
    if not all(isinstance(role, Column | Row | SlicedDropout) for role in roles):
        return False
    for role in roles:
        if isinstance(role, Column):
            role.entry.cut = role.entry.cut or cut(role.entry.into)
        elif isinstance(role, Row):
            role.sum = cut(role.sum)
    return True


@dataclass
class Vocabulary:
    """Vocabulary-parallel embedding: rows [start, stop) of a table of `size`."""

    axis: TensorAxis
    start: int
    stop: int
    size: int

    def __call__(self, module: nn.Embedding, input: Tensor) -> Tensor:
        """Return whole embeddings. Collective: the axis, an all-reduce; exact, since all terms but one are zero."""
        own = self.stop - self.start
        elsewhere = (input < self.start) | (input >= self.stop)
        # An index in no rank's rows stays out of range, so that torch reports it.
        local = torch.where(elsewhere, torch.where((input < 0) | (input >= self.size), own, 0), input - self.start)
        padding = module.padding_idx
        own_padding = padding - self.start if padding is not None and self.start <= padding < self.stop else None
        rows = F.embedding(local, module.weight, own_padding)
        return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.axis)


@dataclass
class SlicedDropout:
    """Dropout of a slice by its part of the whole mask. `dim` is counted from the end."""

    dim: int
    runs: Runs
    size: int

    def __call__(self, module: nn.Dropout, input: Tensor) -> Tensor:
        """Return the slice times its part of the mask, which the usual mask generator draws whole."""
        if not module.training or module.p == 0.0:
            return input
        shape = list(input.shape)
        shape[self.dim] = self.size
        mask = F.dropout(input.new_ones(shape), module.p, True)
        pieces = [mask.narrow(self.dim, start, stop - start) for start, stop in self.runs]
        own = torch.cat(pieces, self.dim)  # a copy: autograd stores only the slice's part of the mask
        return input.mul_(own) if module.inplace else input * own
