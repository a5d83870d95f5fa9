"""One rank of step_time.py: segments of shoal steps and of a plain DistributedDataParallel loop take turns.

Both train the same model on the same data in the same process, so that whatever else the machine does meets both. The
plain loop runs inside shoal's callback after a step; the step that follows a segment of it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
from shoal.engine import build
from shoal.environment import joined
from shoal.mesh import open_mesh
from shoal.plan.resolve import Wishes, apply_wishes, complete
from shoal.records import StepRecord
from shoal.run_directory import RunDirectory
from shoal.run_request import RunRequest
from shoal.telemetry import RecordWriter
from shoal.trainer import Surroundings

# Steps of one kind in a row, and how many such rows: each kind of each row meets the same weather.
SEGMENTS = {"lenet": (20, 9), "gpt": (5, 6)}


class SwitchedWriter(RecordWriter):
    """A record writer that can be switched off for a while."""

    enabled = True

    def write(self, record: StepRecord) -> None:
        if self.enabled:
            super().write(record)


def plain_steps(name: str) -> Iterator[float]:
    """Seconds of each step of a loop as one would write it by hand, without end."""
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
    batches = iter(loader)
    while True:
        began = time.perf_counter()
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
        yield time.perf_counter() - began


def shoal_training(name: str, turn: Callable[[StepRecord, SwitchedWriter, Any], None], num_steps: int) -> None:
    """Trains with shoal on this rank; `turn` is called after each step."""
    environment = joined(os.environ)
    assert environment is not None
    job = lenet_job.job(batch=256, eval_samples=256) if name == "lenet" else gpt_job.job(batch=32, steps=1000)
    plan = complete(apply_wishes(shoal.Plan(), Wishes(devices=2), from_file=False), job.grains, job.grain_size)
    with tempfile.TemporaryDirectory() as folder, open_mesh(environment, plan.degrees) as mesh:
        request = RunRequest(
            job=None,  # type: ignore[arg-type]  # the job is built here, not read from a file
            plan=plan,
            wishes=Wishes(),
            out=Path(folder),
            resume=False,
            steps=num_steps,
            checkpoint_every=None,
            telemetry=True,
            started_at=time.time(),
            plan_from_file=False,
        )
        engine = build(job, plan, mesh, request, RunDirectory(Path(folder)))
        writer = SwitchedWriter(Path(folder) / "records.jsonl" if mesh.rank == 0 else None)
        around = Surroundings(lambda text: None, lambda record, rank: turn(record, writer, engine.clock), lambda: False)
        engine.trainer(None, num_steps, around, writer).train()
        engine.close()


def main() -> None:
    """Prints, on rank 0, the median seconds of a step of each kind as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=SEGMENTS)
    options = parser.parse_args()
    length, rows = SEGMENTS[options.job]
    seconds: dict[str, list[float]] = {"shoal": [], "shoal_no_telemetry": [], "plain_ddp": []}
    plain: list[Iterator[float]] = []

    def turn(record: StepRecord, writer: SwitchedWriter, clock: Any) -> None:
        place, row = (record.step - 1) % length, (record.step - 1) // length
        # The first step after a change of kind is left out of every kind: it meets the other's caches.
        if row > 0 and place > 0:
            seconds["shoal" if clock.enabled else "shoal_no_telemetry"].append(record.seconds)
        if place == length - 1:
            if not plain:
                plain.append(plain_steps(options.job))
            found = [next(plain[0]) for _ in range(length)]
            if row > 0:
                seconds["plain_ddp"] += found[1:]
            clock.enabled = writer.enabled = row % 2 == 0

    shoal_training(options.job, turn, length * rows + 1)
    if os.environ["RANK"] == "0":
        print(json.dumps({name: statistics.median(times) for name, times in seconds.items()}))


if __name__ == "__main__":
    main()
