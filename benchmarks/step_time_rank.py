"""One rank of step_time.py: trains with shoal, or with a plain DistributedDataParallel loop, when it is asked to.

It reads lines `KIND NUM_STEPS`, trains so many steps and answers with their seconds as a JSON line; between two lines
it does nothing. Each team is a process as its tool would start it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import fashion_mnist as lenet_job
import gpt as gpt_job
import shoal
from datasets import fashion_mnist, pad, topics
from models import GPT, LeNet
from shoal.distributed.mesh import open_mesh
from shoal.distributed.process_setup import prepare_process
from shoal.launch.environments.detect import joined
from shoal.plans.resolve import Wishes, apply_wishes
from shoal.runs.records import StepRecord
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged

ENDLESS = 1 << 40


class Turns:
    """When this rank trains; `kind` is what it was asked for last."""

    def __init__(self) -> None:
        self.kind, self._left = "", 0
        self._seconds: list[float] = []
        self._wait()

    def _wait(self) -> None:
        self.kind, number = sys.stdin.readline().split()
        self._left, self._seconds, self._began = int(number), [], time.perf_counter()

    def after_step(self) -> None:
        """Counts a step; after the last one answers, and waits for the next line."""
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self._began = now
        self._left -= 1
        if self._left == 0:
            print(json.dumps(self._seconds), flush=True)
            self._wait()


class SwitchedWriter(RecordWriter):
    """A record writer that can be switched off for a while."""

    enabled = True

    def write(self, record: StepRecord) -> None:
        if self.enabled:
            super().write(record)


def plain_training(name: str, after_step: Callable[[], None]) -> None:
    """A loop as one would write it by hand, without end."""
    torch.manual_seed(0)
    if name == "lenet":
        model: nn.Module = LeNet()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dataset, loading = fashion_mnist("train"), {"batch_size": 128}
    else:
        model = GPT()
        optimizer = gpt_job.adamw(list(model.parameters()), lr=1e-3)
        dataset, loading = topics("train"), {"batch_size": 16, "collate_fn": pad}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    multiplier = shoal.warmup_cosine(warmup=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: multiplier(min(1.0, step / 1000)))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(dataset, sampler=sampler, **loading)
    batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    while True:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        logits = ddp(inputs)
        loss = (
            F.cross_entropy(logits.flatten(0, -2), targets.flatten())
            if name == "gpt"
            else F.cross_entropy(logits, targets)
        )
        loss.backward()
        if name == "gpt":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss.item()  # every loop that reports its loss does this
        after_step()


def shoal_training(name: str, turns: Turns) -> None:
    """Trains with shoal on this rank."""
    prepare_process(exact=False, num_threads=1)
    environment = joined(os.environ)
    assert environment is not None
    job = lenet_job.job(batch=256, eval_samples=256) if name == "lenet" else gpt_job.job(batch=32, steps=1000)
    plan = judged(job, apply_wishes(shoal.Plan(), Wishes(devices=2), from_file=False)).plan
    with tempfile.TemporaryDirectory() as folder, open_mesh(environment, plan.layout) as mesh:
        engine = build(job, plan, mesh, Options(Path(folder)))
        writer = SwitchedWriter(Path(folder) / "records.jsonl" if mesh.rank == 0 else None)

        def on_step(record: StepRecord, slowest_rank: int) -> None:
            turns.after_step()
            engine.clock.enabled = writer.enabled = turns.kind == "shoal"

        around = Surroundings(lambda text: None, on_step, lambda: False)
        engine.trainer(None, ENDLESS, around, writer).train()


def main() -> None:
    """Trains when told to, until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=["lenet", "gpt"])
    parser.add_argument("--team", choices=["shoal", "plain"])
    options = parser.parse_args()
    turns = Turns()
    if options.team == "plain":
        torch.distributed.init_process_group("gloo")
        plain_training(options.job, turns.after_step)
    else:
        shoal_training(options.job, turns)


if __name__ == "__main__":
    main()
