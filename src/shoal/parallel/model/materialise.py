"""Materialization of this rank's shard of a model on the meta device: memory and initial values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.parallel.model.sharded_model import ModelDivision, cut_of, laid_out
from shoal.parallel.model.tensor_slice import TensorSlice

# The whole initial value of a parameter or buffer, by its name.
Whole = Callable[[str], Tensor]


def materialise(
    model: nn.Module, whole: Whole, division: ModelDivision, parameters: torch.device, buffers: torch.device
) -> None:
    """Gives every tensor on the meta device memory and this rank's part of its initial value.

    `parameters` and `buffers` are their devices. What is absent stays on the meta device. A parameter under several
    names stays one. No more than one whole value is in memory at a time.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    made: dict[int, Tensor] = {}
    for name, tensor in named:
        if tensor.is_meta and name not in division.absent:
            part = cut_of(tensor, division.parts.get(name) or TensorSlice.whole(tensor.shape))
            device = parameters if isinstance(tensor, nn.Parameter) else buffers
            value = part.take(whole(name)).to(device=device, dtype=tensor.dtype, copy=True).contiguous()
            value = laid_out(value, tensor)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for key, old in home.items():
                if old is not None and id(old) in made:
                    home[key] = made[id(old)]  # type: ignore[assignment]
