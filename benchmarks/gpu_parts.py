"""Claim: none yet: the questions that a GPU is to answer, most wanted first, each as parts of two minutes at most.

Repeat with `scripts/gpu`, which runs each part in a process of its own: `python -m benchmarks.gpu_parts NAME OUT.json`.
A part writes its numbers as they come, so that they are there where it is ended. `--dry` runs it in tiny on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shoal
from benchmarks.gpu_step import (
    PEERS,
    Loop,
    bert,
    blocks,
    flops,
    gpt2,
    lenet,
    llama,
    plain,
    resnet18,
    synchronize,
    trained,
    vit,
)
from shoal.errors import PlanError
from shoal.hardware import cluster
from shoal.planner.profile.profiles import profile
from shoal.plans.plan import Layout, Plan, PrecisionSection, ShardSection, plan_text

ROOT = Path(__file__).resolve().parents[1]
LONGEST_SECONDS = 120


@dataclass
class Found:
    """What a part has found so far; its file has it at every moment. `satisfied` is by condition, None in a dry run."""

    path: Path
    dry: bool
    numbers: dict[str, Any] = field(default_factory=dict)
    satisfied: dict[str, bool | None] = field(default_factory=dict)
    not_run: str = ""  # why

    def put(self, name: str, value: Any) -> None:
        self.numbers[name] = value
        self.write()

    def judge(self, condition: str, holds: bool) -> None:
        self.satisfied[condition] = None if self.dry else holds
        self.write()

    def write(self) -> None:
        found = {"numbers": self.numbers, "satisfied": self.satisfied, "not_run": self.not_run}
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(found))
        aside.replace(self.path)

    def command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A Python command that has ended."""
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.dry else {}
        command, environment = [sys.executable, *words], {**os.environ, **hidden, **variables}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Part:
    """A question's part with its time limit; `row` is the question's number."""

    name: str
    row: int
    satisfied_by: str
    seconds: int
    run: Callable[[Found], None]


Jobs = Callable[[bool], shoal.Job]
SHOAL = {"shoal": {}, "shoal captured": {"cuda_graph": True}, "shoal compiled": {"compile": "default"}}


