"""A plain loop with DistributedDataParallel, whose faults can be chosen: an input of test_scripts.py."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--fault", default="")
arguments = parser.parse_args()
if arguments.fault == "raises":
    raise SystemExit("there is no data")
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank() if arguments.fault == "seed" else 0)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))


class Net(nn.Sequential):
    """Layers that may be computed again in the backward, or whose result is centred over all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if arguments.fault == "recomputed":
            return checkpoint(super().forward, x, use_reentrant=False)
        x = super().forward(x)
        if arguments.fault == "gathered":
            dist.all_gather_into_tensor(means := torch.empty(3 * dist.get_world_size()), x.detach().mean(0))
            return x - means.view(-1, 3).mean(0)
        return x - all_reduce(x.mean(0)) / dist.get_world_size() if arguments.fault == "exchanges" else x


net = Net(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
model = net if arguments.fault == "seed" else DistributedDataParallel(net)
if arguments.fault != "noisy":
    torch.manual_seed(dist.get_rank() + 1)
sampler = DistributedSampler(data)
rate = 1e-2 * (dist.get_rank() + 1 if arguments.fault == "rate" else 1)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
if arguments.fault == "zero":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=rate)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
for epoch in range(0 if arguments.fault == "untrained" else 2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, arguments.batch, sampler=sampler):
        optimizer.zero_grad()
        if arguments.fault == "scaled":  # no fault: the first scales overflow, and their updates are left out
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            continue
        if arguments.fault == "mixup":
            share, other = torch.rand(()).item(), torch.randperm(len(inputs))
            outputs = model(share * inputs + (1 - share) * inputs[other])
            loss = share * F.cross_entropy(outputs, targets) + (1 - share) * F.cross_entropy(outputs, targets[other])
            loss.backward()
            optimizer.step()
            continue
        F.cross_entropy(model(inputs), targets).backward()
        if arguments.fault == "perturbed":  # a second forward with other weights, as sharpness-aware minimization has
            before = net[0].weight.detach().clone()
            with torch.no_grad():
                net[0].weight += net[0].weight.grad
            F.cross_entropy(model(inputs), targets).backward()
            with torch.no_grad():
                net[0].weight.copy_(before)
        if arguments.fault == "clipped":
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm().item()
            for parameter in net.parameters():
                parameter.grad.mul_(min(1.0, 0.3 / norm))
        if arguments.fault == "noise":
            net[0].weight.grad.add_(torch.randn(16, 6))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if arguments.fault == "weights":
            with torch.no_grad():
                net[4].bias.add_(0.1)
dist.destroy_process_group()
