"""A physics-informed network by LBFGS, and a classifier by SAM: optimizers that compute the loss several times a step.

The network solves the Poisson equation laplace(u) = f on the unit square, with u = 0 on its edges. The loss
differentiates the network by its inputs. Both run on any number of data ranks:

    shoal run examples/poisson.py --devices 2
    shoal run examples/poisson.py:sharpness --devices 2
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from digits import job as digits_job


def network(width: int = 16) -> nn.Sequential:
    """A network: float32 points [N, 2] -> u [N, 1]."""
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def solution(points: Tensor) -> Tensor:
    """Return u = sin(pi x) sin(pi y) at points [N, 2] as [N]."""
    return torch.sin(math.pi * points).prod(1)


def points(count: int = 256, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return points [N, 2], and whether they lie inside [N]; every fourth lies on an edge."""
    drawn = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    numbers = torch.arange(count)
    edge = numbers // 4
    on_edge = numbers % 4 == 0
    drawn[on_edge, (edge % 2)[on_edge]] = (edge // 2 % 2).float()[on_edge]
    return drawn, ~on_edge


def residuals(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of squared residuals: of the equation inside, of u = 0 on the edges; and the number of points."""
    where, inside = batch
    where.requires_grad_()
    u = model(where).squeeze(1)
    (slope,) = torch.autograd.grad(u.sum(), where, create_graph=True)
    second = [torch.autograd.grad(slope[:, dim].sum(), where, create_graph=True)[0][:, dim] for dim in (0, 1)]
    equation = (second[0] + second[1] + 2.0 * math.pi**2 * solution(where)) / (2.0 * math.pi**2)
    return torch.where(inside, equation, u).square().sum(), len(where)


def job(steps: int = 20, max_iter: int = 20, line_search: str = "strong_wolfe", width: int = 16) -> shoal.Job:
    """The Poisson equation by LBFGS; each step computes the loss of all points about 25 times."""
    return shoal.Job(
        model=lambda: network(width),
        loss=residuals,
        optimizer=lambda parameters: torch.optim.LBFGS(
            parameters, max_iter=max_iter, line_search_fn=line_search or None
        ),
        train_data=points(),
        global_batch=256,
        grains=8,
        shuffle=False,
        length=shoal.Steps(steps),
    )


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al., arXiv 2010.01412) over SGD, with the global batch as its group."""

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.0, rho: float = 0.05) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Step by the gradient at the point in distance `rho` where the loss is about largest."""
        loss = closure()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in trained]))
        before = [p.clone() for p in trained]
        for p in trained:
            p.add_(p.grad * (self.rho / (norm + 1e-12)))
        closure()
        for p, value in zip(trained, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


class LossOf(nn.Module):
    """A loss as a module, so that torch computes it with other parameters than the model's."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss's total and weight."""
        pair: tuple[Tensor, Any] = self.loss(self.model, batch)
        return pair


def sharp(loss: Any, rho: float) -> Any:
    """Return a loss that is computed at the weights, within the distance `rho`, where the batch's loss is largest.

    With `fuse=False` a loss gets one grain at a time, so the grain is SAM's group (m-sharpness of the paper).
    """

    def at_worst(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        if not torch.is_grad_enabled():  # an evaluation
            own: tuple[Tensor, Any] = loss(model, batch)
            return own
        whole = LossOf(model, loss)
        trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}
        buffers = {name: value.clone() for name, value in whole.named_buffers()}  # they move once
        with torch.enable_grad(), torch.random.fork_rng():  # both passes draw the same dropout
            total, _ = torch.func.functional_call(whole, buffers, (batch,))
            slopes = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in slopes if g is not None]))
        moved = {
            name: p if slope is None else p + slope * (rho / (norm + 1e-12))
            for (name, p), slope in zip(trained.items(), slopes, strict=True)
        }
        pair: tuple[Tensor, Any] = torch.func.functional_call(whole, moved, (batch,))
        return pair

    return at_worst


def sharpness(lr: float = 0.1, rho: float = 0.05, epochs: int = 10, per: int = 0) -> shoal.Job:
    """The classifier of digits.py by SAM, in groups of `per` samples; 0: the group is the global batch."""
    made = digits_job(epochs=epochs)
    if not per:
        return replace(made, optimizer=lambda parameters: SAM(parameters, lr=lr, momentum=0.9, rho=rho))
    if made.global_batch % per:
        raise ValueError(f"per={per} does not divide a batch of {made.global_batch} samples: try per=16")
    return replace(made, loss=sharp(made.loss, rho), grains=made.global_batch // per, fuse=False)
