"""The gradient that a backward begins with: a new one each time, which autograd may give to a parameter as it is."""

from __future__ import annotations

import torch
from torch import nn

from shoal.parallel.base import run_backward


def test_two_backwards_add_up_where_a_parameters_gradient_is_the_root_itself() -> None:
    """A parameter of one element that is added to the loss has a view of the root as its gradient."""
    weight, offset = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([1.0]))
    for _ in range(3):
        run_backward((weight * 3.0).sum() + offset.squeeze())
    assert weight.grad is not None
    assert offset.grad is not None
    assert (weight.grad.item(), offset.grad.item()) == (9.0, 3.0)


def test_a_hook_may_write_to_it() -> None:
    found = []
    for _ in range(3):
        weight = nn.Parameter(torch.ones(()))
        total = weight * 3.0
        total.register_hook(lambda gradient: gradient.data.mul_(2.0))
        run_backward(total)
        assert weight.grad is not None
        found.append(weight.grad.item())
    assert found == [6.0, 6.0, 6.0]
