"""Data: files of the package are read with importlib.resources, from folders and from archives."""

from __future__ import annotations

import json
from importlib import resources

import torch
from torch import Tensor


def flowers(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Measured flowers, float32 [N, 2], and their kinds, int64 [N]."""
    middles = torch.tensor(json.loads(resources.files("flowers").joinpath("kinds.json").read_text(encoding="utf-8")))
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(len(middles), (num_samples,), generator=generator)
    return middles[kinds] + 0.4 * torch.randn(num_samples, 2, generator=generator), kinds
