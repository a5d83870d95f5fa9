"""A rank's own gradients, as a trace has them."""

import torch
from torch import nn

from shoal.training.observe.trace.recorder import OwnGradients


def test_complex_gradients_keep_their_imaginary_part() -> None:
    weight = nn.Parameter(torch.tensor([1.0 + 2.0j, -3.0j], dtype=torch.complex64))
    own = OwnGradients([("weight", weight)])
    for _ in range(2):  # as of two microbatches
        (weight.abs() ** 2).sum().backward()
    own.close()
    assert own.sums["weight"].dtype == torch.complex64
    torch.testing.assert_close(own.sums["weight"], 4 * weight.detach())


def test_gradients_within_a_loss_are_not_those_of_its_backward() -> None:
    weight = nn.Parameter(torch.ones(3))
    own = OwnGradients([("weight", weight)])
    own.listens = False
    (inner,) = torch.autograd.grad(weight.pow(2).sum(), weight, create_graph=True)
    own.listens = True
    inner.sum().backward()
    assert own.sums["weight"].tolist() == [2.0, 2.0, 2.0]
    own.close()
