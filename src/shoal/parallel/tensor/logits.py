"""Vocabulary-parallel logits: a tensor subclass with some classes on each rank, gathered on demand.

User code sees a tensor of the whole shape. Operations that regroup rows, change the dtype or scale keep the logits cut.
A cross entropy uses the slices: it takes two small sums over the tensor axis. Every other operation receives the
gathered whole.

The cross entropy follows Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3). Ranks exchange the largest logit of
each row and then the row's sums; the backward is local. The result is that of torch's F.cross_entropy for class
indices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics import device_reads
from shoal.parallel.axis_collectives import TensorAxis, gather

# -------------------------------------------------------------------------------------------------------- cross entropy


@dataclass(frozen=True)
class Classes:
    """Classes [start, stop) of `size` on a rank."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Rows:
    """Targets int64 [N] with F.cross_entropy's options: class `weights` [C] or None, and label `smoothing`."""

    targets: Tensor
    ignored: int
    smoothing: float = 0.0
    weights: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Mask of the rows that count, bool [N]."""
        return self.targets != self.ignored

    def row_weights(self, dtype: torch.dtype) -> Tensor:
        """Return the weight of each row's target, [N]; zero for a row that does not count."""
        if self.weights is None:
            return self.counts.to(dtype)
        known = self.targets.masked_fill(~self.counts, 0)
        return torch.where(self.counts, self.weights.to(dtype)[known], 0.0)

    def class_weights(self, classes: Classes, dtype: torch.dtype) -> tuple[Tensor | float, float]:
        """Return the weights of a rank's classes, [C of the rank], and the sum over all classes."""
        if self.weights is None:
            return 1.0, float(classes.size)
        wide = self.weights.to(dtype)
        return wide[classes.start : classes.stop], float(wide.sum())

    def own(self, classes: Classes) -> tuple[Tensor, Tensor]:
        """Return whether each row's target is among a rank's classes, and its index among them (0 if it is not)."""
        here = self.counts & (self.targets >= classes.start) & (self.targets < classes.stop)
        return here, torch.where(here, self.targets - classes.start, 0)

    def check(self, size: int) -> None:
        """Raise IndexError for a target that is no class, as torch does."""
        right = ~self.counts | ((self.targets >= 0) & (self.targets < size))
        if self.targets.is_meta or type(self.targets) is not Tensor:  # or fake
            return
        if device_reads.waits(self.targets.device):
            torch._assert_async(right.all())  # does not wait for the device
        elif not bool(right.all()):
            raise IndexError(f"Target {int(self.targets[~right][0])} is out of bounds.")


def wide(logits: Tensor) -> Tensor:
    """Convert the logits to float32 unless they are float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def highest(logits: Tensor) -> Tensor:
    """Return the largest of a rank's logits [N, C of the rank] per row, for a maximum over ranks."""
    return wide(logits).amax(1)


def row_sums(logits: Tensor, largest: Tensor, rows: Rows, classes: Classes) -> Tensor:
    """Return a rank's terms, [2 or 3, N], of the sums over exponentials, target logits and weighted logits."""
    values = wide(logits)
    here, place = rows.own(classes)
    exponentials = (values - largest.unsqueeze(1)).exp_().sum(1)
    target = values.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
    sums = [exponentials, target]
    if rows.smoothing:
        weights, _ = rows.class_weights(classes, values.dtype)
        sums.append((values * weights).sum(1))
    return torch.stack(sums)


def losses(sums: Tensor, largest: Tensor, rows: Rows, classes: Classes) -> tuple[Tensor, Tensor]:
    """Return the loss of each row [N], and the logarithm of its sum of exponentials."""
    logarithm = sums[0].log() + largest
    loss = (logarithm - sums[1]) * rows.row_weights(sums.dtype)
    if rows.smoothing:
        _, total = rows.class_weights(classes, sums.dtype)
        smooth = (total * logarithm - sums[2]).masked_fill(~rows.counts, 0.0)
        loss = (1 - rows.smoothing) * loss + rows.smoothing / classes.size * smooth
    return loss.masked_fill(~rows.counts, 0.0), logarithm


def gradient(logits: Tensor, logarithm: Tensor, given: Tensor, rows: Rows, classes: Classes) -> Tensor:
    """Return the gradient of a rank's logits, [N, C of the rank], from `given` [N], the losses' gradient."""
    result = (wide(logits) - logarithm.unsqueeze(1)).exp_()
    dtype = result.dtype
    here, place = rows.own(classes)
    scale = (1 - rows.smoothing) * rows.row_weights(dtype) * given
    factor = scale
    if rows.smoothing:
        weights, total = rows.class_weights(classes, dtype)
        smooth = (rows.smoothing / classes.size * given).masked_fill(~rows.counts, 0.0)
        factor = scale + total * smooth
    result.mul_(factor.unsqueeze(1))
    if rows.smoothing:
        result.sub_(smooth.unsqueeze(1) * weights)
    result.scatter_add_(1, place.unsqueeze(1), -torch.where(here, scale, 0.0).unsqueeze(1))
    # A row that does not count may contain infinities, which would be multiplied by zero.
    return result.masked_fill_(~rows.counts.unsqueeze(1), 0.0).to(logits.dtype)


