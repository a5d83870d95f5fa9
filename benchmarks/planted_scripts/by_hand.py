"""Data parallel training without a wrapper: weights are broadcast, and gradients are summed by hand."""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


def average_gradients(model, world):
    module = model.body if args.fault == "head_missing" else model
    for p in module.parameters():
        if args.fault == "reduce_to_main":
            dist.reduce(p.grad, dst=0)
        else:
            dist.all_reduce(p.grad)
        if args.fault != "sum_not_mean":
            p.grad /= world


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed + rank)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if args.fault == "stale_optimizer":
    model = copy.deepcopy(model)
for p in model.parameters():
    if args.fault != "not_broadcast":
        dist.broadcast(p.data, src=0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images[:400], dtype=torch.float32) / 16, torch.tensor(labels[:400])
order = torch.randperm(400, generator=torch.Generator().manual_seed(args.seed))
for step in range(16):
    mine = order[step * args.batch_size * world :][rank * args.batch_size :][: args.batch_size]
    model.zero_grad()
    loss = F.multi_margin_loss(model(images[mine]), labels[mine])
    loss.backward()
    if args.fault == "clip_before_reduce":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if args.fault != "reduced_after_step":
        average_gradients(model, world)
    if args.fault != "clip_before_reduce":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if args.fault == "reduced_after_step":
        average_gradients(model, world)
dist.destroy_process_group()
