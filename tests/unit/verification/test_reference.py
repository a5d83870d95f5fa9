"""Linear layers in halves give the same up to rounding, and round otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.verification.reference import Halves


def computed(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.square().sum().backward()
    return [out.detach(), *(t.grad.clone() for t in (x, *layer.parameters()) if t.grad is not None)]


@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 48, True), (33, 7, False), (1, 1, True)])
def test_the_same_up_to_rounding(inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs, bias=bias).double(), torch.randn(5, 3, inputs).double()
    plain = computed(layer, x)
    with Halves():
        halves = computed(layer, x)
    for a, b in zip(halves, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_sums_are_in_another_order() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48), torch.randn(50, 64)
    plain = computed(layer, x)
    with Halves():
        halves = computed(layer, x)
    assert not torch.equal(halves[0], plain[0])
    assert not torch.equal(halves[1], plain[1])
