"""A language model of characters with plain DDP, gradient accumulation and `no_sync`."""

import argparse
import contextlib
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 24)
        self.rnn = nn.GRU(24, 48, batch_first=True)
        self.out = nn.Linear(48, 128)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(args.seed)
text = "".join(sorted(topics.values()))[: 80 * 33]
chunks = torch.tensor([min(ord(c), 127) for c in text]).view(80, 33)
data = TensorDataset(chunks[:, :-1], chunks[:, 1:])
seed = args.seed + rank if args.fault == "sampler_seed_by_rank" else args.seed
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, args.batch_size, sampler=sampler)
model = DistributedDataParallel(CharModel())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(6):
    if args.fault != "no_set_epoch":
        sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        end = (i + 1) % args.accumulate == 0
        if args.fault != "leftover_carried":
            end = end or i + 1 == len(loader)
        parts = min(args.accumulate, len(loader) - i // args.accumulate * args.accumulate)
        if args.fault in ("not_divided", "leftover_carried"):
            parts = 1 if args.fault == "not_divided" else args.accumulate
        with contextlib.nullcontext() if end and args.fault != "sync_too_late" else model.no_sync():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / parts
            if args.fault == "zero_each_micro":
                optimizer.zero_grad()
            if args.fault != "sync_too_late":
                loss.backward()
        if args.fault == "sync_too_late":
            loss.backward()
        if end:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
