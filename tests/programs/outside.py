"""A loop of which much is outside of the wrapped model: a temperature, a teacher, a loss by hand. Faults by name."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

batch, fault = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if fault == "teacher" else 0)
teacher = nn.Sequential(nn.Linear(6, 4), nn.Softmax(1)).requires_grad_(False)
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(6, 4))
temperature = nn.Parameter(torch.zeros(()))
rate = 0.1 * (world if fault == "linear" else 1)
optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=rate)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: (n + 1) / 40 if "warm" in fault else 1.0)
inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(2))
weights = torch.arange(64) / 64 + 0.1
for step in range(4):
    if fault == "raises" and step == 2 and rank == 1:
        raise ValueError("a bad sample")
    if fault == "waits" and step == 2 and rank == 1:
        dist.barrier(dist.new_group([1], use_local_synchronization=True))
        dist.recv(torch.zeros(2), src=0)
    own = torch.arange(64)[step * batch * world :][: batch * world][rank::world]
    scores = model(inputs[own]) * temperature.exp()
    each = -(teacher(inputs[own]) * scores.log_softmax(1)).sum(1) * weights[own]
    total = weights[own].sum()
    if fault != "own-mean":
        dist.all_reduce(total)
        total /= world
    optimizer.zero_grad()
    (each.sum() / total / (world if fault == "divided" else 1)).backward()
    if fault != "temperature":
        dist.all_reduce(temperature.grad)
        temperature.grad /= world
    optimizer.step()
    for _ in range(world if fault == "warmed-twice" else 1):
        schedule.step()
dist.destroy_process_group()
