"""A compiled residual MLP under DDP."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images[:320], dtype=torch.float32) / 16, torch.tensor(labels[:320]))
    net = nn.Sequential(nn.Linear(64, 32), *(Residual(32) for _ in range(3)), nn.Linear(32, 10))
    model = DistributedDataParallel(torch.compile(net))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    if args.fault == "not_sharded":
        loader = DataLoader(data, args.batch_size, shuffle=True)
    else:
        sampler = DistributedSampler(data, seed=args.seed)
        loader = DataLoader(data, args.batch_size, sampler=sampler)
    for epoch in range(2):
        if args.fault != "not_sharded":
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.nll_loss(F.log_softmax(model(x), dim=1), y).backward()
            if args.fault == "divided_twice":
                for p in model.parameters():
                    p.grad.div_(dist.get_world_size())
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
