"""144 million parameters, of which gradients and Adam make 2.3 GB of state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shoal


class Block(nn.Module):
    """[B, width] -> [B, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Tower(nn.Module):
    """Blocks of one width, and a head of two classes."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def job(width: int = 3000, blocks: int = 16, steps: int = 2) -> shoal.Job:
    inputs = torch.randn(16, width, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    return shoal.Job(
        model=lambda: Tower(width, blocks),
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
        train_data=data,
        global_batch=8,
        length=shoal.Steps(steps),
    )
