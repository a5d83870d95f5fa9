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


def sharpness(lr: float = 0.1, rho: float = 0.05, epochs: int = 10) -> shoal.Job:
    """The classifier of digits.py by SAM."""
    made = digits_job(epochs=epochs)
    return replace(made, optimizer=lambda parameters: SAM(parameters, lr=lr, momentum=0.9, rho=rho))
