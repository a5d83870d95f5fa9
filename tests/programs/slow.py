"""A plain loop with DistributedDataParallel in which one slowness can be planted: an input of test_slow_scripts.py."""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--slow", default="")
arguments = parser.parse_args()
slow = arguments.slow
WIDTH = 192


class Samples(Dataset):
    """Samples of one length, or of lengths between 1 and 60."""

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        if slow == "loader":
            time.sleep(0.04)
        generator = torch.Generator().manual_seed(place)
        rows = int(torch.randint(1, 60, (), generator=generator)) if slow == "ragged" else 1
        return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, 9, (rows,), generator=generator)


def together(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all samples."""
    inputs, targets = zip(*samples, strict=True)
    times = 20 if slow == "ragged" else 1
    return torch.cat(inputs).repeat(times, 1), torch.cat(targets).repeat(times)


dist.init_process_group("gloo")
torch.manual_seed(0)
depth = 40 if slow in ("optimizer", "zero") else 4
width = 512 if slow == "sums" else WIDTH
layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
net = nn.Sequential(nn.Linear(WIDTH, width), *layers, nn.Linear(width, 9))
model = DistributedDataParallel(net, find_unused_parameters=slow == "unused")
data = Samples()
sampler = DistributedSampler(data)
loader = DataLoader(data, arguments.batch, sampler=sampler, collate_fn=together)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
microbatches = 4 if slow == "sums" else 1
for number, (inputs, targets) in enumerate(loader):
    outputs = model(inputs)
    loss = F.cross_entropy(outputs, targets)
    if slow == "rank" and dist.get_rank() == 1:
        time.sleep(0.3)
    if slow == "python":
        sum(range(2_000_000))
    if slow == "reads":
        total = sum(value.item() for value in outputs.repeat(100, 1).flatten())
    loss.backward()
    if slow == "exchange":
        for _layer in range(200):
            dist.all_reduce(loss.detach())
    if (number + 1) % microbatches:
        continue
    optimizer.step()
    optimizer.zero_grad(set_to_none=slow != "zero")
    if slow == "evaluation" and number % 3 == 0:
        model.eval()
        with torch.no_grad():
            for _pass in range(60):
                model(inputs)
        model.train()
    if slow == "checkpoint" and number % 3 == 0:
        torch.save([net.state_dict() for _ in range(40)], f"weights-{dist.get_rank()}.pt")
dist.destroy_process_group()
