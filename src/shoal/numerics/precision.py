"""Mixed precision: dtypes of parameters and compute, and the loss scale that keeps float16 gradients in range."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.errors import JobError
from shoal.numerics.operators import OperatorMode, as_real, is_strided
from shoal.plans.plan import PrecisionSection, Products

_TENSORS = {Tensor, nn.Parameter}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The dtype policy of a run on one kind of device."""

    parameters: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    device: torch.device
    widens: bool = False  # inputs of fewer bits become float32
    widened: bool = False  # parameters were converted to float32, and so are all floating inputs
    channels_last: bool = False  # memory format of images: see `inputs`
    linear: Products = "same"  # the products of linear layers: see numerics/float8.py

    @classmethod
    def of(cls, section: PrecisionSection, device: torch.device, channels_last: bool = False) -> Precision:
        """Return the policy that a plan's section names."""
        parameters, compute, reduce = (_DTYPES[name] for name in (section.parameters, section.compute, section.reduce))
        return cls(parameters, compute, reduce, device, channels_last=channels_last, linear=section.products)

    @property
    def is_wide(self) -> bool:
        """True if both parameters and compute are float32."""
        return self.parameters == self.compute == torch.float32

    def wide(self) -> Precision:
        """Return a copy of this policy in float32."""
        kind = torch.float32
        return Precision(kind, kind, kind, self.device, widens=True, widened=self.parameters.itemsize < 4)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward: autocast if the dtypes of compute and parameters differ."""
        if self.compute == self.parameters:
            return contextlib.nullcontext()
        cast_grouped_products()
        return torch.autocast(self.device.type, dtype=self.compute)

    def products(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward and backward: products in float32 if the processor is slow at narrower ones."""
        slow = self.device.type == "cpu" and any(map(is_slow, {self.parameters, self.compute}))
        return ProductsInFloat32() if slow else contextlib.nullcontext()

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert the model's parameters and buffers in place with `converted`, and return the model.

        Raises: JobError for a float64 model with narrower compute, because autocast would leave all of the model as it
        is.
        """
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if self.compute != self.parameters and self.parameters == torch.float32 and kinds == {torch.float64}:
            narrow = str(self.compute).removeprefix("torch.")
            raise JobError(
                given=f'a model in float64, with precision.compute = "{narrow}"',
                conflict="autocast leaves float64 as it is: nothing would be computed in fewer bits",
                remedy='use a model in float32, or precision.compute = "float32": the model is computed as it is made',
            )
        if self.parameters != torch.float32:
            model._apply(lambda tensor: converted(tensor, self.parameters))
        return model

    def inputs(self, batch: Any) -> Any:
        """Return the batch on the device, with tensors `converted` to the parameters' dtype.

        With `channels_last`, images, float [N, C, H, W], are stored as [N, H, W, C]. Convolutions, pools and norms pass
        that format on from layer to layer. Weights keep their format.
        """
        if self._leaves_tensors and type(batch) in (list, tuple) and _TENSORS.issuperset(map(type, batch)):
            return type(batch)(batch)  # a copy: a loss may change it, and a later call passes the batch again

        def convert(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.to(self.device, non_blocking=True)
            if self.widens and value.is_floating_point() and (self.widened or value.itemsize < 4):
                value = value.float()
            else:
                value = converted(value, self.parameters)
            return channels_last(value) if self.channels_last else value

        return tree_map(convert, batch)

    @functools.cached_property
    def _leaves_tensors(self) -> bool:
        return self.device.type == "cpu" and self.is_wide and not (self.widens or self.channels_last)


def converted(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Convert a tensor for a run with parameters of dtype `kind`; float32 leaves every tensor as the job makes it.

    Any other `kind` applies to floating tensors. Complex tensors become complex128 for float64 and otherwise stay as
    they are, since narrower dtypes have no complex counterpart.
    """
    if kind == torch.float64 and tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(kind) if kind != torch.float32 and tensor.is_floating_point() else tensor


