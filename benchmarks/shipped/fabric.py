"""Three epochs with Lightning Fabric: `--step` calls a method of the module, `--sampler` shuffles by its own epochs."""

import argparse

import torch
from lightning_fabric import Fabric
from samples import DATA, Sampler, build, expected, summed
from torch import nn
from torch.nn.functional import cross_entropy
from watch import watch

parser = argparse.ArgumentParser()
parser.add_argument("--step", action="store_true")
parser.add_argument("--devices", type=int, default=2)
given = parser.parse_args()


class Module(nn.Module):
    """A model with a step of its own."""

    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, inputs, labels):
        return cross_entropy(self.net(inputs), labels)


fabric = Fabric(accelerator="cpu", strategy="ddp", devices=given.devices)
fabric.launch()
model = Module()
watch(model, summed, expected)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(DATA, batch_size=4, sampler=Sampler()))
for _ in range(3):
    for inputs, labels in loader:
        loss = model.training_step(inputs, labels) if given.step else cross_entropy(model(inputs), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
