"""A small model whose code reaches into what a layout moves: hooks on parameters, masks, kept losses, unequal calls.

Each step has all samples, so that a plain loop (`plain`) computes the same training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

NUM_SAMPLES, WIDTH, NUM_STEPS = 16, 6, 3


class Block(nn.Module):
    """[B, 6] -> the same, with a loss of its own as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.extra: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        self.extra = {"losses": [self.up(y).square().sum()]}
        return y


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 3)
        for number, parameter in enumerate(self.parameters(), 1):
            angles = torch.arange(parameter.numel()) * (0.7 * number)
            parameter.data.copy_(torch.cos(angles).view_as(parameter) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def samples() -> tuple[Tensor, Tensor]:
    inputs = torch.sin(torch.arange(NUM_SAMPLES * WIDTH) * 1.3).view(NUM_SAMPLES, WIDTH)
    return inputs, torch.arange(NUM_SAMPLES) % 3


def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def job(**fields: Any) -> shoal.Job:
    common: dict[str, Any] = {
        "model": Model,
        "loss": loss,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
        "train_data": samples,
        "global_batch": NUM_SAMPLES,
        "length": shoal.Steps(NUM_STEPS),
    }
    return shoal.Job(**{**common, **fields})


def hooked() -> shoal.Job:
    """Hooks that are not linear, on the gradient and after it; of one parameter the rows from the second on rest."""

    def zeroed(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad[1::2] = 0

    def model() -> nn.Module:
        found = Model()
        for block in found.blocks:
            block.up.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
            block.down.weight.register_post_accumulate_grad_hook(zeroed)
        found.head.weight.register_hook(lambda gradient: gradient.clamp_(-0.02, 0.02))
        return found

    return job(model=model, clip_norm=0.5)


def masked() -> shoal.Job:
    """Every forward sets rows of weights to zero."""

    def mask(module: Any, args: Any) -> None:
        module.weight.data[1::2] = 0

    def model() -> nn.Module:
        found = Model()
        for block in found.blocks:
            block.down.register_forward_pre_hook(mask)
        return found

    return job(model=model)


def adapted() -> shoal.Job:
    """Every forward writes weights by what the samples of its microbatch are."""

    def write(module: Any, args: Any) -> None:
        module.weight.data.mul_(1.0 - 0.1 * args[0].detach().abs().max())

    def model() -> nn.Module:
        found = Model()
        for block in found.blocks:
            block.down.register_forward_pre_hook(write)
        return found

    return job(model=model)


def kept() -> shoal.Job:
    """The loss reads what blocks have kept."""

    def total(model: Any, batch: Any) -> tuple[Tensor, int]:
        found, weight = loss(model, batch)
        return found + 0.1 * sum(block.extra["losses"][0] for block in model.blocks), weight

    return job(loss=total)


LEFT: list[Tensor] = []


def left() -> shoal.Job:
    """The loss reads what blocks have left outside of the model."""

    class Leaving(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            LEFT[:] = [*LEFT[-2:], *self.extra.pop("losses")]
            return y

    def total(model: Any, batch: Any) -> tuple[Tensor, int]:
        found, weight = loss(model, batch)
        return found + 0.1 * sum(LEFT), weight

    def model() -> nn.Module:
        found = Model()
        found.blocks = nn.ModuleList(Leaving() for _ in range(3))
        return found

    return job(model=model, loss=total)


def _is_second() -> bool:
    return dist.is_initialized() and dist.get_rank() == 1


def longer() -> shoal.Job:
    """One rank calls the model once more, as a generation to another length does."""

    def total(model: Any, batch: Any) -> tuple[Tensor, int]:
        if torch.is_grad_enabled() and _is_second():
            with torch.no_grad():
                model(batch[0])
        return loss(model, batch)

    return job(loss=total)


def skipping() -> shoal.Job:
    """One rank leaves out a block."""

    class Adaptive(Model):
        def forward(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                if not (number == 1 and torch.is_grad_enabled() and _is_second()):
                    x = block(x)
            found: Tensor = self.head(x)
            return found

    return job(model=Adaptive)


def rolled() -> shoal.Job:
    """The loss calls the model three times, as often on every rank."""

    def total(model: Any, batch: Any) -> tuple[Tensor, int]:
        with torch.no_grad():
            for _ in range(2):
                model(batch[0])
        return loss(model, batch)

    return job(loss=total)


def plain(name: str) -> dict[str, Tensor]:
    """The state dict after the same training by a plain loop."""
    made: Callable[[], shoal.Job] = globals()[name]
    wanted = made()
    model = wanted.model()
    optimizer = wanted.optimizer(list(model.parameters()))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        total, weight = wanted.loss(model, samples())
        (total / weight).backward()
        if wanted.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), wanted.clip_norm)
        optimizer.step()
    return dict(model.state_dict())
