"""Three epochs with Accelerate; `--sampler` says what shuffles."""

import argparse

import torch
from accelerate import Accelerator
from samples import DATA, SEED, Batches, Sampler, build, expected, summed
from torch.nn.functional import cross_entropy
from watch import watch

parser = argparse.ArgumentParser()
parser.add_argument("--sampler", choices=("shuffle", "own", "batches"), default="shuffle")
given = parser.parse_args()
accelerator = Accelerator(cpu=True)
model = build()
options = {
    "shuffle": {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(SEED)},
    "own": {"batch_size": 4, "sampler": Sampler()},
    "batches": {"batch_sampler": Batches()},
}[given.sampler]
loader = torch.utils.data.DataLoader(DATA, **options)
watch(model, summed, expected)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for inputs, labels in loader:
        accelerator.backward(cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
