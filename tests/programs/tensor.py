"""A loop with tensor parallelism, on four ranks with FSDP2, with chosen faults: an input of test_scripts.py."""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(F.gelu(self.up(self.norm(x)))))


parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--sequence", action="store_true")
parser.add_argument("--logits", action="store_true")
parser.add_argument("--low", action="store_true")
parser.add_argument("--dropout", action="store_true")
arguments = parser.parse_args()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(arguments.seed)
model = Net()
plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
if arguments.sequence:
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
if arguments.logits:
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
if arguments.dropout:
    model.up.register_forward_hook(lambda m, a, o: F.dropout(o, 0.5))
parallelize_module(model, mesh["tensor"], plan)
if arguments.fault == "norm":  # a part of the gradient of what each rank has whole is missing
    model.norm.weight.register_hook(lambda g: g * (dist.get_rank() + 1))
if mesh["data"].size() > 1:
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32) if arguments.low else MixedPrecisionPolicy()
    )
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
place = dist.get_rank() if arguments.fault == "samples" else mesh["data"].get_local_rank()
generator = torch.Generator().manual_seed(1 + place + 100 * arguments.seed)
for _ in range(4):
    inputs, targets = torch.randn(4, 8, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator)
    with loss_parallel() if arguments.logits else contextlib.nullcontext():
        F.cross_entropy(model(inputs).flatten(0, 1), targets).backward()
    if arguments.fault == "twice":
        model.down.bias.grad.mul_(2)
    optimizer.step()
    if arguments.fault != "kept":  # no fault: gradients of all steps add up
        optimizer.zero_grad()
dist.destroy_process_group()
