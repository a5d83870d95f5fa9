"""DDP with an exponential average of the weights that starts each new epoch."""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Average:
    def __init__(self, module, decay):
        self.module, self.decay = copy.deepcopy(module).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, module):
        for mine, theirs in zip(self.module.parameters(), module.parameters(), strict=True):
            mine.lerp_(theirs, 1 - self.decay)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    x = torch.randn(64, 16)
    data = TensorDataset(x, (x[:, :3].sum(1) > 0).float())
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    average = Average(net, 0.9)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels).backward()
            optimizer.step()
            if args.fault != "average_on_main" or rank == 0:
                average.update(net)
        if args.fault != "loaded_on_main" or rank == 0:
            net.load_state_dict(average.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
