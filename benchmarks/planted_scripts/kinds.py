"""Kinds of loops that the other scripts do not have: copies in float32, gradients by hand, penalties, several heads.

Names that end in `_ok` are no faults.
"""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as gathering
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()
way = args.fault


class Stream(IterableDataset):
    """Samples of this rank, from the only or from each worker."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        workers, own = (worker.num_workers, worker.id) if worker else (1, 0)
        generator = torch.Generator().manual_seed(args.seed)
        for number in range(2000):
            x = torch.randn(12, generator=generator)
            if number % (self.world * workers) == self.rank * workers + own:
                yield x, (x[:3].sum() > 0).long(), number


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(24, 2) for _ in range(2))
        self.memory = nn.LSTM(12, 24, batch_first=True) if way.startswith("packed") else None
        if way.startswith("adapter"):
            self.body.requires_grad_(False)
            self.down, self.up = nn.Linear(24, 2, bias=False), nn.Linear(2, 24, bias=False)

    def forward(self, x, head=0):
        if self.memory is not None:
            x, _ = self.memory(x)
            return self.heads[head](x.data)
        x = self.body(x)
        if way.startswith("adapter"):
            x = x + self.up(self.down(x))
        return x if head is None else self.heads[head](x)


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow the fast ones of another optimizer every two steps."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 1.0})
        self.slow = {p: p.detach().clone() for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in self.slow.items():
                p.copy_(slow.lerp_(p, 0.5))


def main():  # noqa: C901
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = Net()
    by_hand = way.startswith(("assigned", "flat"))
    model = net if by_hand else DistributedDataParallel(net, find_unused_parameters=True)
    trained = [p for p in net.parameters() if p.requires_grad]
    masters = [p.detach().clone().requires_grad_() for p in trained] if way.startswith("master") else trained
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
    if way.startswith("lookahead"):
        optimizer = Lookahead(optimizer)
    teacher = copy.deepcopy(net) if way.startswith("distilled") else None
    workers = 2 if way.startswith("workers") else 0
    loader = DataLoader(Stream(rank, world), batch_size=args.batch_size, num_workers=workers)
    for step, (x, y, number) in enumerate(loader):
        if step == 14:
            break
        for p in [*trained, *masters]:
            p.grad = None
        if way == "drawn_on_main_ok" and rank == 0 and step % 2:
            net.eval()
            net(torch.zeros(3, 12))  # looked at, never trained on
            net.train()
        head = (rank + step) % 2 if way.startswith("heads") else 0
        if way.startswith("packed"):
            lengths = number % 4 + 1
            packed = pack_padded_sequence(x[:, None].expand(-1, 4, -1), lengths, True, enforce_sorted=False)
            targets = pack_padded_sequence(y[:, None].expand(-1, 4), lengths, True, enforce_sorted=False).data
            count = torch.tensor(float(len(targets)))
            dist.all_reduce(count)
            loss = F.cross_entropy(model(packed), targets, reduction="sum") * world / count
        elif way.startswith("contrast"):
            one, other = (F.normalize(model(x + 0.1 * torch.randn_like(x), head=None)) for _ in range(2))
            gather = gathering.all_gather if way == "contrast_ok" else lambda t: [t, t.detach()]
            keys = torch.cat(list(gather(other)))
            loss = F.cross_entropy(
                one @ keys.T / 0.2, torch.arange(len(x)) + len(x) * (rank if way == "contrast_ok" else 0)
            )
        else:
            loss = F.cross_entropy(model(x, head=head), y)
        if way == "penalty_ok":
            noisy = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(net(noisy).sum(), noisy, create_graph=True)
            loss = loss + 0.1 * slope.square().sum(1).mean()
        if way == "distilled_ok":
            loss = loss + F.mse_loss(model(x), teacher(x).detach())
        if way.startswith("assigned"):
            for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
                p.grad = torch.zeros_like(p) if g is None else g
        else:
            loss.backward()
        if way.startswith("assigned"):
            for p in trained:
                dist.all_reduce(p.grad)
                p.grad /= world if way == "assigned_ok" else 1
                if way == "assigned_ok":
                    p.grad.add_(p.detach(), alpha=0.01)
        if way.startswith("flat"):
            own = [p for p in trained if p.grad is not None]
            flat = torch.cat([p.grad.flatten() for p in own])
            if way == "flat_ok" or step != 3:
                dist.all_reduce(flat)
                flat /= world
            for p, g in zip(own, flat.split([p.numel() for p in own]), strict=True):
                p.grad.copy_(g.view_as(p))
        for p, m in zip(trained, masters, strict=True):
            m.grad = p.grad
        if way == "master_alone" and rank:
            masters[0].grad = None if masters[0].grad is None else masters[0].grad * 0
        optimizer.step()
        if masters is not trained:
            with torch.no_grad():
                for p, m in zip(trained, masters, strict=True):
                    p.copy_(m.half().float())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
