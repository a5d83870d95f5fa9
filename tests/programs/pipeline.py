"""A loop with pipeline parallelism of torch: an input of test_scripts.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()
stages = [nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3)]
stage = PipelineStage(stages[rank], rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy)
optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(4):
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    optimizer.zero_grad()
    schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank else {}))
    optimizer.step()
dist.destroy_process_group()
