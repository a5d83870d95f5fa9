"""A GAN of digits under DDP: two models, two optimizers, noise of each rank's own."""

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


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    generator = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    if args.fault != "generator_unwrapped":
        generator = DistributedDataParallel(generator)
    critic = DistributedDataParallel(critic, broadcast_buffers=False)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    sched_d = torch.optim.lr_scheduler.StepLR(opt_d, 2, 0.9)
    data = TensorDataset(torch.tensor(load_digits().data[:320], dtype=torch.float32) / 16)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    if args.fault != "same_noise":
        torch.manual_seed(args.seed * 100 + rank + 1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = generator(torch.randn(len(real), 8))
            if args.fault != "stale_gradients":
                opt_d.zero_grad()
            loss_real = F.binary_cross_entropy_with_logits(critic(real), torch.ones(len(real), 1))
            loss_real.backward()
            loss_fake = F.binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(len(real), 1))
            loss_fake.backward()
            opt_d.step()
            if args.fault == "stale_gradients":
                opt_d.zero_grad()
            opt_g.zero_grad()
            F.binary_cross_entropy_with_logits(critic(fake), torch.ones(len(real), 1)).backward()
            opt_g.step()
            if args.fault != "scheduler_on_main" or rank == 0:
                sched_d.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
