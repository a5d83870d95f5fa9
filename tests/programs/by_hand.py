"""A model that a script divides among ranks itself: an input of test_scripts.py. Its argument says how."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce, all_to_all_single

how = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if how != "experts-alike" else 0)


class Divided(nn.Module):
    """Columns and rows of two layers on each rank, or an expert on each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if how == "columns":
            return all_reduce(self.second(torch.relu(self.first(x))))
        x = all_to_all_single(torch.empty_like(x), x.contiguous())
        x = self.second(torch.relu(self.first(x)))
        return all_to_all_single(torch.empty_like(x), x.contiguous())


model = nn.Linear(4, 4 + 2 * rank) if how == "stages" else Divided()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    generator = torch.Generator().manual_seed(10 * step + (0 if how == "columns" else rank))
    x, target = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)
    optimizer.zero_grad()
    if how != "stages":
        F.mse_loss(model(x), target).backward()
    elif rank == 0:
        outputs = model(x)
        dist.send(outputs.detach(), 1)
        dist.recv(gradient := torch.empty(4, 4), 1)
        outputs.backward(gradient)
    else:
        dist.recv(inputs := torch.empty(4, 4), 0)
        model(inputs.requires_grad_()).sum().backward()
        dist.send(inputs.grad, 0)
    optimizer.step()
dist.destroy_process_group()
