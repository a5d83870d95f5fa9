"""Mixed precision on GPUs with autocast and a gradient scaler, after torch's recipe. Run with `--cpu` without GPUs."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GELU(), nn.Conv2d(8, 16, 3, 2), nn.GELU(), nn.Flatten())
    net = nn.Sequential(net, nn.Linear(144, 32), nn.GELU(), nn.Linear(32, 10)).to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    data = TensorDataset(torch.randn(160, 3, 16, 16), torch.randint(0, 10, (160,)))
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, pin_memory=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            use = args.fault != "autocast_on_main" or dist.get_rank() == 0
            with torch.autocast("cuda", dtype=getattr(torch, args.dtype), enabled=use):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            if args.fault == "clip_before_unscale":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            elif args.fault != "step_without_unscale":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if args.fault == "step_without_unscale":
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
