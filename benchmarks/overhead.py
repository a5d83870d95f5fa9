"""Claim: at batch 8 shoal's step takes 0.3 to 0.6 ms more than the leanest bare loop's, of LeNet and a tiny MLP.

Processor time, medians of blocks in two runs: an MLP of 20 thousand parameters (`--job mlp20k --blocks 31`) 0.67 and
0.68 ms beside 0.36: 93 and 92 % more (quartiles 73 to 97 %), and 118 % before the dear calls of a step were made
cheaper. LeNet (`--blocks 9`) 4.83 and 4.40 beside 4.25 and 3.98: 10 and 12 % more (quartiles -7 to 17 %), and 17 and 16
before. One thread on a virtual machine of 2 cores of an Intel Xeon, which others disturbed, torch 2.13.0. The aim, 10
and 5 %, is missed: some 290 calls are left, and each costs a microsecond or two.

Repeat with `python -m benchmarks.overhead`: LeNet at global batch 8 (and, with `--batch`, others) on one process of one
thread. Blocks of steps of shoal's trainer, records and all, and of two bare loops on models of their own take turns in
one process: forward, loss, backward, the job's optimizer, `loss.item()`. The leanest takes rows of a tensor by their
numbers, which are drawn once; the ordinary one takes what torch's `DataLoader(shuffle=True)` gives it. A sample is a
block of each, without its first steps; the figure is shoal's time over the bare loop's. `cpu` is the thread's processor
time, to which other programs add nothing but cold caches. Shoal steps the optimizer by torch's fused kernels
(docs/decisions/0019-cpu-steps.md) where the bare loops have the default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import shoal
from benchmarks import small_jobs
from shoal.distributed.mesh import open_mesh
from shoal.distributed.process_setup import prepare_process
from shoal.launch.environment import Environment
from shoal.runs.records import StepRecord
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged

UNCOUNTED, BLOCK = 10, 80
# `mlp20k` has 19,690 parameters.
JOBS: dict[str, Callable[..., shoal.Job]] = {
    "lenet": small_jobs.lenet,
    "mlp": small_jobs.mlp,
    "mlp20k": partial(small_jobs.mlp, width=24),
    "gpt": small_jobs.gpt,
}
Seconds = tuple[float, float]
Batches = Iterator[tuple[Tensor, Tensor]]


def now() -> Seconds:
    """Wall and processor seconds."""
    return time.perf_counter(), time.thread_time()


def since(began: Seconds) -> Seconds:
    """Seconds of a counted step on average, from the end of the uncounted ones."""
    ended = now()
    return (ended[0] - began[0]) / BLOCK, (ended[1] - began[1]) / BLOCK


def by_number(job: shoal.Job) -> Batches:
    """The leanest batches: rows of a tensor, in an order that is drawn once."""
    inputs, targets = job.train_data().tensors
    order = torch.randperm(len(inputs))
    while True:
        for rows in order.split(job.global_batch):
            yield inputs[rows], targets[rows]


def loaded(job: shoal.Job) -> Batches:
    """The ordinary batches."""
    loader = DataLoader(job.train_data(), batch_size=job.global_batch, shuffle=True)
    while True:
        yield from loader


def bare(job: shoal.Job, batches: Batches) -> Callable[[], Seconds]:
    """A block of steps of a loop without shoal: seconds of one of them."""
    model = job.model()
    optimizer = job.optimizer(list(model.parameters()))

    def steps(count: int) -> None:
        for _ in range(count):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            loss.backward()
            optimizer.step()
            loss.item()

    def block() -> Seconds:
        steps(UNCOUNTED)
        began = now()
        steps(BLOCK)
        return since(began)

    return block


class InTurn:
    """Called after each step of the trainer: after a block of them it notes their time, and lets the others run."""

    def __init__(self, others: dict[str, Callable[[], Seconds]]) -> None:
        self.found: dict[str, list[Seconds]] = {name: [] for name in ("shoal", *others)}
        self._others, self._steps, self._began = others, 0, now()

    def __call__(self, record: StepRecord, slowest_rank: int) -> None:
        self._steps += 1
        if self._steps == UNCOUNTED:
            self._began = now()
        elif self._steps == UNCOUNTED + BLOCK:
            self.found["shoal"].append(since(self._began))
            for name, block in self._others.items():
                self.found[name].append(block())
            self._steps = 0


def measure(job: shoal.Job, blocks: int) -> dict[str, list[Seconds]]:
    """Seconds of a step in each block, of the trainer's and of the bare loops'; the first blocks are left out."""
    plan = judged(job, shoal.Plan()).plan
    with tempfile.TemporaryDirectory() as folder, open_mesh(Environment(), plan.layout) as mesh:
        engine = build(job, plan, mesh, Options(Path(folder)))
        writer = RecordWriter(Path(folder) / "records.jsonl")
        turns = InTurn({"leanest": bare(job, by_number(job)), "ordinary": bare(job, loaded(job))})
        num_steps = (blocks + 1) * (UNCOUNTED + BLOCK)
        engine.trainer(None, num_steps, Surroundings(lambda text: None, turns, lambda: False), writer).train()
        writer.close()
        engine.close()
    return {name: seconds[1:] for name, seconds in turns.found.items()}


def compared(found: dict[str, list[Seconds]], clock: int) -> dict[str, object]:
    """Milliseconds of each loop's step, and shoal's share over each bare loop's: median and quartiles over blocks."""
    own, *others = found
    steps = {name: round(statistics.median(s[clock] for s in many) * 1e3, 3) for name, many in found.items()}
    over = {}
    for name in others:
        pairs = zip(found[own], found[name], strict=True)
        low, median, high = statistics.quantiles([mine[clock] / bare[clock] - 1.0 for mine, bare in pairs], n=4)
        over[name] = {"median": round(median, 4), "quartiles": [round(low, 4), round(high, 4)]}
    return {"step_milliseconds": steps, "overhead": over}


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=list(JOBS), default="lenet")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare_process(exact=False, num_threads=1)
    job = JOBS[options.job](batch=options.batch)
    found = measure(job, options.blocks)
    clocks = {name: compared(found, clock) for clock, name in enumerate(("wall", "cpu"))}
    about = {**small_jobs.machine(), "threads": torch.get_num_threads(), "blocks": options.blocks}
    text = json.dumps({"job": options.job, "batch": options.batch, **about, **clocks}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
