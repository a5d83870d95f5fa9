"""One rank of recovery.py's torchrun: a plain DDP loop that goes on from its newest checkpoint, as torchrun asks for.

It trains the model of examples/gpt.py on the same number of samples a step, saves model, optimizer and step every so
many steps, and rank 0 writes a line for each step. `python -m benchmarks.recovery` starts it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery import EVERY, ROOT, SETTINGS

sys.path.insert(0, str(ROOT / "examples"))
import gpt


def main() -> None:
    """Trains up to a step; raises where a peer is lost, and torchrun starts all again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    job = gpt.job(steps=options.steps, **SETTINGS)
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(list(model.parameters()))
    data, collate = job.train_data(), job.collate
    assert collate is not None
    saved, step = options.out / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with (options.out / "steps.txt").open("a", buffering=1) as lines:
        while step < options.steps:
            torch.manual_seed(step)
            chosen = torch.randperm(len(data))[: job.global_batch][rank::world].tolist()
            total, weight = job.loss(model, collate([data[place] for place in chosen]))
            optimizer.zero_grad()
            (total / weight).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if rank == 0:
                lines.write(f"{os.getpid()} {step} {total.item()}\n")
                if step % EVERY == 0:
                    aside = saved.with_suffix(".aside")
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, aside)  # noqa: TID251 - as such loops do
                    aside.rename(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
