"""An epoch with the Lightning Trainer; `--how` says what is used of it."""

import argparse

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from samples import DATA, build, summed
from torch.nn.functional import cross_entropy
from watch import watch

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=("static", "no-index", "validated"), required=True)
parser.add_argument("--devices", type=int, default=2)
given = parser.parse_args()


class Module(LightningModule):
    """A model with the step of the Trainer, by hand with `--how static`."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = given.how != "static"
        self.net = build()
        watch(self.net, summed)

    def forward(self, inputs):
        return self.net(inputs)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch[0]), batch[1])
        if given.how != "static":
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None


class NoIndex(Module):
    """The same, whose step does not take the number of the batch."""

    def training_step(self, batch):
        return cross_entropy(self(batch[0]), batch[1])


class Validated(Module):
    """The same with a validation."""

    def validation_step(self, batch, batch_idx):
        self(batch[0])


loader = torch.utils.data.DataLoader(DATA, batch_size=4, shuffle=True)
kind = {"static": Module, "no-index": NoIndex, "validated": Validated}[given.how]
Trainer(
    accelerator="cpu",
    devices=given.devices,
    strategy=DDPStrategy(static_graph=given.how == "static"),
    max_epochs=1,
    accumulate_grad_batches=1 if given.how == "static" else 2,
    num_sanity_val_steps=0,
    val_check_interval=1 if given.how == "validated" else None,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(kind(), loader, torch.utils.data.DataLoader(DATA, batch_size=4) if given.how == "validated" else None)
