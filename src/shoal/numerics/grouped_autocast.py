"""Autocast for grouped matrix products, which mixture-of-experts models use. torch 2.13 does not autocast them.

Without it, the experts of a float32 model multiply in float32 whatever `precision.compute` says. The experts take most
of such a model's FLOPs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_KINDS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_ALIGNED = 16  # bytes: the kernel rejects rows of any size but a multiple


@cache
def cast_grouped_products() -> tuple[torch.library.Library, ...]:
    """Register the grouped product with autocast in this process, as long as the returned registrations live."""
    return tuple(_registered(device, key) for device, key in _KINDS.items())


def _registered(device: str, key: str) -> torch.library.Library:
    dispatched = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def product(left: Tensor, right: Tensor, *rest: Any, **settings: Any) -> Tensor:
        narrow = torch.get_autocast_dtype(device)
        wanted = settings.get("out_dtype", rest[2] if len(rest) > 2 else None)
        if wanted in (None, narrow) and _is_cast(left, right, device, narrow):
            left, right = left.to(narrow), right.to(narrow)
        with torch._C._ExcludeDispatchKeyGuard(dispatched):
            return torch.ops.aten._grouped_mm.default(left, right, *rest, **settings)  # type: ignore[no-any-return]

    library = torch.library.Library("aten", "IMPL", key)
    library.impl("_grouped_mm", product)
    return library


def _is_cast(left: Tensor, right: Tensor, device: str, narrow: torch.dtype) -> bool:
    """Return True if autocast would cast these factors in another product and the kernel accepts their row sizes."""
    kinds = {factor.dtype for factor in (left, right) if factor.device.type == device}
    aligned = all(size * narrow.itemsize % _ALIGNED == 0 for size in (left.shape[-1], right.shape[-1]))
    return aligned and bool(kinds) and kinds <= {torch.float32, torch.float16, torch.bfloat16}
