"""A loop with FSDP1 that accumulates and clips, with chosen faults: an input of test_scripts.py."""

import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--original", action="store_true")
parser.add_argument("--low", action="store_true")
parser.add_argument("--strategy", default="FULL_SHARD")
arguments = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(arguments.seed)
model = nn.Sequential(nn.Linear(6, 17), nn.GELU(), nn.Sequential(nn.Linear(17, 9), nn.ReLU()), nn.Linear(9, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if arguments.fault == "early" else None
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=100),
    use_orig_params=arguments.original,
    device_id=torch.device("cpu"),
    sharding_strategy=ShardingStrategy[arguments.strategy],
    mixed_precision=MixedPrecision(torch.bfloat16) if arguments.low else None,
)
optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1 + dist.get_rank() + 100 * arguments.seed)
for step in range(8):
    inputs, targets = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    (F.cross_entropy(model(inputs).float(), targets) / 2).backward()
    if step % 2:
        if arguments.fault == "own-norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        elif arguments.fault == "sum":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(dist.get_world_size())
        else:
            model.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
