"""A loop with FSDP2 that accumulates gradients, also with a faulty clipping: an input of test_scripts.py."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 17), nn.GELU(), nn.Linear(17, 3))
if "16-bit" in sys.argv:  # whose second forward, within the backward, has to have the types of the first
    model[0] = checkpoint_wrapper(model[0])
for part in (model[0], model[2], model):
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32) if "16-bit" in sys.argv else None
    fully_shard(part, mesh=mesh, **({"mp_policy": policy} if policy else {}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(1 + dist.get_rank())
for step in range(8):
    model.set_requires_gradient_sync(step % 2 == 1)
    inputs, targets = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    loss = F.cross_entropy(model(inputs), targets) / 2
    if "two-forwards" in sys.argv:  # the outermost parameters stay whole between them
        loss = (loss + F.cross_entropy(model(inputs + 1), targets) / 2) / 2
    loss.backward()
    if step % 2:
        if "own-norm" in sys.argv:
            norm = sum(p.grad.to_local().norm() ** 2 for p in model.parameters()) ** 0.5
            for parameter in model.parameters():
                parameter.grad.mul_(min(1.0, 0.05 / norm.item()))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
