"""Claim: on an H200 a step as one CUDA graph takes 0.6 (LeNet), 1.0 (ResNet-18) and 1.0 (GPT-2) of a bare loop's.

On a CPU (`--tiny`) the program runs, and its figures mean nothing.

Repeat with `python -m benchmarks.gpu_step --job lenet` (resnet18, gpt) on a machine with a GPU; `scripts/gpu` runs all.
Blocks of steps of shoal's trainer, records and all, and of a bare loop, each with a model and an optimizer of its own,
take turns in one process, so that other work on the machine meets both alike. shoal's plan is as it is by default, with
its step captured in a CUDA graph, and with its blocks compiled; the bare loop is in eager mode, or under torch.compile
beside the compiled plan. A block's time is taken between two synchronisations of the device, after steps that are not
counted; a ratio is taken within a turn, and medians are over the turns. The bare loops copy pinned batches without
waiting and read the loss once a block. The GPT is GPT-2's in bfloat16; its share of the peak counts 6 FLOPs a parameter
and token, and attention.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks import small_jobs
from shoal.distributed.mesh import open_mesh
from shoal.errors import PlanError
from shoal.hardware import cluster
from shoal.launch.environment import Environment
from shoal.plans.resolve import Wishes, apply_wishes
from shoal.runs.records import StepRecord
from shoal.training.engine import Options, build
from shoal.training.preflight import judged
from shoal.training.step_records import Surroundings
from shoal.training.telemetry import RecordWriter

TOKENS = 50_257


class GPT2(small_jobs.GPT):
    """The examples' GPT with a vocabulary of its own."""

    def __init__(self, layers: int, width: int, heads: int, block: int, tokens: int) -> None:
        super().__init__(layers, width, heads, block, 0.0)
        self.embedding, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight


def gpt(tiny: bool) -> shoal.Job:
    layers, width, block, tokens, batch = (2, 32, 16, 256, 4) if tiny else (12, 768, 1024, TOKENS, 16)
    model = partial(GPT2, layers, width, width // 16 if tiny else 12, block, tokens)
    return replace(small_jobs.gpt(batch=batch, block=block), model=model, clip_norm=None)


JOBS: dict[str, Callable[[bool], shoal.Job]] = {
    "lenet": lambda tiny: small_jobs.lenet(8 if tiny else 256),
    "resnet18": lambda tiny: small_jobs.resnet18(8 if tiny else 256),
    "gpt": gpt,
}


# By name: keys of the plan's section [execution], and the loops beside it.
PLANS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "default": ({}, ("eager",)),
    "captured": ({"cuda_graph": True}, ("eager",)),
    "compiled": ({"compile": "default"}, ("eager", "compiled")),
}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def batches(job: shoal.Job, device: torch.device) -> Iterator[Any]:
    """Rows of the job's tensors in an order that is drawn once, on the device."""
    tensors = job.train_data().tensors
    while True:
        for rows in torch.randperm(len(tensors[0])).split(job.global_batch):
            found = [tensor[rows] for tensor in tensors]
            pinned = [tensor.pin_memory() for tensor in found] if device.type == "cuda" else found
            yield [tensor.to(device, non_blocking=True) for tensor in pinned]


def bare(
    job: shoal.Job, device: torch.device, half: bool, compiled: bool, counts: tuple[int, int]
) -> Callable[[], float]:
    """A block of steps of a loop without shoal: seconds of one of them."""
    model = job.model().to(device)
    optimizer = job.optimizer(list(model.parameters()))
    forward = torch.compile(model) if compiled else model
    source = batches(job, device)

    def steps(count: int) -> None:
        loss = None
        for _ in range(count):
            batch = next(source)
            optimizer.zero_grad()
            narrow = torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext()
            with narrow:
                total, weight = job.loss(forward, batch)
            loss = total / weight
            loss.backward()
            optimizer.step()
        assert loss is not None
        loss.item()

    def block() -> float:
        steps(counts[0])
        synchronize(device)
        began = time.perf_counter()
        steps(counts[1])
        synchronize(device)
        return (time.perf_counter() - began) / counts[1]

    return block


class InTurn:
    """Called after each step of the trainer: after a block of them it notes their time, and lets the others run."""

    def __init__(self, device: torch.device, others: dict[str, Callable[[], float]], counts: tuple[int, int]) -> None:
        self.found: dict[str, list[float]] = {name: [] for name in ("shoal", *others)}
        self._device, self._others, self._counts, self._steps, self._began = device, others, counts, 0, 0.0

    def __call__(self, record: StepRecord, slowest_rank: int) -> None:
        uncounted, counted = self._counts
        self._steps += 1
        if self._steps == uncounted:
            synchronize(self._device)
            self._began = time.perf_counter()
        elif self._steps == uncounted + counted:
            synchronize(self._device)
            self.found["shoal"].append((time.perf_counter() - self._began) / counted)
            for name, block in self._others.items():
                self.found[name].append(block())
            self._steps = 0


