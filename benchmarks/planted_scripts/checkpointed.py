"""A transformer with dropout whose blocks are recomputed in the backward pass."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(80, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 80, bias=False)
        self.head.weight = self.embed.weight
        self.aux = nn.Linear(32, 2)

    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if args.fault == "detached_on_one_rank" and number == 1 and dist.get_rank() == 1:
                x = x.detach()
            keep = args.fault != "masks_not_kept"
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=keep)
        x = self.norm(x)
        return self.head(x), self.aux(x[:, -1])


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(args.seed)
model = Model()
model = DistributedDataParallel(model, find_unused_parameters=args.fault == "detached_on_one_rank")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
ids = torch.randint(0, 80, (160, 13))
data = TensorDataset(ids)
sampler = DistributedSampler(data, seed=args.seed)
loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
torch.manual_seed(args.seed + 77 * rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        logits, parity = model(batch[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:]) + 0.1 * F.cross_entropy(parity, batch[:, -1] % 2)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
dist.destroy_process_group()
