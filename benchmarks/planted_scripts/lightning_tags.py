"""Ragged sequence tagging with the Lightning Trainer."""

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Tagger(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(48, 7)

    def forward(self, words):
        return self.tags(self.lstm(self.embed(words))[0])

    def training_step(self, batch, _):
        words, tags = batch
        loss = F.cross_entropy(self(words).flatten(0, 1), tags.flatten(), ignore_index=-1, reduction="sum")
        count = (tags != -1).sum().float()
        if args.fault != "ragged_mean":
            count = self.trainer.strategy.reduce(count, reduce_op="mean")
        self.log("loss", loss.detach() / count)
        return loss / count

    def on_train_batch_end(self, *_):
        if args.fault == "scheduler_on_main" and self.global_rank == 0:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(args.seed)
    words = torch.randint(1, 100, (96, 14), generator=generator)
    tags = (words * 3 % 7).clone()
    pad = torch.arange(14)[None] >= torch.randint(3, 15, (96, 1), generator=generator)
    words[pad], tags[pad] = 0, -1
    L.seed_everything(args.seed + int(os.environ.get("RANK", "0")) * (args.fault == "seed_by_rank"))
    loader = DataLoader(TensorDataset(words, tags), args.batch_size, shuffle=True, drop_last=True)
    sampler = args.fault != "no_sampler"
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = "ddp" if world > 1 else "auto"
    options |= {"accelerator": "cpu", "devices": world, "strategy": strategy, "use_distributed_sampler": sampler}
    L.Trainer(max_epochs=3, gradient_clip_val=1.0, **options).fit(Tagger(), loader)


main()
