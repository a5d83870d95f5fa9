"""Optimizers of optimizers, and with a state of their own, by which whole states and evaluation weights are tested."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import tiny
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

import shoal


class Both(Optimizer):
    """Two optimizers within, each with some of the parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        every = list(parameters)
        self.parts = [
            SGD([p for p in every if p.ndim > 1], lr=0.1, momentum=0.9),
            Adam([p for p in every if p.ndim < 2]),
        ]
        super().__init__(every, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, own in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(own)


class Averaged(Optimizer):
    """Schedule-free: a wrapper that trains with y, and whose `eval` gives the average x. Counts in attributes."""

    def __init__(self, base: Optimizer, beta: float = 0.9) -> None:
        self.base, self.beta, self.trains, self.count = base, beta, False, 0
        self.slow: dict[Tensor, Tensor] = {}
        self.recent: deque[int] = deque(maxlen=2)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def _move(self, share: float) -> None:
        for parameter, slow in self.slow.items():
            parameter.lerp_(slow, share)

    def eval(self) -> None:
        if self.trains:
            self._move(1 - 1 / self.beta)
        self.trains = False

    def train(self) -> None:
        if not self.trains:
            self._move(1 - self.beta)
        self.trains = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.trains, "train() comes before a step"
        self.count += 1
        self.recent.append(self.count)
        self.base.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.slow.setdefault(parameter, parameter.clone())
                slow.lerp_(parameter, 1 / (self.count + sum(self.recent)))


def both(steps: int = 8) -> shoal.Job:
    """Two optimizers in one, whose rates a schedule sets."""
    return tiny.mlp(optimizer=Both, steps=steps)


def averaged(steps: int = 8) -> shoal.Job:
    """Two in one, in a wrapper with evaluation weights."""
    return tiny.mlp(optimizer=lambda parameters: Averaged(Both(parameters)), steps=steps)
