"""Hooks on saved tensors beside torch.func, and derivatives under a GrainScope."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shoal.numerics.grain_randomness import GrainScope, NotFusibleError
from shoal.numerics.isolation import YieldingHooks
from shoal.plans.grains import Grain


def test_hooks_step_aside_within_transforms_and_come_back() -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    values = torch.ones(3, requires_grad=True)
    with YieldingHooks(pack, lambda saved: saved):
        torch.func.grad(lambda x: (x * x).sum())(values)
        before = len(seen)
        (values * values).sum().backward()
    assert before == 0
    assert seen
    with saved_tensors_hooks(pack, lambda saved: saved), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: (x * x).sum())(values)


def test_a_derivative_within_the_loss_recomputes_with_the_same_masks() -> None:
    """Recomputation runs within torch.autograd.grad, in which a function mode is off."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    rows = torch.randn(4, 4)

    def slope(recomputes: bool) -> Tensor:
        inputs = rows.clone().requires_grad_()
        with GrainScope(0, 0, [Grain(0, 0, 2), Grain(1, 2, 2)]) as scope:
            outputs = checkpoint(block, inputs, use_reentrant=False) if recomputes else block(inputs)
            (found,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        assert not scope.leaked()
        return found

    assert torch.equal(slope(True), slope(False))


def test_a_transform_of_the_model_drops_what_the_model_drops() -> None:
    inputs, layer = torch.randn(4, 3), nn.Dropout(0.5)
    grains = [Grain(0, 0, 2), Grain(1, 2, 2)]
    with GrainScope(0, 0, grains):
        mask = layer(torch.ones(4, 3))
    with GrainScope(0, 0, grains) as scope:
        assert torch.equal(torch.func.grad(lambda x: layer(x).sum())(inputs), mask)
        assert not scope.leaked()
        with pytest.raises(NotFusibleError, match="vmap"):
            torch.vmap(lambda scale: layer(inputs * scale), randomness="different")(torch.ones(2))
