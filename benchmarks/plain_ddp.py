"""The peer of step_time.py: a plain DistributedDataParallel loop as one would write it by hand; one rank of it.

Started by step_time.py with torchrun's variables set. Prints the seconds of each step as JSON on rank 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt
import shoal
from datasets import fashion_mnist, pad, topics
from models import GPT, LeNet


def lenet() -> tuple[nn.Module, torch.optim.Optimizer, Any, dict[str, Any]]:
    """LeNet on Fashion-MNIST as examples/fashion_mnist.py trains it."""
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, fashion_mnist("train"), {"batch_size": 128}


def small_gpt() -> tuple[nn.Module, torch.optim.Optimizer, Any, dict[str, Any]]:
    """The byte-level GPT as examples/gpt.py trains it."""
    model = GPT()
    optimizer = gpt.adamw(list(model.parameters()), lr=1e-3)
    return model, optimizer, topics("train"), {"batch_size": 16, "collate_fn": pad}


def loss(name: str, model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean loss of this rank's batch, as plain loops have it."""
    inputs, targets = batch
    logits = model(inputs)
    return (
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()) if name == "gpt" else F.cross_entropy(logits, targets)
    )


def main() -> None:
    """Trains `--steps` steps of `--job` and prints each step's seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=("lenet", "gpt"))
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    model, optimizer, dataset, loading = lenet() if options.job == "lenet" else small_gpt()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    multiplier = shoal.warmup_cosine(warmup=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: multiplier(step / options.steps))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(dataset, sampler=sampler, **loading)
    seconds: list[float] = []
    while len(seconds) < options.steps:
        sampler.set_epoch(len(seconds))
        began = time.perf_counter()
        for batch in loader:
            optimizer.zero_grad()
            value = loss(options.job, ddp, batch)
            value.backward()
            if options.job == "gpt":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            value.item()
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
            if len(seconds) == options.steps:
                break
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
