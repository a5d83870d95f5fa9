"""Batch normalisation of grains in one call, which is a GPU's way, beside a call for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.numerics import batch_statistics
from shoal.numerics.grain_randomness import GrainScope
from shoal.plans.grains import Grain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device (or tests/conftest.py hides it)"
    ),
]
GRAINS = [Grain(index, 8 * index, 8) for index in range(4)]


def normalised(images: Tensor) -> list[Tensor]:
    """Output, gradients and running statistics of a layer."""
    torch.manual_seed(1)
    model = nn.BatchNorm2d(16, device="cuda")
    x = images.detach().requires_grad_()
    with GrainScope(0, 0, GRAINS):
        out = model(x)
        (out * torch.linspace(-1, 2, out.numel(), device="cuda").view_as(out)).sum().backward()
    assert x.grad is not None
    return [out, x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def test_one_call_computes_what_a_call_for_each_grain_does(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(32, 16, 7, 5, generator=torch.Generator().manual_seed(0)).cuda()
    assert batch_statistics._is_launch_bound(images, images.split(8))
    together = normalised(images)
    monkeypatch.setattr(batch_statistics, "_is_launch_bound", lambda input, parts: False)
    for a, b in zip(together, normalised(images), strict=True):
        # Sums of 280 numbers in float32, and of gradients of 8,960, in another order.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_channels_that_lie_last_stay_so() -> None:
    images = torch.randn(32, 16, 7, 5, device="cuda").to(memory_format=torch.channels_last)
    out, *_ = normalised(images)
    assert out.is_contiguous(memory_format=torch.channels_last)