def milliseconds(found: Found, name: str, job: shoal.Job, loop: Loop, turns: int = 3, steps: int = 20) -> float:
    """The median step of a loop, noted with what goes with it; infinite where it could not be measured."""
    turns, steps = (1, 2) if found.dry else (turns, steps)
    notes, gpu, began = list[str](), torch.cuda.is_available(), time.perf_counter()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = blocks(job, loop, turns, steps, notes)
    except Exception as error:
        said = error.conflict if isinstance(error, PlanError) else str(error)
        found.put(name, {"failed": f"{type(error).__name__}: {said}"[:300]})
        return float("inf")
    finally:
        torch._dynamo.reset()
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    step = statistics.median(seconds)
    told: dict[str, Any] = {
        "milliseconds": round(step * 1e3, 4),
        "spread": round(max(seconds) / min(seconds) - 1, 3),
        "samples_per_second": round(job.global_batch / step, 1),
        "whole_seconds": round(time.perf_counter() - began, 1),
    }
    needed = flops(job)
    if needed is not None:
        told["tokens_per_second"] = round(told["samples_per_second"] * job.train_data().tensors[0].shape[1])
    if gpu:
        told["memory_gibibytes"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        peak = cluster("here").device.flops.get("bfloat16")
        if needed is not None and peak and loop.half:
            told["share_of_peak"] = round(job.global_batch * needed / step / peak, 4)
    found.put(name, told | ({"said": notes} if notes else {}))
    return step * 1e3


def loops(
    found: Found,
    make: Jobs,
    half: bool = False,
    *,
    most_milliseconds: float | None = None,
    least_tokens: float | None = None,
    steps: int = 20,
) -> None:
    """shoal's default beside its peers, then shoal's other ways; the first peer again at the end shows a drift."""
    job = make(found.dry)
    measure = partial(milliseconds, found, job=job, steps=steps)
    own = measure("shoal", loop=Loop(half=half))
    peers = [measure(name, loop=Loop(name, half)) for name in PEERS]
    found.judge("shoal takes 1.02 of the best peer at most", own <= 1.02 * min(peers))
    if most_milliseconds is not None:
        found.judge(f"shoal's step takes {most_milliseconds} ms at most", own <= most_milliseconds)
    if least_tokens is not None:
        tokens = found.numbers["shoal"].get("tokens_per_second", 0)
        found.judge(f"shoal trains {least_tokens / 1e3:g}k tokens/s at least", tokens >= least_tokens)
    for name in [] if found.dry else ["shoal captured", "shoal compiled"]:
        measure(name, loop=Loop(half=half, execution=SHOAL[name]))
    measure("eager again", loop=Loop("eager", half))


def tests(found: Found) -> None:
    words = ("--collect-only",) if found.dry else ("-n", "4")
    done = found.command("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "tests/gpu", *words)
    found.put("pytest", done.stdout[-3000:])
    found.judge("all pass", done.returncode == 0)
    if done.returncode:
        raise SystemExit(done.returncode)


def formats(found: Found, half: bool) -> None:
    """ResNet-18 with channels first and last, and with one grain and eight."""
    job, own = resnet18(found.dry), dict[tuple[int, bool], float]()
    for grains, last in product((1, 8), (False, True)):
        name = f"shoal, {grains} grain{'s' * (grains > 1)}, channels {'last' if last else 'first'}"
        own[grains, last] = milliseconds(found, name, replace(job, grains=grains), Loop("", half, last))
    found.judge("channels last is 1.25 times as fast", 1.25 * own[8, True] <= own[8, False])
    best = {grains: min(own[grains, False], own[grains, True]) for grains in (1, 8)}
    found.judge("8 grains take 1.05 of one at most", best[8] <= 1.05 * best[1])
    for peer, last in product(PEERS, (False, True)):
        milliseconds(found, f"{peer}, channels {'last' if last else 'first'}", job, Loop(peer, half, last), steps=10)


def launches(found: Found) -> None:
    """Kernels that three steps start, as the profiler sees them, beside those that the planner counts on a CPU."""
    for name, make, half in (("lenet", lenet, False), ("resnet18", resnet18, False), ("gpt2", gpt2, True)):
        job = make(found.dry)
        counted = counted_launches(job, half)
        told: dict[str, Any] = {"counted on the CPU": counted}
        for way, loop in {"eager": Loop("eager", half), "shoal": Loop(half=half)}.items():
            kernels, longest = traced(job, loop)
            told[way] = {"launches": kernels, "longest": longest}
        found.put(name, told)
        found.judge(f"{name}: launches as counted, within 5 %", abs(told["shoal"]["launches"] / counted - 1) <= 0.05)


def counted_launches(job: shoal.Job, half: bool) -> int:
    """Kernels of a plain step, traced without values."""
    tensors = job.train_data().tensors
    precision = PrecisionSection(compute="bfloat16" if half else "float32")
    own = profile(job.model, job.loss, lambda n: [t[:n] for t in tensors], precision=precision, optimizer=job.optimizer)
    return own.optimizer_launches + sum(o.launches for unit in own.units for o in unit.body.operations)


def traced(job: shoal.Job, loop: Loop, first: int = 6, steps: int = 3) -> tuple[float, dict[str, float]]:
    """Kernels of a step, and of the longest ones the microseconds; on a CPU operators stand for them."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    kinds = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if gpu else [])])

    def after(number: int) -> None:
        if number == first:
            synchronize(device)
            profiler.start()
        elif number == first + steps:
            synchronize(device)
            profiler.stop()

    if loop.peer:
        step = plain(job, device, loop)
        for number in range(1, first + steps + 1):
            step()
            after(number)
    else:
        trained(job, first + steps + 2, loop, lambda record, rank: after(record.step), [])
    wanted = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    others = ("Memcpy", "Memset")
    seen = [e for e in profiler.events() if e.device_type == wanted and not getattr(e, "is_user_annotation", False)]
    events = [event for event in seen if not event.name.startswith(others)]
    taken = Counter[str]()
    for event in events:
        taken[event.name[:120]] += event.device_time if gpu else event.self_cpu_time_total
    return len(events) / steps, {name: round(value / steps, 1) for name, value in taken.most_common(8)}


def group_of_one(found: Found) -> None:
    """A group of one rank: a sum in a graph, replayed, and all of it destroyed; then nodes of an eager step, kept."""
    began, gpu = time.perf_counter(), torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    store = dist.HashStore()
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=0, world_size=1)
    total = torch.ones(1 << 20, device=device)
    dist.all_reduce(total)
    if gpu:
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(total)
        for _ in range(10):
            graph.replay()
        synchronize(device)
        del graph
        dist.barrier()
    dist.destroy_process_group()
    found.put("seconds", round(time.perf_counter() - began, 2))
    found.judge("capture, replay and destroy end in 30 s", time.perf_counter() - began <= 30)
    chosen = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    found.put("set_override_stale_capture_stream", "there" if chosen else f"not in torch {torch.__version__}")
    for way in ("as it is", *(["overridden"] if chosen else [])):
        with contextlib.ExitStack() as stack:
            if way == "overridden" and chosen is not None:
                chosen(True)
                stack.callback(chosen, False)
            found.put(f"stale streams, {way}", stale_streams(device))


def stale_streams(device: torch.device) -> str:
    """A capture after an eager step whose gradient nodes a hook keeps alive."""
    model = torch.nn.Linear(8, 8, device=device)
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
    x = torch.ones(4, 8, device=device)
    model(x).sum().backward()
    if device.type != "cuda":
        return f"no capture on a CPU; {len(nodes)} nodes"
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x).sum().backward()
        graph.replay()
        synchronize(device)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "captured and replayed"


LAYOUTS = {
    "data": Plan(layout=Layout(data=2)),
    "ZeRO-1": Plan(layout=Layout(shard=2), shard=ShardSection(level="optimizer")),
    "ZeRO-2": Plan(layout=Layout(shard=2), shard=ShardSection(level="gradients")),
    "ZeRO-3": Plan(layout=Layout(shard=2), shard=ShardSection(level="parameters")),
    "tensor": Plan(layout=Layout(tensor=2)),
    "pipeline": Plan(layout=Layout(pipeline=2)),
}


def layouts(found: Found) -> None:
    """Two ranks: `shoal verify` of each layout."""
    if not found.dry and torch.cuda.device_count() < 2:
        found.not_run = "shoal starts one rank a GPU at most, over NCCL; two Gloo ranks on one GPU it does not have yet"
        found.write()
        return
    sizes = [w for s in ("batch=8", "layers=2", "width=32", "block=16", "dropout=0.0") for w in ("--set", s)]
    for name, plan in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.toml"
            file.write_text(plan_text(plan))
            words = ("verify", "examples/gpt.py", *sizes, "--plan", str(file), "--out", str(Path(folder) / "out"))
            began, done = time.perf_counter(), found.command("-m", "shoal", *words)
        found.put(name, {"code": done.returncode, "seconds": round(time.perf_counter() - began, 1)})
        if done.returncode:
            found.put(f"{name} said", done.stderr[-500:])
        found.judge(f"{name}: verified", done.returncode == 0)


def compile_seconds(found: Found, own: bool) -> None:
    """The first steps of GPT-2 compiled, in a new process with an empty cache of kernels, and in one with that."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        places = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for way in ("cold", "cached"):
            dry = ("--dry",) if found.dry else ()
            words = ("-m", "benchmarks.gpu_parts", f"first steps, {'shoal' if own else 'compiled'}")
            done = found.command(*words, f"{folder}/{way}.json", *dry, **places)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            told = json.loads(Path(f"{folder}/{way}.json").read_text())["numbers"]
            seconds[way] = told.get("seconds", float("inf"))
            found.put(way, told)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        found.put("cache_mebibytes", round(sum(path.stat().st_size for path in files) / 2**20, 2))
    found.judge("cold in 60 s", seconds["cold"] <= 60)
    found.judge("cached in 10 s", seconds["cached"] <= 10)


def first_steps(found: Found, own: bool) -> None:
    """Seconds of the first two steps, the second of which is known to compile nothing; not a part of its own."""
    job, began = gpt2(found.dry), time.perf_counter()
    if own:
        trained(job, 2, Loop(half=True, execution=SHOAL["shoal compiled"]), lambda record, rank: None, [])
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        step = plain(job, device, Loop("compiled", True))
        step()
        step()
        synchronize(device)
    found.put("seconds", round(time.perf_counter() - began, 2))


def missing(why: str, found: Found) -> None:
    found.not_run = why
    found.write()


def of_gpt2(batch: int, tokens: int, least: float) -> Part:
    make = partial(gpt2, batch=batch, tokens=tokens)
    run = partial(loops, make=make, half=True, least_tokens=least, steps=max(3, 160 // batch))
    asked = f"1.02 of the best; {least / 1e3:g}k tok/s"
    return Part(f"gpt2, {batch} x 1024, {tokens} tokens", 4, asked, LONGEST_SECONDS, run)


def of_loops(name: str, row: int, asked: str, seconds: int, make: Jobs, half: bool, **bounds: Any) -> Part:
    return Part(name, row, asked, seconds, partial(loops, make=make, half=half, **bounds))


FORMATS = "channels last 1.25x; 8 grains 1.05 of one"
COMPILES = "cold 60 s; cached 10 s"
FLOAT8 = "shoal has no float8: [precision] compute is float32, bfloat16 or float16"
PARTS = (
    Part("tests", 1, "all pass", 100, tests),
    of_loops("lenet", 2, "1.02 of the best; 0.64 ms", 80, lenet, False, most_milliseconds=0.64, steps=50),
    of_loops("resnet18", 2, "1.02 of the best; 4.3 ms", 110, resnet18, False, most_milliseconds=4.3),
    Part("resnet18, formats in TF32", 3, FORMATS, LONGEST_SECONDS, partial(formats, half=False)),
    Part("resnet18, formats in bf16", 3, FORMATS, LONGEST_SECONDS, partial(formats, half=True)),
    of_gpt2(16, 50_257, 354e3),
    of_gpt2(64, 50_304, 463e3),
    of_gpt2(16, 50_304, 354e3),
    of_gpt2(64, 50_257, 463e3),
    Part("launches", 5, "as counted on CPUs, 5 %", 100, launches),
    Part("nccl group of one", 6, "ends in 30 s", 60, group_of_one),
    Part("two ranks", 7, "`verify` passes", LONGEST_SECONDS, layouts),
    Part("compile, a plain loop", 8, COMPILES, LONGEST_SECONDS, partial(compile_seconds, own=False)),
    Part("compile, shoal", 8, COMPILES, LONGEST_SECONDS, partial(compile_seconds, own=True)),
    of_loops("llama 1b", 9, "1.02 of the best; 42k tok/s", LONGEST_SECONDS, llama, True, least_tokens=42e3, steps=4),
    of_loops("vit-s", 10, "1.02 of the best", 110, vit, True, steps=10),
    of_loops("bert-base", 10, "1.02 of the best", 110, bert, True, steps=10),
    Part("float8", 11, "1.1x, else dropped", 10, partial(missing, FLOAT8)),
)
_WITHIN = {
    "first steps, compiled": partial(first_steps, own=False),
    "first steps, shoal": partial(first_steps, own=True),
}


def main() -> None:
    """Runs a part and writes what it finds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*_WITHIN, *(part.name for part in PARTS)])
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    run = {part.name: part.run for part in PARTS} | _WITHIN
    run[options.name](Found(options.out, options.dry))


if __name__ == "__main__":
    main()
