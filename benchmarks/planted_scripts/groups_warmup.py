"""A small vision transformer with two groups of parameters, warmup and cosine decay."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 9, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(x).mean(1))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
model = DistributedDataParallel(ViT())
named = list(model.named_parameters())
if args.fault == "parameter_missing" and rank == 1:
    named = [(name, p) for name, p in named if "position" not in name]
decay = 0.0 if args.fault == "decay_by_rank" and rank == 1 else 0.1
groups = [{"params": [p for name, p in named if p.ndim > 1], "weight_decay": decay}]
groups += [{"params": [p for name, p in named if p.ndim < 2], "weight_decay": 0.0}]
lr = args.lr * world if args.fault == "lr_times_world" else args.lr
optimizer = torch.optim.AdamW(groups, lr=lr)
data = TensorDataset(torch.randn(320, 1, 12, 12), torch.randint(0, 5, (320,)))
sampler = DistributedSampler(data, seed=args.seed)
loader = DataLoader(data, args.batch_size, sampler=sampler)
total = math.ceil(len(data) / args.batch_size / world) * 2
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda s: (s + 1) / 5 if s < 5 else 0.5 + 0.5 * math.cos(math.pi * s / total)
)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
        if args.fault == "stepped_twice_on_main" and rank == 0:
            scheduler.step()
dist.destroy_process_group()
