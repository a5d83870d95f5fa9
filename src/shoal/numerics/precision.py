"""Mixed precision: dtypes of parameters and compute, and the loss scale that keeps float16 gradients in range."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.errors import JobError
from shoal.numerics.flat import is_strided
from shoal.numerics.grouped_autocast import cast_grouped_products
from shoal.numerics.wide_products import ProductsInFloat32, is_slow
from shoal.plans.plan import PrecisionSection

_TENSORS = {Tensor, nn.Parameter}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The dtype policy of a run on one kind of device."""

    parameters: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    device: torch.device
    widens: bool = False  # inputs of fewer bits too
    widened: bool = False  # parameters have been made float32, and so are all inputs
    channels_last: bool = False  # inputs of four dims and more than one pixel

    @classmethod
    def of(cls, section: PrecisionSection, device: torch.device, channels_last: bool = False) -> Precision:
        """The policy that a plan's section names."""
        parameters, compute, reduce = (_DTYPES[name] for name in (section.parameters, section.compute, section.reduce))
        return cls(parameters, compute, reduce, device, channels_last=channels_last)

    @property
    def is_wide(self) -> bool:
        """Whether everything is float32."""
        return self.parameters == self.compute == torch.float32

    def wide(self) -> Precision:
        """Copy of this policy in float32."""
        kind = torch.float32
        return Precision(kind, kind, kind, self.device, widens=True, widened=self.parameters.itemsize < 4)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward: autocast where compute differs from the parameters."""
        if self.compute == self.parameters:
            return contextlib.nullcontext()
        cast_grouped_products()
        return torch.autocast(self.device.type, dtype=self.compute)

    def products(self) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and backward: float32 products where the processor is no good at narrower ones."""
        slow = self.device.type == "cpu" and any(map(is_slow, {self.parameters, self.compute}))
        return ProductsInFloat32() if slow else contextlib.nullcontext()

    def apply(self, model: nn.Module) -> nn.Module:
        """The model with its parameters and buffers `converted`, in place.

        Raises: JobError where autocast would leave all of a float64 model as it is.
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
        """The batch on the device, `converted` to the parameters' dtype.

        With `channels_last` images, float [N, C, H, W], lie in memory as [N, H, W, C]. Convolutions, pools and norms
        hand that on from layer to layer; weights stay as they are.
        """
        if self._leaves_tensors and type(batch) in (list, tuple) and _TENSORS.issuperset(map(type, batch)):
            return type(batch)(batch)  # a loss may change it, and is given it again
        moved = tree_map(self._input, batch)
        return tree_map(channels_last, moved) if self.channels_last else moved

    @functools.cached_property
    def _leaves_tensors(self) -> bool:
        return self.device.type == "cpu" and self.is_wide and not (self.widens or self.channels_last)

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.to(self.device, non_blocking=True)
        if self.widens and value.is_floating_point() and (self.widened or value.itemsize < 4):
            return value.float()
        return converted(value, self.parameters)


def converted(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """A tensor in a run whose parameters are of a kind: float32 leaves everything as the job makes it.

    Else what is floating is of that kind. What is complex stays so: in float64 it is complex128, and fewer bits have no
    counterpart.
    """
    if kind == torch.float64 and tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(kind) if kind != torch.float32 and tensor.is_floating_point() else tensor


def widest(kind: torch.dtype, tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype in which gradients of these are summed, where a plan says `kind`: float64 where one of them is."""
    return torch.float64 if any(t.dtype in (torch.float64, torch.complex128) for t in tensors) else kind


def channels_last(value: Any) -> Any:
    """Images, float [N, C, H, W], that lie in memory as [N, H, W, C]; anything else as it is."""
    if not isinstance(value, Tensor) or value.ndim != 4 or not is_strided(value) or not value.is_floating_point():
        return value
    _, channels, height, width = value.shape
    strides = (channels * height * width, 1, width * channels, channels)
    # Images of one channel count as lying either way, and layers go by the strides.
    return value.contiguous(memory_format=torch.channels_last).as_strided(value.shape, strides)


# As torch.amp.GradScaler: start at 2^16, double after 2000 good steps, halve at an overflow.
_START, _GROWTH_STEPS = 2.0**16, 2000
# Below this scale an overflow is not the scale's doing.
_SMALLEST = 2.0**-10


@dataclass(frozen=True)
class LossScale:
    """Loss scaling: the factor of the mean loss before the backward, and its state; a value, the same on all ranks.

    torch's GradScaler is not used: it judges each rank's own gradients, while here one norm of the reduced gradient
    serves clipping, the non-finite policy and the scale.
    """

    scale: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, setting: str | float, compute: torch.dtype) -> LossScale:
        """The scale that a plan asks for; only float16 compute needs one."""
        if compute != torch.float16 or setting == "none":
            return cls()
        return cls(_START, dynamic=True) if setting == "dynamic" else cls(float(setting))

    def factor(self, global_batch: int) -> float:
        """The factor of a loss *total*: the scale over the global batch, rounded to a power of two.

        A power of two changes no bit of a gradient that neither overflows nor underflows. Of samples that weigh one in
        a batch of 2^n the summed gradient is the mean then, and no pass over it is needed to make it so.
        """
        return self.scale / _power_of_two(global_batch)

    @property
    def active(self) -> bool:
        """Whether losses are scaled; a dynamic scale is also where it has come down to 1."""
        return self.dynamic or self.scale != 1.0

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be the scale's doing, which a smaller one would mend."""
        return self.dynamic and self.scale > _SMALLEST

    def after(self, overflow: bool) -> LossScale:
        """The scale for the next step."""
        if not self.dynamic:
            return self
        if overflow:
            return replace(self, scale=self.scale / 2.0, good_steps=0)
        if self.good_steps + 1 >= _GROWTH_STEPS:
            return replace(self, scale=self.scale * 2.0, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


@functools.lru_cache(maxsize=8)
def _power_of_two(count: int) -> float:
    return 2.0 ** round(math.log2(count))


def wide(tensor: Tensor) -> Tensor:
    """The tensor's values in float64, or in complex128."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def numbers(tensor: Tensor) -> Tensor:
    """The tensor's values in float64; of complex ones both parts, in one more dim."""
    found = wide(tensor)
    return torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
