"""One rank of cpu_step.py: trains with shoal, or with a plain loop, when it is asked to; see step_time_rank.py."""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import shoal
from benchmarks import small_jobs
from benchmarks.step_time_rank import ENDLESS, Turns
from shoal.distributed.mesh import open_mesh
from shoal.distributed.process_setup import prepare_process
from shoal.launch.environments.detect import joined
from shoal.runs.records import StepRecord
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged
from shoal.training.update.optimizer_step import fused

JOBS: dict[str, Callable[[], shoal.Job]] = {
    "mlp": lambda: small_jobs.mlp(batch=256, width=2048),
    "lenet": lambda: small_jobs.lenet(batch=256),
    "gpt": lambda: small_jobs.gpt(batch=32, block=128),
    "resnet18": lambda: small_jobs.resnet18(batch=32),
    "resnet18-strided": lambda: replace(small_jobs.resnet18(batch=32), model=small_jobs.StridedResNet18),
    "lenet-8": lambda: small_jobs.lenet(batch=8),
}


def lean_training(name: str, after_step: Callable[[], None]) -> None:
    """One process without a loader: rows by a permutation, and nothing else that a step does not need."""
    torch.manual_seed(0)
    job = JOBS[name]()
    model = job.model()
    optimizer = job.optimizer(list(model.parameters()))
    inputs, targets = job.train_data().tensors
    while True:
        for rows in torch.randperm(len(inputs)).split(job.global_batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[rows]).flatten(0, -2), targets[rows].flatten())
            loss.backward()
            optimizer.step()
            loss.item()
            after_step()


def plain_training(name: str, after_step: Callable[[], None], *, meeting: bool = False) -> None:
    """A loop as one would write it by hand, without end: DDP where there are two ranks.

    `meeting`: instead of any sums they meet once a step, and step by fused kernels: what is left where sums take no
    time.
    """
    torch.manual_seed(0)
    job, world_size = JOBS[name](), int(os.environ["WORLD_SIZE"])
    model = job.model()
    optimizer = job.optimizer(list(model.parameters()))
    dataset = job.train_data()
    sampler: DistributedSampler[Any] | None = None
    trained: Any = model
    if world_size > 1:
        sampler = DistributedSampler(dataset, world_size, int(os.environ["RANK"]), shuffle=True, seed=0, drop_last=True)
        torch.distributed.init_process_group("gloo")
    if world_size > 1 and not meeting:
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loader = DataLoader(dataset, sampler=sampler, shuffle=sampler is None, batch_size=job.global_batch // world_size)
    for inputs, targets in itertools.chain.from_iterable(iter(loader) for _ in itertools.count()):
        if meeting:
            torch.distributed.barrier()
        optimizer.zero_grad()
        logits = trained(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        with fused(optimizer) if meeting else nullcontext():
            optimizer.step()
        loss.item()  # every loop that reports its loss does this
        after_step()


def accelerate_training(name: str, after_step: Callable[[], None]) -> None:
    """The same loop by Hugging Face Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    job, model, optimizer, loader = _made(name)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def backward(loss: Any) -> None:
        accelerator.backward(loss)
        if job.clip_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)

    _loop(model, optimizer, loader, backward, after_step)


def fabric_training(name: str, after_step: Callable[[], None]) -> None:
    """The same loop by Lightning Fabric."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(gradient_as_bucket_view=True, process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    job, model, optimizer, loader = _made(name)
    model, optimizer = fabric.setup(model, optimizer)

    def backward(loss: Any) -> None:
        fabric.backward(loss)
        if job.clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=job.clip_norm)

    _loop(model, optimizer, fabric.setup_dataloaders(loader), backward, after_step)


def deepspeed_training(name: str, after_step: Callable[[], None]) -> None:
    """The same loop by DeepSpeed, without ZeRO."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    job, model, optimizer, _ = _made(name)
    per_rank = job.global_batch // int(os.environ["WORLD_SIZE"])
    config = {"train_micro_batch_size_per_gpu": per_rank, "gradient_accumulation_steps": 1}
    if job.clip_norm is not None:
        config["gradient_clipping"] = job.clip_norm
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dataset = job.train_data()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=per_rank)
    for inputs, targets in itertools.chain.from_iterable(iter(loader) for _ in itertools.count()):
        loss = F.cross_entropy(engine(inputs).flatten(0, -2), targets.flatten())
        engine.backward(loss)
        engine.step()
        loss.item()
        after_step()


def _made(name: str) -> tuple[shoal.Job, Any, Any, Any]:
    """The job, its model and optimizer, and a loader whose batches a library divides over the ranks."""
    torch.manual_seed(0)
    job = JOBS[name]()
    model = job.model()
    per_rank = job.global_batch // int(os.environ["WORLD_SIZE"])
    loader = DataLoader(job.train_data(), batch_size=per_rank, shuffle=True, drop_last=True)
    return job, model, job.optimizer(list(model.parameters())), loader


def _loop(
    model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], Any], after_step: Callable[[], None]
) -> None:
    for inputs, targets in itertools.chain.from_iterable(iter(loader) for _ in itertools.count()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        backward(loss)
        optimizer.step()
        loss.item()
        after_step()


def shoal_training(name: str, turns: Turns, options: argparse.Namespace) -> None:
    """Trains with shoal on this rank."""
    prepare_process(exact=options.exact, num_threads=1)
    environment = joined(os.environ)
    assert environment is not None
    job = JOBS[name]()
    execution = {"exact": options.exact, "channels_last": options.channels_last}
    sections = {"layout": {options.axis: environment.world_size}, "execution": execution}
    plan = shoal.Plan().with_sections(**sections, collectives={"all_reduce": options.all_reduce})
    plan = plan.with_sections(memory={"shared": options.one_copy})
    plan = judged(job, plan).plan
    with tempfile.TemporaryDirectory() as folder, open_mesh(environment, plan.layout) as mesh:
        engine = build(job, plan, mesh, Options(Path(folder)))
        writer = RecordWriter(Path(folder) / "records.jsonl" if mesh.rank == 0 else None)

        def on_step(record: StepRecord, slowest_rank: int) -> None:
            turns.after_step()

        engine.trainer(None, ENDLESS, Surroundings(lambda text: None, on_step, lambda: False), writer).train()


LOOPS: dict[str, Callable[[str, Callable[[], None]], None]] = {
    "plain": plain_training,
    "meeting": partial(plain_training, meeting=True),
    "lean": lean_training,
    "accelerate": accelerate_training,
    "fabric": fabric_training,
    "deepspeed": deepspeed_training,
}


def main() -> None:
    """Trains when told to, until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=list(JOBS))
    parser.add_argument("--tool", choices=["shoal", *LOOPS])
    parser.add_argument("--all-reduce", default="native")
    parser.add_argument("--axis", default="data", choices=["data", "shard", "tensor"])
    parser.add_argument("--one-copy", action="store_true", help="of parameters and optimizer state")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--bind", action="store_true", help="each rank to a core of its own")
    options = parser.parse_args()
    if options.bind:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    turns = Turns()
    if options.tool == "shoal":
        shoal_training(options.job, turns, options)
    else:
        LOOPS[options.tool](options.job, turns.after_step)


if __name__ == "__main__":
    main()
