"""Linear layers as sums of partial products on one process, with the rounding of a tensor-parallel layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Halves(TorchFunctionMode):
    """Context in which linear layers add the products of two halves of their inputs, for each half of their outputs.

    So the sums over inputs in the forward, and over outputs in the backward, are in another order.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Any function; other than F.linear as it is."""
        given = kwargs or {}
        return _linear(*args, **given) if func is F.linear else func(*args, **given)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, columns = (-(-size // 2) for size in weight.shape)
    products = [
        F.linear(input[..., :columns], part[:, :columns]) + F.linear(input[..., columns:], part[:, columns:])
        for part in (weight[:rows], weight[rows:])
    ]
    out = torch.cat(products, -1)
    return out if bias is None else out + bias.to(out.dtype)