def widest(kind: torch.dtype, tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype in which gradients are summed: float64 if a tensor is float64 or complex128, else `kind`."""
    return torch.float64 if any(t.dtype in (torch.float64, torch.complex128) for t in tensors) else kind


def channels_last(value: Any) -> Any:
    """Return images, float [N, C, H, W], stored as [N, H, W, C]; return any other value unchanged."""
    if not isinstance(value, Tensor) or value.ndim != 4 or not is_strided(value) or not value.is_floating_point():
        return value
    _, channels, height, width = value.shape
    strides = (channels * height * width, 1, width * channels, channels)
    # Images of one channel match both formats, but layers decide by the strides.
    return value.contiguous(memory_format=torch.channels_last).as_strided(value.shape, strides)


# As torch.amp.GradScaler: start at 2^16, double after 2000 good steps, halve at an overflow.
_START, _GROWTH_STEPS = 2.0**16, 2000
# Below this bound the scale is not the cause of an overflow.
_SMALLEST = 2.0**-10


@dataclass(frozen=True)
class LossScale:
    """Loss scale: the factor of the mean loss before the backward, and its state. The value is the same on all ranks.

    torch's GradScaler is not used, because it judges each rank's own gradients. Here one norm of the reduced gradient
    serves clipping, the non-finite policy and the scale.
    """

    scale: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, setting: str | float, compute: torch.dtype) -> LossScale:
        """Return the scale that a plan requests; only float16 compute needs one."""
        if compute != torch.float16 or setting == "none":
            return cls()
        return cls(_START, dynamic=True) if setting == "dynamic" else cls(float(setting))

    def factor(self, global_batch: int) -> float:
        """Return the factor of a loss *total*: the scale divided by the global batch, rounded to a power of two.

        A power of two changes no bit of a gradient that neither overflows nor underflows. If each sample of a batch of
        2^n weighs one, the summed gradient is already the mean, and no further pass over it is needed.
        """
        return self.scale / _power_of_two(global_batch)

    @property
    def active(self) -> bool:
        """True if losses are scaled; always True for a dynamic scale, even at 1."""
        return self.dynamic or self.scale != 1.0

    @property
    def can_fall(self) -> bool:
        """True if a smaller scale may prevent an overflow."""
        return self.dynamic and self.scale > _SMALLEST

    def after(self, overflow: bool) -> LossScale:
        """Return the scale for the next step."""
        if not self.dynamic:
            return self
        if overflow:
            return replace(self, scale=self.scale / 2.0, good_steps=0)
        if self.good_steps + 1 >= _GROWTH_STEPS:
            return replace(self, scale=self.scale * 2.0, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


@functools.lru_cache(maxsize=8)  # called for each microbatch
def _power_of_two(count: int) -> float:
    return 2.0 ** round(math.log2(count))


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor's values in float64, or in complex128."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def numbers(tensor: Tensor) -> Tensor:
    """Return a tensor's values in float64; a complex tensor gets one more dim for both parts."""
    return as_real(wide(tensor))


# ------------------------------------------------------------------------------------------------- grouped products

# Mixture-of-experts models use grouped matrix products, which torch 2.13 does not autocast. Without autocast, the
# experts of a float32 model multiply in float32 whatever `precision.compute` says. The experts take most of such a
# model's FLOPs.
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_ALIGNED = 16  # bytes: the kernel rejects rows of any size but a multiple


@functools.cache
def cast_grouped_products() -> tuple[torch.library.Library, ...]:
    """Register the grouped product with autocast in this process, as long as the returned registrations live."""
    libraries = []
    for device, key in _AUTOCAST_KEYS.items():
        dispatched = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        libraries.append(torch.library.Library("aten", "IMPL", key))
        libraries[-1].impl("_grouped_mm", functools.partial(_autocast_product, device, dispatched))
    return tuple(libraries)


def _autocast_product(device: str, dispatched: Any, left: Tensor, right: Tensor, *rest: Any, **settings: Any) -> Tensor:
    """Compute the grouped product, in the dtype of autocast if autocast would cast the factors of another product."""
    narrow = torch.get_autocast_dtype(device)
    wanted = settings.get("out_dtype", rest[2] if len(rest) > 2 else None)
    kinds = {factor.dtype for factor in (left, right) if factor.device.type == device}
    aligned = all(size * narrow.itemsize % _ALIGNED == 0 for size in (left.shape[-1], right.shape[-1]))
    is_cast = bool(kinds) and kinds <= {torch.float32, torch.float16, torch.bfloat16}
    if wanted in (None, narrow) and aligned and is_cast:
        left, right = left.to(narrow), right.to(narrow)
    with torch._C._ExcludeDispatchKeyGuard(dispatched):
        return torch.ops.aten._grouped_mm.default(left, right, *rest, **settings)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------- products in float32

# Processors without 16-bit instructions compute products of 16-bit floats in float32 and round once, as torch's own
# loops are 10 to 90 times as slow there as float32. A product in a GPT's backward in bfloat16 on AVX2 takes 272 ms, in
# float32 2.9 ms. Products of narrow numbers are exact in float32, and processors with the instructions also sum in
# float32. So the results are the same up to the order of the sum.
_aten = torch.ops.aten
# Operators that sum many products. All others are as fast in a narrow dtype.
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


class ProductsInFloat32(OperatorMode):
    """Context in which products of CPU tensors in bfloat16 or float16 are computed in float32 and rounded back."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        first, second = [value for value in tree_leaves(args) if isinstance(value, Tensor)][:2]
        kind = first.dtype
        if kind != second.dtype or first.device.type != "cpu" or kind not in _SUPPORTED:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda value: _cast(value, kind, torch.float32), (args, kwargs or {}))
        result = func(*args, **kwargs)
        # The logarithms of the sums in attention stay in float32, as in torch's own narrow kernel.
        if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            return _cast(result[0], torch.float32, kind), *result[1:]
        return tree_map(lambda value: _cast(value, torch.float32, kind), result)


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return value.to(target) if isinstance(value, Tensor) and value.dtype == source else value


_SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
}


def is_slow(kind: torch.dtype) -> bool:
    """Return True if this processor has no instructions for `kind`, a dtype narrower than float32."""
    return kind in _SUPPORTED and torch.backends.mkldnn.is_available() and not _SUPPORTED[kind]()
