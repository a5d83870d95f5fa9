"""Autocast of grouped matrix products, which torch leaves out of its list (2.13): a mixture's experts multiply by them.

Without it the experts of a float32 model multiply in float32 whatever `precision.compute` says, and they are most of
such a model's FLOPs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_KINDS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_ALIGNED = 16  # bytes: the kernel refuses rows of other sizes


@cache
def cast_grouped_products() -> tuple[torch.library.Library, ...]:
    """Adds the product to what autocast casts, in this process; the registrations, which last as long as they live."""
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
    """Whether autocast would cast these as factors of another product, and the kernel takes them then."""
    kinds = {factor.dtype for factor in (left, right) if factor.device.type == device}
    aligned = all(size * narrow.itemsize % _ALIGNED == 0 for size in (left.shape[-1], right.shape[-1]))
    return aligned and bool(kinds) and kinds <= {torch.float32, torch.float16, torch.bfloat16}
