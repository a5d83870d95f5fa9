"""A plain loop with DeepSpeed's engine, whose faults can be chosen: an input of test_scripts.py."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--low", action="store_true")
parser.add_argument("--groups", action="store_true")
parser.add_argument("--inner", action="store_true")  # the module without the engine, whose hooks sum all the same
parser.add_argument("--offload", action="store_true")
parser.add_argument("--fault", default="")
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()
deepspeed.init_distributed("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(arguments.seed)
generator = torch.Generator().manual_seed(arguments.seed + 1)
data = TensorDataset(torch.randn(256, 6, generator=generator), torch.randint(0, 3, (256,), generator=generator))
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
groups = [{"params": list(net.parameters())}]
if arguments.groups:
    decayed = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    groups = [{"params": decayed}, {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0}]
rate = 0.01 * (rank + 1 if arguments.fault == "rate" else 1)
config = {
    "train_micro_batch_size_per_gpu": arguments.batch,
    "gradient_accumulation_steps": arguments.accumulate,
    "zero_optimization": {"stage": arguments.stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": arguments.clip,
    "bf16": {"enabled": arguments.low},
}
if arguments.offload:
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["zero_force_ds_cpu_optimizer"] = False
engine, _, _, _ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=rate), config=config)
if arguments.fault == "weights" and rank == 1:  # this rank's copy, which each update writes anew
    with torch.no_grad():
        net[0].weight.mul_(1.5)
sampler = None if arguments.fault == "data" else DistributedSampler(data)
for epoch in range(3):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, arguments.batch, sampler=sampler):
        inputs = inputs.bfloat16() if arguments.low else inputs
        loss = F.cross_entropy((net if arguments.inner else engine)(inputs).float(), targets)
        if arguments.fault == "twice":  # the engine divides by the microbatches too
            loss = loss / arguments.accumulate
        if arguments.fault == "world":
            loss = loss * world
        engine.backward(loss)
        engine.step()
dist.destroy_process_group()
