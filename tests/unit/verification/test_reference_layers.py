"""Single layers in float64, where a copy of the whole model is too much."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.numerics.precision import Precision
from shoal.verification.reference import NUM_LAYERS, SampledLayers

CPU = torch.device("cpu")
PLAIN = Precision(torch.float32, torch.float32, torch.float32, CPU)
MIXED = Precision(torch.float32, torch.bfloat16, torch.float32, CPU)


def watched(model: nn.Module, inputs: Tensor, precision: Precision) -> dict[str, float]:
    sampled = SampledLayers(model)
    with sampled, precision.autocast():
        model(inputs).float().square().sum().backward()
    return sampled.rounding(precision)


@pytest.mark.parametrize(("precision", "unit"), [(PLAIN, 2.0**-24), (MIXED, 2.0**-8)])
def test_a_layer_is_as_far_as_its_precision(precision: Precision, unit: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 8))
    found = watched(model, torch.randn(32, 64), precision)
    assert set(found) == {"0", "2", "3"}
    assert 0.1 * unit < found["0"] < 30 * unit
    assert all(value < 30 * unit for value in found.values())
    assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())


def test_few_layers_of_many_and_none_that_cannot_be_computed() -> None:
    class Stubborn(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                raise RuntimeError("not implemented for 'Double'")
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Stubborn(4, 4), *(nn.Linear(4, 4) for _ in range(30)))
    found = watched(model, torch.randn(2, 4), PLAIN)
    assert 5 <= len(found) < NUM_LAYERS
    assert "0" not in found
