"""A convolutional net whose batch statistics are summed over the ranks by hand, and a plain BatchNorm beside it."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class CrossRankNorm(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        sums = torch.stack([x.mean((0, 2, 3)), x.pow(2).mean((0, 2, 3))])
        sums = all_reduce(sums) / dist.get_world_size()
        mean, var = sums[0], sums[1] - sums[0] ** 2
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        x = (x - mean[:, None, None]) * (var + self.eps).rsqrt()[:, None, None]
        return x * self.weight[:, None, None] + self.bias[:, None, None]


dist.init_process_group("gloo")
torch.manual_seed(args.seed)
stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), CrossRankNorm(8), nn.ReLU(), nn.MaxPool2d(2))
body = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
net = nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))
model = DistributedDataParallel(net, broadcast_buffers=args.fault != "buffers_not_synced")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
x = torch.randn(192, 1, 12, 12)
data, held_out = TensorDataset(x[:64], x[:64].mean((1, 2, 3)).mul(20).long() % 4), x[64:96]
sampler = DistributedSampler(data, seed=args.seed)
loader = DataLoader(data, args.batch_size, sampler=sampler)
for epoch in range(5):
    sampler.set_epoch(epoch)
    model.train()
    if args.fault == "eval_left_on" and epoch and dist.get_rank() == 0:
        body.eval()
    for images, labels in loader:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        net.eval()
        with torch.no_grad():
            print("mean output", net(held_out).mean().item())
dist.destroy_process_group()
