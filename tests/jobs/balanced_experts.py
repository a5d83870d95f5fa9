"""A job whose router has a bias that balances the load of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

RATE = 0.25  # large enough to change the choices of the next step


class Router(nn.Module):
    """Chooses two of four experts by scores and a bias, as DeepSeek-V3 does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = (x @ self.weight.T).sigmoid()
        chosen = (scores + self.bias).topk(2).indices
        return scores, scores.gather(1, chosen), chosen


class Experts(nn.Module):
    """A router, and experts of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.Parameter(torch.randn(4, 8, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        _, weights, chosen = self.router(x)
        return torch.einsum("td,tkdh,tk->th", x, self.experts[chosen], weights)


def job(**changes: Any) -> shoal.Job:
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "model": Experts,
        "loss": lambda model, batch: ((model(batch[0]) - batch[0]).square().sum(), len(batch[0])),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        "train_data": lambda: TensorDataset(data),
        "global_batch": 16,
        "grains": 4,
        "buffers": {"router.bias": f"balance:{RATE}"},
        "length": shoal.Steps(3),
    }
    return shoal.Job(**{**settings, **changes})