class _Losses(torch.autograd.Function):
    """Autograd function of the rows' losses, identical on every rank; the backward is local."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows, classes: Classes, axis: TensorAxis) -> Tensor:
        largest = axis.all_reduce(highest(logits), dist.ReduceOp.MAX)
        sums = axis.all_reduce(row_sums(logits, largest, rows, classes))
        loss, logarithm = losses(sums, largest, rows, classes)
        ctx.save_for_backward(logits, logarithm)
        ctx.rest = rows, classes
        return loss

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None, None]:
        logits, logarithm = ctx.saved_tensors
        return gradient(logits, logarithm, given, *ctx.rest), None, None, None


def cross_entropy(logits: Tensor, rows: Rows, classes: Classes, axis: TensorAxis, reduction: str) -> Tensor:
    """Return F.cross_entropy of [N, C of the rank] and targets [N], in float32 at least: a scalar, or [N] unreduced.

    Collective: the axis, an all-reduce of N numbers and one of 2 N (3 N with label smoothing).
    Raises: IndexError for a target that is no class.
    """
    rows.check(classes.size)
    loss: Tensor = _Losses.apply(logits, rows, classes, axis)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / rows.row_weights(loss.dtype).sum()


# --------------------------------------------------------------------------------------------------------------- logits


@dataclass(frozen=True)
class Entropy:
    """Options of one call of F.cross_entropy."""

    ignored: int
    reduction: str
    smoothing: float
    weighted: bool


@dataclass(frozen=True)
class Head:
    """Output head of some logits: `sizes[i]` classes on rank i of the axis."""

    axis: TensorAxis
    sizes: tuple[int, ...]

    @property
    def classes(self) -> Classes:
        """The classes of this rank."""
        start = sum(self.sizes[: self.axis.place])
        return Classes(start, start + self.sizes[self.axis.place], sum(self.sizes))

    def whole(self, local: Tensor, dim: int, why: str) -> Tensor:
        """Gather all classes for the function `why`. Collective: the axis, an all-gather."""
        return gather(local, self.axis, dim, self.sizes)

    def lost(self, local: Tensor, rows: Rows, entropy: Entropy) -> Tensor:
        """Return the cross entropy of slices [N, C of the rank]. Collective: the axis, two all-reduces."""
        return cross_entropy(local, rows, self.classes, self.axis, entropy.reduction)


class _Show(torch.autograd.Function):
    """Autograd function that wraps a slice as logits; in the backward it takes the slice of a whole gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, head: Head) -> Tensor:
        ctx.rest = dim, head.classes
        return Logits(local.detach(), dim, head)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        dim, classes = ctx.rest
        return gradient.narrow(dim, classes.start, classes.stop - classes.start).contiguous(), None, None


class Logits(Tensor):
    """Tensor of all classes along `dim`. Only the slice `local` is on this rank."""

    local: Tensor
    dim_: int
    head: Head
    _data: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, head: Head) -> Logits:
        """Create logits without history; `divided` adds one."""
        shape = list(local.shape)
        shape[dim] = sum(head.sizes)
        logits: Logits = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        logits.local, logits.dim_, logits.head, logits._data = local, dim, head, None
        return logits

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description without gathering."""
        return f"Logits(shape={list(self.shape)}, local={list(self.local.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS or name == "__repr__":
                return func(*args, **kwargs)
            if name == "register_hook":  # on the tensor that the backward passes through
                return args[0].local.register_hook(*args[1:], **kwargs)
            # Without gradients, as in the forward of an autograd function, cut results would have no history.
            rule = _RULES.get(func) if torch.is_grad_enabled() else None
            result = rule(func, *args, **kwargs) if rule is not None else NotImplemented
            if result is NotImplemented:

                def whole(logits: Logits) -> Tensor:
                    return logits.head.whole(logits.local, logits.dim_, name)

                result = func(*_with(args, whole), **_with(kwargs, whole))
            return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Give the whole's values to code below torch functions; gradients pass through `_Show`."""
        return func(*_with(args, Logits.values), **_with(kwargs or {}, Logits.values))

    def values(self) -> Tensor:
        """Return the whole, without history. Collective: the axis, an all-gather at the first call."""
        if self._data is None:
            with torch.no_grad():
                self._data = self.head.whole(self.local.detach(), self.dim_, "a function of its own")
        return self._data


def divided(local: Tensor, dim: int, head: Head) -> Tensor:
    """Return logits around the slice `local`, with its history."""
    logits: Any = _Show.apply(local, dim % local.ndim, head)  # type: ignore[no-untyped-call]
    logits.local = local
    return logits  # type: ignore[no-any-return]


def _with(value: Any, make: Callable[[Logits], Tensor]) -> Any:
    """Return the arguments with logits replaced by what `make` returns."""
    if isinstance(value, Logits):
        return make(value)
    if isinstance(value, dict):
        return {key: _with(item, make) for key, item in value.items()}
    return type(value)(_with(item, make) for item in value) if type(value) in (tuple, list) else value


# ------------------------------------------------------------------------------------------------------------- rules


