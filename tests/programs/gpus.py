"""A loop that is written for GPUs, also one that starts its processes itself: an input of test_scripts.py."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--fault", default="")
parser.add_argument("--spawn", action="store_true")
arguments = parser.parse_args()


def main(rank: int, world: int, place: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=place, rank=rank, world_size=world, device_id=device)
    if arguments.fault == "kernels":
        import flash_attn  # noqa: F401
    if arguments.fault == "graph":
        torch.cuda.CUDAGraph()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
    if arguments.spawn:  # statistics of all ranks, with their gradients
        whole = torch.randn(4 * world, 6, 2, generator=generator).requires_grad_()
        own = whole.detach()[4 * rank : 4 * rank + 4].requires_grad_()
        norm = nn.SyncBatchNorm(6, affine=False).cuda()
        alone = nn.BatchNorm1d(6, affine=False).cuda()
        for part, of in ((own, norm), (whole, alone)):
            of(part).pow(3).sum().backward()
        torch.testing.assert_close(own.grad, whole.grad[4 * rank : 4 * rank + 4])
        torch.testing.assert_close((norm.running_mean, norm.running_var), (alone.running_mean, alone.running_var))
        DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), norm).cuda(), device_ids=[rank])
    net = torch.compile(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).cuda())
    model = DistributedDataParallel(net, device_ids=[rank], output_device=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    scaler, stream = torch.cuda.amp.GradScaler(init_scale=256.0), torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = next(net.parameters()).detach().cpu()
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() >= world
    begin.record()
    for inputs, targets in DataLoader(data, arguments.batch, sampler=DistributedSampler(data), pin_memory=True):
        with torch.cuda.stream(stream):
            inputs, targets = inputs.cuda(non_blocking=True), targets.to(rank, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        assert inputs.is_cuda
        assert targets.device == device
        assert next(model.parameters()).is_cuda
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy((net if arguments.fault == "inner" else model)(inputs), targets)
        scaler.scale(loss + 0 * torch.ones((), device="cuda")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(before, next(net.parameters()).cpu())
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 0
    assert torch.cuda.max_memory_allocated() == 0
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    if arguments.spawn:
        world = torch.cuda.device_count()
        mp.spawn(main, args=(world, f"file://{tempfile.mktemp()}"), nprocs=world)
    else:
        main(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
