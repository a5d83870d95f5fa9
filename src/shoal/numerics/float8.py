"""Linear layers that multiply in float8 (e4m3), with scales that are the same on every layout.

y = x w^T has a scale for each row of x and of w, dx = dy w one for each row of dy and each column of w; or, with blocks
of 128, one for 128 elements of x or dy, and for 128 x 128 of w. So a scale depends on one token or on the weight, never
on the other tokens of a microbatch. A tensor axis that cuts what a product sums over takes the maximum over its ranks.
The weight's gradient sums over tokens, which every layout cuts: it stays in the dtype of the compute.

Scales are powers of two. A rounded value times its scale is then exact in bfloat16, so that an ordinary product of
bfloat16 factors, summed in float32, is the reference of the kernels of GPUs (docs/decisions/0062-float8-products.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK: Final = 128
_KIND: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(_KIND).max
# A row of zeros gets this size. A rounded value is then still a normal number of bfloat16.
_SMALLEST: Final = 2.0**-100
# Kernels of GPUs take products whose sizes are multiples of this number.
_ALIGNED: Final = 16


class Float8Values(NamedTuple):
    """Values [rows, columns] in float8, and their scales, float32 [rows, 1] or one for each 128 columns or block."""

    values: Tensor
    scales: Tensor

    def wide(self, kind: torch.dtype) -> Tensor:
        """Return the values times their scales, which is exact in bfloat16, float32 and float64."""
        scales = self.scales
        for dim in (0, 1):
            if scales.shape[dim] not in (1, self.values.shape[dim]):
                scales = scales.repeat_interleave(BLOCK, dim)
        return self.values.to(kind) * scales.to(kind)


@dataclass(frozen=True)
class Float8:
    """Rounding of a linear layer's factors to float8.

    Attributes:
        blocks: one scale for 128 columns of activations and for 128 x 128 of a weight, instead of one for a row.
        inputs: maximum over the ranks that cut the layer's inputs, of float32 [n]; None if they are whole here.
        outputs: the same for the layer's outputs.
        always: round whatever the dtype is, as a reference in float64 does; otherwise only under autocast to bfloat16.
    """

    blocks: bool = False
    inputs: Callable[[Tensor], Tensor] | None = None
    outputs: Callable[[Tensor], Tensor] | None = None
    always: bool = False

    def rounded(
        self, left: Tensor, right: Tensor, over: Callable[[Tensor], Tensor] | None
    ) -> tuple[Float8Values, Float8Values]:
        """Return activations [m, k] and a weight [n, k] in float8, for the product that sums over k.

        Collective: with `over` and scales of rows, the axis, an all-reduce of m + n numbers.
        """
        if self.blocks:
            width = left.shape[1] // BLOCK
            own = left.unflatten(1, (width, BLOCK)).abs().amax(2)
            of_weight = right.unflatten(1, (width, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3))
        else:
            own, of_weight = left.abs().amax(1), right.abs().amax(1)
            if over is not None:
                own, of_weight = over(torch.cat([own, of_weight]).float()).split([len(own), len(of_weight)])
            own, of_weight = own[:, None], of_weight[:, None]
        return _rounded(left, own), _rounded(right, of_weight)

    def product(self, left: Tensor, right: Tensor, over: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return left @ right^T [m, n] of factors that are rounded to float8, in the factors' dtype."""
        a, b = self.rounded(left, right, over)
        # Blocks have a kernel on Hopper alone: elsewhere, and here, their values are multiplied in bfloat16.
        if left.is_cuda and left.dtype == torch.bfloat16 and not self.blocks:
            is_aligned = all(size % _ALIGNED == 0 for size in (*right.shape, left.shape[1]))
            if is_aligned and torch.cuda.get_device_capability(left.device) >= (8, 9):
                return _scaled_product(a, b)
        return F.linear(a.wide(left.dtype), b.wide(right.dtype))


def _rounded(values: Tensor, largest: Tensor) -> Float8Values:
    """Return values in float8, with the smallest powers of two as scales by which `largest` fits.

    `largest` is [rows, 1], [rows, blocks of columns], or [blocks of rows, blocks of columns].
    """
    bits = (largest.float().clamp(min=_SMALLEST) / _LARGEST).view(torch.int32)
    scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # no mantissa: up to the next power of two
    spread = scales
    for dim in (0, 1):
        if spread.shape[dim] not in (1, values.shape[dim]):
            spread = spread.repeat_interleave(BLOCK, dim)
    # Kernels differ in what a cast does beyond the largest value.
    scaled = (values / spread.to(torch.promote_types(values.dtype, torch.float32))).clamp(-_LARGEST, _LARGEST)
    return Float8Values(scaled.to(_KIND), scales)


def _scaled_product(a: Float8Values, b: Float8Values) -> Tensor:
    """Return the product of factors with scales of rows by torch's kernel, in bfloat16."""
    scales = a.scales, b.scales.t()
    out: Tensor = torch._scaled_mm(a.values, b.values.t(), *scales, out_dtype=torch.bfloat16)
    return out


class _Float8Product(torch.autograd.Function):
    """x w^T in float8 and the gradient of x, also in float8."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, how: Float8) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.how = how
        return how.product(input, weight, how.inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return ctx.how.product(gradient, weight.t().contiguous(), ctx.how.outputs), None, None


class _Float8WeightGradient(torch.autograd.Function):
    """The product unchanged, and the gradient of w from it: a node of its own, which a pipeline may postpone."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        (input,) = ctx.saved_tensors
        return gradient, None, gradient.t() @ input


class Float8Linear(nn.Linear):
    """Linear layer that multiplies in float8 under autocast to bfloat16, and otherwise as its class."""

    float8: Float8

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, [..., out_features]."""
        return self.multiply(input, self.weight, self.bias)

    def is_on(self, device: torch.device) -> bool:
        """Return True if the layer multiplies in float8 now."""
        kind = device.type
        narrow = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
        return self.float8.always or narrow

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        """Return the product with a weight or a slice of it. `wide`: unrounded on a CPU, for a sum over ranks."""
        if not self.is_on(input.device):
            return F.linear(input, weight, bias)
        kind = input.dtype if self.float8.always else torch.bfloat16
        rows, weight = input.reshape(-1, input.shape[-1]).to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
        with torch.autocast(input.device.type, enabled=False):
            if input.device.type == "cpu" and kind == torch.bfloat16:
                rows, weight = rows.float(), weight.float()
            output: Tensor = _Float8Product.apply(rows, weight.detach(), self.float8)  # type: ignore[no-untyped-call]
            if torch.is_grad_enabled() and weight.requires_grad:
                output = _Float8WeightGradient.apply(output, rows.detach(), weight)  # type: ignore[no-untyped-call]
            output = output if bias is None else output + bias
            output = output if wide else output.to(kind)
        return output.view(*input.shape[:-1], output.shape[-1])


def make_float8(module: nn.Linear, how: Float8) -> None:
    """Make a linear layer multiply in float8, in place."""
    module.__class__ = Float8Linear
    assert isinstance(module, Float8Linear)
    module.float8 = how


def cut(
    module: nn.Module,
    inputs: Callable[[Tensor], Tensor] | None = None,
    outputs: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Set how a layer in float8, if it is one, takes maxima over the ranks that divide its inputs or outputs."""
    if isinstance(module, Float8Linear):
        module.float8 = replace(module.float8, inputs=inputs, outputs=outputs)
