"""DDP with what a script does to gradients itself between the backward and the optimizer, and unusual optimizers.

Names that end in `_ok` are no faults: every rank does the same, so that one process could do it as well.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Langevin(torch.optim.Optimizer):
    """Stochastic gradient Langevin dynamics: noise in every update."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=0.1 * group["lr"])


class Plain:
    """Descent without torch's optimizer class."""

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr

    @torch.no_grad()
    def step(self):
        for p in self.params:
            p -= self.lr * p.grad

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def change(net, rank, world, step, masks):
    """Changes the gradients that DDP has reduced."""
    for name, p in net.named_parameters():
        if args.fault == "decay_ok" or (args.fault == "decay_on_main" and rank == 0):
            p.grad.add_(p.detach(), alpha=0.05)
        elif args.fault in ("mask_ok", "mask_by_rank"):
            p.grad.mul_(masks[name])
        elif args.fault == "adaptive_ok" and p.ndim > 1:
            norms, limits = (
                p.grad.norm(dim=1, keepdim=True),
                0.05 * p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3),
            )
            p.grad.mul_((limits / norms.clamp(min=1e-6)).clamp(max=1.0))
        elif args.fault == "centred_ok" and p.ndim > 1:
            p.grad -= p.grad.mean(dim=1, keepdim=True)
        elif args.fault == "sign_ok":
            p.grad = p.grad.sign()
        elif args.fault == "tenth_ok":
            p.grad *= 0.1
        elif args.fault == "frozen_ok" and name.startswith("0.") and step < 4:
            p.grad.zero_()
        elif args.fault in ("noise_ok", "noise_by_rank"):
            seed = 100 * step + p.numel() + (rank if args.fault == "noise_by_rank" else 0)
            p.grad += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        elif args.fault == "divided_again":
            p.grad /= world
        elif args.fault == "decay_of_sum":  # undoes the mean, and decays
            p.grad.mul_(world).add_(p.detach(), alpha=0.05)


def summed(state, bucket):
    """Sums over ranks, and does not divide."""
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
    model = DistributedDataParallel(net) if args.fault != "lbfgs_alone" else net
    if args.fault == "narrow_ok":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if args.fault == "hook_sums":
        model.register_comm_hook(None, summed)
    own = torch.Generator().manual_seed(args.seed + (rank if args.fault == "mask_by_rank" else 0))
    masks = {name: (torch.rand(p.shape, generator=own) < 0.7).float() for name, p in net.named_parameters()}
    second = None
    if args.fault.startswith("lbfgs"):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.02, max_iter=4)
    elif args.fault.startswith("langevin"):
        optimizer = Langevin(model.parameters(), lr=0.1)
    elif args.fault == "second_ok":
        optimizer, second = torch.optim.SGD(net[:3].parameters(), lr=0.1), Plain(net[4].parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(args.seed + (rank if args.fault == "langevin_by_rank" else 0))
    x = torch.randn(160, 12, generator=torch.Generator().manual_seed(args.seed))
    data = TensorDataset(x, (x[:, :3] @ torch.ones(3)).sign().long() + 1)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(loader)
        if args.fault == "join_ok":
            batches = batches[: len(batches) - 2 * rank]
        with Join([model]) if args.fault == "join_ok" else contextlib.nullcontext():
            for inputs, labels in batches:

                def closure(inputs=inputs, labels=labels):
                    if args.fault == "zeroed_ok":
                        for p in net.parameters():
                            if p.grad is not None:
                                p.grad.zero_()
                    else:
                        optimizer.zero_grad()
                    if second is not None:
                        second.zero_grad()
                    loss = F.cross_entropy(model(inputs), labels)
                    loss.backward()
                    if args.fault == "lbfgs_ok":  # else each rank would end its search by its own loss
                        loss = loss.detach() / world
                        dist.all_reduce(loss)
                    return loss

                if args.fault.startswith("lbfgs"):
                    optimizer.step(closure)
                else:
                    closure()
                    change(net, rank, world, step, masks)
                    optimizer.step()
                if second is not None:
                    second.step()
                if step == 1 and args.fault.startswith("late_hook"):
                    for p in net.parameters():
                        p.register_hook(lambda g: g * (0.5 if args.fault == "late_hook_ok" or rank else 1.0))
                step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
