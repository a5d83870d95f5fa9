"""Products of 16-bit floats, computed in float32 and rounded once, for processors without 16-bit instructions.

On such processors torch's own loops are 10 to 90 times as slow as float32. A product in a GPT's backward in bfloat16 on
AVX2 takes 272 ms; in float32 it takes 2.9 ms. Products of narrow numbers are exact in float32, and processors with the
instructions also sum in float32. So the results are the same up to the order of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


class ProductsInFloat32(TorchDispatchMode):
    """Context in which products of CPU tensors in bfloat16 or float16 are computed in float32 and rounded back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler, for over a second, to exclude this mode from it."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = _kind(args) if func in _PRODUCTS else None
        if kind is None:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda value: _cast(value, kind, torch.float32), (args, kwargs or {}))
        found = func(*args, **kwargs)
        # The logarithms of the sums in attention stay in float32, as in torch's own narrow kernel.
        if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            return _cast(found[0], torch.float32, kind), *found[1:]
        return tree_map(lambda value: _cast(value, torch.float32, kind), found)


def _kind(args: tuple[Any, ...]) -> torch.dtype | None:
    """Return the dtype of a product's first two operands if it is narrow and the first is on the CPU, else None."""
    first, second = [value for value in tree_leaves(args) if isinstance(value, Tensor)][:2]
    same = first.dtype == second.dtype and first.device.type == "cpu"
    return first.dtype if same and first.dtype in _SUPPORTED else None


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return value.to(target) if isinstance(value, Tensor) and value.dtype == source else value


_SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
}


def is_slow(kind: torch.dtype) -> bool:
    """Return True if this processor has no instructions for `kind`, a dtype narrower than float32."""
    return kind in _SUPPORTED and torch.backends.mkldnn.is_available() and not _SUPPORTED[kind]()
