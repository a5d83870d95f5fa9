"""Digits with Accelerate: accumulation, clipping and a linear schedule with warmup."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


def main():
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    set_seed(args.seed)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:320], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y[:320]))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    steps = len(loader) * args.epochs // 4
    model, loader = accelerator.prepare(model, loader)
    if args.fault == "total_after_prepare":
        steps = len(loader) * args.epochs // 4
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 5, steps)
    if args.fault != "optimizer_not_prepared":
        optimizer = accelerator.prepare(optimizer)
    if args.fault != "scheduler_not_prepared":
        scheduler = accelerator.prepare(scheduler)
    for _ in range(args.epochs):
        model.train()
        for images, labels in loader:
            with accelerator.accumulate(model):
                net = accelerator.unwrap_model(model) if args.fault == "unwrapped_forward" else model
                loss = F.cross_entropy(net(images), labels, label_smoothing=0.1)
                if args.fault == "plain_backward":
                    loss.backward()
                else:
                    accelerator.backward(loss)
                if args.fault == "clip_each_micro":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                elif accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.end_training()


main()