def _each(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operation that treats every number equally."""
    others = [*args, *kwargs.values()]
    if not isinstance(logits, Logits) or any(isinstance(other, Tensor) for other in others):
        return NotImplemented
    result = func(logits.local, *args, **kwargs)
    same = isinstance(result, Tensor) and result.shape == logits.local.shape
    return divided(result, logits.dim_, logits.head) if same else NotImplemented


def _regrouped(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """View whole rows in another shape, if the classes are in the last dim."""
    if not isinstance(logits, Logits) or logits.dim_ != logits.ndim - 1:
        return NotImplemented
    shown = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs)
    if not shown.ndim or shown.shape[-1] != logits.shape[-1] or shown.dtype != logits.dtype:
        return NotImplemented
    shape = (*shown.shape[:-1], logits.local.shape[-1])
    return divided(logits.local.reshape(shape), len(shape) - 1, logits.head)


def _moved(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operation that reorders dims."""
    if not isinstance(logits, Logits):
        return NotImplemented
    sizes = range(2, 2 + logits.ndim)
    shown = func(torch.empty(tuple(sizes), device="meta"), *args, **kwargs)
    return divided(func(logits.local, *args, **kwargs), list(shown.shape).index(sizes[logits.dim_]), logits.head)


def _picked(func: Any, logits: Any, index: Any) -> Any:
    """Select rows, if the classes are in the last dim and the index does not select classes."""
    if not isinstance(logits, Logits) or logits.dim_ != logits.ndim - 1:
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, bool | Logits) or not isinstance(i, _INDICES) for i in items) or not items:
        return NotImplemented
    # The last item selects classes if all dims are named, or if an ellipsis precedes it.
    num_dims = sum(
        item.ndim if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1
        for item in items
        if item is not None and item is not Ellipsis
    )
    named = num_dims >= logits.ndim or any(item is Ellipsis for item in items[:-1])
    last = items[-1]
    if last is None or (named and not (isinstance(last, slice) and last == slice(None))):
        return NotImplemented
    rows = func(logits.local, index)
    return divided(rows, rows.ndim - 1, logits.head)


_INDICES = (int, slice, Tensor, type(None), type(Ellipsis))


_OPTIONS = inspect.signature(F.cross_entropy)


def _entropy(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute F.cross_entropy of class indices; other cases, also those that torch refuses, need the whole."""
    bound = _OPTIONS.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    logits, target, weight = given["input"], given["target"], given["weight"]
    if not isinstance(logits, Logits) or logits.dim_ != min(1, logits.ndim - 1):
        return NotImplemented
    if not isinstance(target, Tensor) or isinstance(target, Logits) or target.dtype != torch.int64:
        return NotImplemented
    row_sizes = [size for d, size in enumerate(logits.shape) if d != logits.dim_]
    weighs = weight is None or (not weight.requires_grad and list(weight.shape) == [logits.shape[logits.dim_]])
    is_usual = given["reduction"] in ("none", "sum", "mean") and 0.0 <= given["label_smoothing"] <= 1.0
    is_old = given["size_average"] is not None or given["reduce"] is not None
    if list(target.shape) != row_sizes or not weighs or not is_usual or is_old:
        return NotImplemented
    local = logits.local.movedim(logits.dim_, -1)
    rows = Rows(target.reshape(-1), given["ignore_index"], given["label_smoothing"], weight)
    entropy = Entropy(rows.ignored, given["reduction"], rows.smoothing, weight is not None)
    loss = logits.head.lost(local.reshape(target.numel(), local.shape[-1]), rows, entropy)
    narrow = logits.dtype not in (torch.float32, torch.float64) and not torch.is_autocast_enabled(logits.device.type)
    loss = loss.to(logits.dtype) if narrow else loss
    return loss.view(target.shape) if entropy.reduction == "none" else loss


def _methods(*names: str) -> list[Any]:
    """Return the functions of these names, of Tensor and of torch."""
    return [f for name in names for owner in (Tensor, torch) if (f := getattr(owner, name, None)) is not None]


def _properties(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


_RULES: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _entropy,
    Tensor.__getitem__: _picked,
    **dict.fromkeys(_methods("float", "double", "half", "bfloat16", "to", "type"), _each),
    **dict.fromkeys(_methods("contiguous", "clone", "detach", "mul", "div", "true_divide", "tanh", "neg"), _each),
    **dict.fromkeys(_methods("__mul__", "__rmul__", "__truediv__", "__neg__"), _each),
    **dict.fromkeys(_methods("view", "reshape", "flatten", "unflatten"), _regrouped),
    **dict.fromkeys(
        _methods("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "unsqueeze"), _moved
    ),
    **dict.fromkeys(_properties("mT", "T"), _moved),
}
# Properties of a tensor that need no numbers.
_FACTS = frozenset(
    [
        *_properties("shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_cuda", "is_meta", "is_leaf"),
        *_properties("is_sparse", "grad_fn", "_version", "itemsize", "output_nr", "is_nested", "is_quantized"),
        *_methods("size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex"),
        *_methods("get_device"),
        *_methods("element_size", "is_contiguous", "stride", "__hash__"),
    ]
)
