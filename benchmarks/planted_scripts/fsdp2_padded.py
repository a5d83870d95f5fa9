"""A decoder on padded lines, sharded by FSDP2 in bf16 with an fp32 master copy."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, src_mask=mask.to(x.dtype), is_causal=True)
        return self.head(self.norm(x))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
model = Decoder()
mesh = init_device_mesh("cpu", (world,))
policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
parts = list(model.blocks) if args.fault == "root_not_sharded" else [*model.blocks, model]
for part in parts:
    fully_shard(part, mesh=mesh, **({"mp_policy": policy} if part is not model else {}))
if args.fault == "sync_off":
    model.set_requires_gradient_sync(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
x = torch.randint(1, 64, (128, 17))
x[torch.arange(17)[None] >= torch.randint(4, 18, (128, 1))] = 0
shard = 0 if args.fault == "same_shard" else rank
sampler = DistributedSampler(TensorDataset(x), world, shard, seed=args.seed)
loader = DataLoader(TensorDataset(x), args.batch_size, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        logits, labels = model(batch[:, :-1]).float(), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum")
        count = (labels != 0).sum()
        if args.fault != "ragged_local_mean":
            dist.all_reduce(count)
            count = count / world
        (loss / count).backward()
        if args.fault == "sum_reduce":
            for p in model.parameters():
                p.grad.mul_(world)
        if args.fault == "clip_local":
            norm = torch.stack([p.grad.to_local().norm() for p in model.blocks.parameters()]).norm()
            for p in model.blocks.parameters():
                p.grad.mul_(min(1.0, 0.1 / norm.item()))
        else:
            nn.utils.clip_grad_norm_(model.blocks.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
