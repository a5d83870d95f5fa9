"""One rank of cpu_step.py: trains with shoal, or with a plain loop, when it is asked to; see step_time_rank.py."""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import shoal
from benchmarks import small_jobs
from benchmarks.step_time_rank import ENDLESS, Turns
from shoal.engine import Options, build
from shoal.environment import joined
from shoal.mesh import open_mesh
from shoal.plan.resolve import complete
from shoal.records import StepRecord
from shoal.startup import prepare_process
from shoal.telemetry import RecordWriter
from shoal.trainer import Surroundings

JOBS: dict[str, Callable[[], shoal.Job]] = {
    "mlp": lambda: small_jobs.mlp(batch=256, width=2048),
    "lenet": lambda: small_jobs.lenet(batch=256),
    "gpt": lambda: small_jobs.gpt(batch=32, block=128),
    "resnet18": lambda: small_jobs.resnet18(batch=32),
}


def plain_training(name: str, after_step: Callable[[], None]) -> None:
    """A loop as one would write it by hand, without end: DDP where there are two ranks."""
    torch.manual_seed(0)
    job, world_size = JOBS[name](), int(os.environ["WORLD_SIZE"])
    model = job.model()
    optimizer = job.optimizer(list(model.parameters()))
    dataset = job.train_data()
    sampler: DistributedSampler[Any] | None = None
    trained: Any = model
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = DistributedSampler(dataset, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(dataset, sampler=sampler, shuffle=sampler is None, batch_size=job.global_batch // world_size)
    for inputs, targets in itertools.chain.from_iterable(iter(loader) for _ in itertools.count()):
        optimizer.zero_grad()
        logits = trained(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        loss.item()  # every loop that reports its loss does this
        after_step()


def shoal_training(name: str, turns: Turns, algorithm: str, exact: bool) -> None:
    """Trains with shoal on this rank."""
    prepare_process(exact=exact, num_threads=1)
    environment = joined(os.environ)
    assert environment is not None
    job = JOBS[name]()
    sections = {"layout": {"data": environment.world_size}, "execution": {"exact": exact}}
    plan = shoal.Plan().with_sections(**sections, collectives={"all_reduce": algorithm})
    plan = complete(plan, job.grains, job.grain_size)
    with tempfile.TemporaryDirectory() as folder, open_mesh(environment, plan.degrees) as mesh:
        engine = build(job, plan, mesh, Options(Path(folder)))
        writer = RecordWriter(Path(folder) / "records.jsonl" if mesh.rank == 0 else None)

        def on_step(record: StepRecord, slowest_rank: int) -> None:
            turns.after_step()

        engine.trainer(None, ENDLESS, Surroundings(lambda text: None, on_step, lambda: False), writer).train()


def main() -> None:
    """Trains when told to, until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=list(JOBS))
    parser.add_argument("--tool", choices=["shoal", "plain"])
    parser.add_argument("--all-reduce", default="native")
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    turns = Turns()
    if options.tool == "plain":
        plain_training(options.job, turns.after_step)
    else:
        shoal_training(options.job, turns, options.all_reduce, options.exact)


if __name__ == "__main__":
    main()
