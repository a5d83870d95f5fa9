"""Numeric trials: what is the same but for rounding, on numbers that hide nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.model.trial import (
    SEED,
    TOLERANCE,
    WithoutDropout,
    floor_of,
    gradients,
    is_same,
    materialised,
)


def test_zeros_and_ones_get_some_noise() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    made = [
        materialised(model, "0", lambda name: held[name].detach(), torch.Generator().manual_seed(SEED))
        for _ in range(2)
    ]
    assert made[0].weight.dtype == torch.float64
    assert made[0].weight.unique().numel() == 4
    assert torch.equal(made[0].weight, made[1].weight)
    assert made[0].num_batches_tracked.dtype == torch.int64


def test_gradients_by_name() -> None:
    used, unused = (torch.ones(3, dtype=torch.float64).requires_grad_() for _ in range(2))
    found = gradients([used * 2, used * 2], {"used": used, "unused": unused})
    assert not found["unused"].any()
    assert found["used"].unique().numel() == 3  # each element has a weight of its own
    assert torch.equal(found["used"], gradients([used * 2, used * 2], {"used": used})["used"])


@pytest.mark.parametrize(("off", "same"), [(0.0, True), (0.5 * TOLERANCE, True), (2 * TOLERANCE, False)])
def test_what_is_the_same(off: float, same: bool) -> None:
    wanted = torch.full((4,), 2.0)
    assert is_same(wanted * (1 + off), wanted) is same
    assert not is_same(wanted[:2], wanted)
    assert not is_same(wanted * float("nan"), wanted)
    assert is_same(torch.arange(3), torch.arange(3))
    small = torch.full((4,), 1e-9)
    assert not is_same(small, -small)
    assert is_same(small, -small, floor_of([wanted]))


@pytest.mark.parametrize("inside", [False, True])
def test_nothing_is_dropped(inside: bool) -> None:
    x = torch.ones(1, 1, 64, 8)
    with WithoutDropout(inside_attention=inside):
        assert F.dropout(x, 0.5) is x
        assert F.dropout(input=x, p=0.5) is x
        attended = [attention(x), attention(x, dropout_p=0.5), attention(x, None, 0.5)]
    dropped = [bool((found == 0).any() or not torch.allclose(found, attended[0])) for found in attended]
    assert dropped == [False, not inside, not inside]


def attention(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, *args, **kwargs)  # type: ignore[arg-type]
