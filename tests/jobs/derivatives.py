"""Jobs that differentiate within the loss, a metric or the model, each with a plain loop over the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import shoal

Pair = tuple[Tensor, int]
STEPS, BATCH = 3, 8


def rows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(STEPS * BATCH, 4, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] * 2).long().clamp(0, 2)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Forces(nn.Module):
    """An energy and its negative gradient with respect to the inputs, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = net()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        places = inputs.detach().requires_grad_()
        energy = self.energy(places)[:, 0]
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=self.training)
        return energy, -slope


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def penalty(model: nn.Module, batch: Any) -> Pair:
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return summed(outputs, batch[1]) + slope.pow(2).sum(), len(inputs)


def equation(model: nn.Module, batch: Any) -> Pair:
    """A physics-informed loss: second derivatives with respect to the inputs."""
    inputs = batch[0].clone().requires_grad_()
    value = model(inputs)[:, 0]
    (first,) = torch.autograd.grad(value.sum(), inputs, create_graph=True)
    second = torch.autograd.grad(first[:, 0].sum(), inputs, create_graph=True)[0][:, 0]
    return (second + value.sin()).pow(2).sum(), len(inputs)


def forces(model: nn.Module, batch: Any) -> Pair:
    energy, force = model(batch[0])
    return (force - batch[0].sin()).pow(2).sum() + energy.pow(2).sum(), len(energy)


def critic(model: nn.Module, batch: Any) -> Pair:
    between = (batch[0] * 0.5).requires_grad_()
    value = model(between)[:, 0]
    (slope,) = torch.autograd.grad(value.sum(), between, create_graph=True)
    return (model(batch[0])[:, 0] - value + (slope.norm(dim=1) - 1).pow(2)).sum(), len(between)


def adapted(model: nn.Module, batch: Any) -> Pair:
    """One inner step of MAML for each sample."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def of_sample(inputs: Tensor, target: Tensor) -> Tensor:
        def inner(own: dict[str, Tensor], scale: float = 1.0) -> Tensor:
            return F.cross_entropy(functional_call(model, own, (scale * inputs[None],)), target[None])

        slopes = grad(inner)(parameters)
        return inner({name: value - 0.1 * slopes[name] for name, value in parameters.items()}, 1.1)

    return vmap(of_sample)(*batch).sum(), len(batch[0])


def directional(model: nn.Module, batch: Any) -> Pair:
    found: Any = jvp(model, (batch[0],), (torch.ones_like(batch[0]),))
    outputs, slope = found
    return summed(outputs, batch[1]) + slope.pow(2).sum(), len(batch[0])


def curvature(model: nn.Module, batch: Any) -> Pair:
    matrices = vmap(hessian(lambda row: model(row[None])[0, 0]))(batch[0])
    return (matrices.diagonal(dim1=1, dim2=2).sum(1) - 1).pow(2).sum(), len(batch[0])


def stepwise(model: nn.Module, batch: Any) -> Pair:
    """A derivative that runs a backward into the inputs' own `.grad`, whose values are then constants."""
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(summed(model(inputs), batch[1]), inputs)
    return summed(model(batch[0] + 0.1 * slope.sign()), batch[1]), len(inputs)


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Pair]]] = {
    "penalty": (net, penalty),
    "equation": (net, equation),
    "forces": (Forces, forces),
    "critic": (net, critic),
    "adapted": (net, adapted),
    "directional": (net, directional),
    "curvature": (net, curvature),
    "stepwise": (net, stepwise),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def job(name: str = "penalty") -> shoal.Job:
    model, loss = LOSSES[name]
    return shoal.Job(
        model=model,
        loss=loss,
        optimizer=sgd,
        train_data=rows,
        eval_data=rows,
        metrics={"same": loss},
        predict=lambda model, batch: torch.autograd.grad(
            model(batch[0].requires_grad_())[0].sum() if name == "forces" else model(batch[0].requires_grad_()).sum(),
            batch[0],
        )[0],
        shuffle=False,
        global_batch=BATCH,
        grains=4,
        length=shoal.Steps(STEPS),
    )


def plain(name: str) -> tuple[dict[str, Tensor], float]:
    """Weights and the evaluation's mean loss of a loop that knows nothing of shoal."""
    build, loss = LOSSES[name]
    model = build()
    optimizer = sgd(model.parameters())
    for batch in zip(*(part.split(BATCH) for part in rows()), strict=True):
        optimizer.zero_grad()
        total, weight = loss(model, batch)
        (total / weight).backward()
        optimizer.step()
    model.eval()
    total, weight = loss(model, rows())
    return {name: value.detach() for name, value in model.state_dict().items()}, float(total.detach()) / weight
