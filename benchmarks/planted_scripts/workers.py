"""A stream of samples that workers of each rank load, under DDP."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Stream(IterableDataset):
    def __init__(self, rank, world, size):
        self.rank, self.world, self.size, self.epoch = rank, world, size, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * args.seed + self.epoch)
        worker = get_worker_info()
        share, shares = self.rank * worker.num_workers + worker.id, self.world * worker.num_workers
        if args.fault == "not_sharded":
            share, shares = worker.id, worker.num_workers
        x = torch.randn(self.size, 20, generator=generator)
        for i in range(share, self.size, shares):
            yield x[i], x[i, :2].prod()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3)
    uneven = args.fault == "unequal_last"
    stream = Stream(rank, world, 2 * args.batch_size * world * 3 - 2 * uneven)
    for epoch in range(4):
        stream.epoch = epoch
        for x, y in DataLoader(stream, batch_size=args.batch_size, num_workers=2, drop_last=not uneven):
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