def measure(
    job: shoal.Job,
    half: bool,
    turns: int,
    counts: tuple[int, int],
    *,
    others: Sequence[str] = ("eager",),
    execution: Mapping[str, Any] | None = None,
    notes: list[str] | None = None,
) -> dict[str, list[float]]:
    """Seconds of a step in each turn by loop; the first turn, in which kernels are compiled, is left out.

    `others`: the bare loops. `execution`: keys of that section of the plan. `notes` is given the run's.
    """
    base = shoal.Plan().with_sections(execution=dict(execution or {}))
    wished = apply_wishes(base, Wishes(precision="bf16" if half else None), from_file=False)
    plan, note = judged(job, wished).plan, notes.append if notes is not None else lambda text: None
    with tempfile.TemporaryDirectory() as folder, open_mesh(Environment(), plan.degrees) as mesh:
        loops = {name: bare(job, mesh.device, half, name == "compiled", counts) for name in others}
        engine = build(job, plan, mesh, Options(Path(folder)))
        writer = RecordWriter(Path(folder) / "records.jsonl")
        on_step = InTurn(mesh.device, loops, counts)
        num_steps = (turns + 1) * sum(counts)
        engine.trainer(None, num_steps, Surroundings(note, on_step, lambda: False), writer).train()
        writer.close()
        engine.close()
    return {name: seconds[1:] for name, seconds in on_step.found.items()}


def flops(job: shoal.Job) -> float | None:
    """Of a sample of the GPT: 6 a parameter and token, but for positions, and 12 of attention; None of other jobs."""
    model = job.model()
    if not isinstance(model, GPT2):
        return None
    positions, width = model.positions.weight.shape
    counted = sum(p.numel() for p in model.parameters()) - positions * width
    return positions * (6.0 * counted + 12.0 * len(model.blocks) * positions * width)


def figures(job: shoal.Job, found: dict[str, list[float]], peak: float | None) -> dict[str, Any]:
    """Medians by loop, and shoal's step over each other's within a turn."""
    steps = {name: statistics.median(seconds) for name, seconds in found.items()}
    answer: dict[str, Any] = {
        "step_milliseconds": {name: round(seconds * 1e3, 4) for name, seconds in steps.items()},
        "samples_per_second": {name: round(job.global_batch / seconds, 1) for name, seconds in steps.items()},
        "ratio": {
            f"shoal / {name}": round(
                statistics.median(a / b for a, b in zip(found["shoal"], found[name], strict=True)), 4
            )
            for name in found
            if name != "shoal"
        },
    }
    needed = flops(job)
    if needed is not None:
        length = job.train_data().tensors[0].shape[1]
        answer["tokens_per_second"] = {n: round(job.global_batch * length / s) for n, s in steps.items()}
        if peak is not None:
            answer["share_of_peak"] = {n: round(job.global_batch * needed / s / peak, 4) for n, s in steps.items()}
    return answer


def measured(
    job: shoal.Job,
    half: bool,
    turns: int,
    steps: int,
    others: Sequence[str],
    execution: Mapping[str, Any],
    peak: float | None,
) -> dict[str, Any]:
    """What is told of a plan: its figures and what the run has said, or why it is refused."""
    notes: list[str] = []
    try:
        found = measure(job, half, turns, (max(2, steps // 5), steps), others=others, execution=execution, notes=notes)
    except PlanError as error:
        return {"refused": str(error.conflict)}
    return {**figures(job, found, peak), "said": notes}


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=list(JOBS), default="lenet")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=50, help="counted steps of a block; a fifth of them before, uncounted"
    )
    parser.add_argument("--tiny", action="store_true", help="two steps of a tiny model: whether it runs at all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    turns, steps = (1, 2) if options.tiny else (options.turns, options.steps)
    job, half = JOBS[options.job](options.tiny), options.job == "gpt"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"job": options.job, "tiny": options.tiny, "device": name, "torch": torch.__version__}
    answer: dict[str, Any] = {**about, "batch": job.global_batch}
    peak = cluster("here").device.flops.get("bfloat16") if torch.cuda.is_available() else None
    for plan, (execution, others) in PLANS.items():
        answer[plan] = found = measured(job, half, turns, steps, others, execution, peak)
        print(plan, json.dumps(found, indent=2), flush=True)
        if options.out:
            options.out.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
