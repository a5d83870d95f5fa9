"""Claim: none yet: the questions that a GPU is to answer, most wanted first, each as parts of two minutes at most.

Repeat with `scripts/gpu`, which runs each part in a process of its own: `python -m benchmarks.gpu_parts NAME OUT.json`.
A part writes its numbers as they come, so that they are there where it is ended. `--dry` runs it in tiny on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shoal
from benchmarks import gpu_step
from benchmarks.gpu_float8 import with_float8
from benchmarks.gpu_step import (
    MODES,
    PEERS,
    Loop,
    execution,
    flops,
    gpt2,
    plain,
    plain_blocks,
    run_blocks,
    synchronize,
    trained,
)
from shoal.errors import ShoalError
from shoal.hardware.detect import kind_of
from shoal.planner.answer.answer import question
from shoal.planner.answer.outlook import Case
from shoal.planner.profile.profiles import profile
from shoal.plans.plan import Plan, PrecisionSection
from shoal.runs.directory import read_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
LONGEST_SECONDS = 120
_DRY_PEERS = ("eager", "compiled", "graph", "fabric")  # on a CPU the other one is "compiled" again
_LEFT_SECONDS = 15.0  # what a loop needs at least
_BY_HAND = ", by hand"


@dataclass
class Found:
    """What a part has found so far; its file has it at every moment. `satisfied` is by condition, None in a dry run."""

    path: Path
    dry: bool
    seconds: float = LONGEST_SECONDS  # until the part is ended
    numbers: dict[str, Any] = field(default_factory=dict)
    satisfied: dict[str, bool | None] = field(default_factory=dict)
    not_run: str = ""  # why
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds * (6 if self.dry else 1) - (time.monotonic() - self.began)

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
class Net:
    """A job function of `gpu_step` with its settings, in a precision."""

    name: str
    half: bool = False
    settings: Mapping[str, int] = field(default_factory=dict)

    def job(self, dry: bool) -> shoal.Job:
        job: shoal.Job = getattr(gpu_step, self.name)(dry, **self.settings)
        return job

    def words(self, dry: bool) -> tuple[str, ...]:
        """What `shoal run` is given."""
        return (self.name, f"dry={str(dry).lower()}", *(f"{name}={value}" for name, value in self.settings.items()))


@dataclass(frozen=True)
class Part:
    """A question's part with its time limit; `row` is the question's number. `net`: whose loops it compares."""

    name: str
    row: int
    satisfied_by: str
    seconds: int
    run: Callable[[Found], None]
    net: Net | None = None

    @property
    def file(self) -> str:
        """The file of its record."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.name.lower()).split()) + ".json"


class Forecast:
    """What the planner expects of a net on this device, and the device's peak."""

    def __init__(self, net: Net, job: shoal.Job) -> None:
        self._net, self._job = net, job

    @cached_property
    def case(self) -> Case:
        """The planner's input."""
        kind = kind_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        compute = "bfloat16" if self._net.half else "float32"
        plan = Plan().with_sections(precision={"compute": compute})
        return question(self._job, plan, f"1x{kind}" if kind else "here", 1).case

    def milliseconds(self, mode: str) -> float:
        """Of a step in a mode."""
        plan = self.case.space.base.with_sections(execution=execution(mode))
        case = replace(self.case, space=replace(self.case.space, base=plan))
        return case.predictor.predict(plan).step_seconds * 1e3

    def share_of_peak(self, step: float) -> float | None:
        """Of the tensor cores, at so many seconds a step; None where their peak is not known."""
        peak = self.case.cluster.device.flops.get("bfloat16" if self._net.half else "tf32")
        batch = self._job.global_batch
        needed = flops(self._job)
        total = self.case.work.profile.flops(batch) if needed is None else batch * needed
        return round(total / step / peak, 4) if peak else None


def milliseconds(found: Found, name: str, net: Net, loop: Loop, *, steps: int = 20, turns: int = 3) -> float:
    """The median step of a loop, noted with what goes with it; infinite where it could not be measured."""
    if loop.name == "fabric" and importlib.util.find_spec("lightning_fabric") is None:
        found.put(name, {"left out": "lightning_fabric is not installed"})
        return float("inf")
    if found.left < _LEFT_SECONDS:
        found.put(name, {"left out": f"{found.left:.0f} s were left"})
        return float("inf")
    turns, steps = (1, 2) if found.dry else (turns, steps)
    job, gpu, began, about = net.job(found.dry), torch.cuda.is_available(), time.perf_counter(), dict[str, Any]()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        if loop.name in MODES:
            seconds, about = run_blocks(net.words(found.dry), loop, turns, steps, found.left - 5)
        else:
            seconds = plain_blocks(job, loop, turns, steps)
            if gpu:
                about["memory_gibibytes"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    except Exception as error:
        found.put(name, {"failed": f"{type(error).__name__}: {error}"[:600]})
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
    if flops(job) is not None:
        told["tokens_per_second"] = round(told["samples_per_second"] * job.train_data().tensors[0].shape[1])
    found.put(name, told | {key: value for key, value in about.items() if value})
    return step * 1e3


def by_hand(found: Found, net: Net, steps: int) -> None:
    """Loops without shoal; the first one's second turn shows a drift."""
    for name in _DRY_PEERS if found.dry else (*PEERS, "eager again"):
        milliseconds(found, name, net, Loop(name.removesuffix(" again"), net.half), steps=steps)


def by_shoal(
    found: Found, net: Net, steps: int, *, most_milliseconds: float | None = None, least_tokens: float | None = None
) -> None:
    """shoal's default, then each of its step modes, after the planner's word; what does not fit into the time says so.

    The default is compared with the record of the loops by hand.
    """
    forecast, expected, peers = Forecast(net, net.job(found.dry)), dict[str, float](), peers_of(found, net)
    try:
        expected = {name: round(forecast.milliseconds(mode), 4) for name, mode in MODES.items()}
        found.put("predicted", expected)
        found.put("shares of the peak by hand", {name: forecast.share_of_peak(ms / 1e3) for name, ms in peers.items()})
    except ShoalError as error:
        found.put("predicted", {"failed": f"{type(error).__name__}: {error}"[:300]})
    best = min(peers.values(), default=None)
    for name in ["shoal"] if found.dry else MODES:
        own = milliseconds(found, name, net, Loop(name, net.half), steps=steps)
        told = found.numbers[name]
        if own < float("inf") and expected:
            mode = str(told.get("chosen", "")).partition(",")[0]
            predicted = expected.get(f"shoal {mode}", expected[name])
            found.put(name, told | {"prediction_error": round(predicted / own - 1, 3)})
            found.put(name, found.numbers[name] | {"share_of_peak": forecast.share_of_peak(own / 1e3)})
        if name != "shoal":
            continue
        if most_milliseconds is not None:
            found.judge(f"shoal's step takes {most_milliseconds} ms at most", own <= most_milliseconds)
        if least_tokens is not None:
            tokens = told.get("tokens_per_second", 0)
            found.judge(f"shoal trains {least_tokens / 1e3:g}k tokens/s at least", tokens >= least_tokens)
        if best is not None:
            found.put("of the best by hand", round(own / best, 3))
            found.judge("shoal takes 1.02 of the best by hand at most", own <= 1.02 * best)


def peers_of(found: Found, net: Net) -> dict[str, float]:
    """Milliseconds of a net's loops by hand, from the record of their part."""
    part = next(part for part in PARTS if part.net == net and part.name.endswith(_BY_HAND))
    numbers = (read_json(found.path.with_name(part.file)) or {}).get("numbers", {})
    known = {name: numbers.get(name, {}).get("milliseconds") for name in PEERS}
    return {name: value for name, value in known.items() if value}


def tests(found: Found) -> None:
    """Those of one GPU; the layouts of several ranks are parts of their own."""
    tested(found, "tests/gpu", "--ignore", "tests/gpu/test_layouts.py")


def tested(found: Found, *words: str) -> None:
    """Runs tests, or in a dry run collects them."""
    how = ("--collect-only",) if found.dry else ("-n", "6", "-ra", "--durations=20")
    done = found.command("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *words, *how)
    found.put("pytest", done.stdout[-3000:])
    found.judge("all pass", done.returncode == 0)
    if done.returncode:
        raise SystemExit(done.returncode)


def formats(found: Found, half: bool) -> None:
    """ResNet-18 with channels first and last, and with one grain and eight."""
    own = dict[tuple[int, bool], float]()
    for grains, last in [(8, True)] if found.dry else product((1, 8), (False, True)):
        name = f"shoal, {grains} grain{'s' * (grains > 1)}, channels {'last' if last else 'first'}"
        net = Net("resnet18", half, {"grains": grains})
        own[grains, last] = milliseconds(found, name, net, Loop("shoal", half, last))
    if found.dry:
        return
    found.judge("channels last is 1.25 times as fast", 1.25 * own[8, True] <= own[8, False])
    best = {grains: min(own[grains, False], own[grains, True]) for grains in (1, 8)}
    found.judge("8 grains take 1.05 of one at most", best[8] <= 1.05 * best[1])
    for peer, last in product(("eager", "compiled"), (False, True)):
        name = f"{peer}, channels {'last' if last else 'first'}"
        milliseconds(found, name, Net("resnet18", half), Loop(peer, half, last), steps=10)


def launches(found: Found) -> None:
    """Kernels that three steps start, as the profiler sees them, beside those that the planner counts on a CPU."""
    for net in (Net("lenet"), Net("resnet18"), Net("gpt2", half=True)):
        job = net.job(found.dry)
        counted = counted_launches(job, net.half)
        told: dict[str, Any] = {"counted on the CPU": counted}
        for way in ("eager", "shoal eager"):
            told[way], _ = traced(job, Loop(way, net.half))
        found.put(net.name, told)
        close = abs(told["shoal eager"] / counted - 1) <= 0.05
        found.judge(f"{net.name}: launches as counted, within 5 %", close)


def worst(found: Found) -> None:
    """The longest kernels of the net whose default is furthest from its best peer, beside that peer's."""
    ratios = dict[str, tuple[float, Net, str, str]]()
    for part in PARTS:
        numbers = (read_json(found.path.with_name(part.file)) or {}).get("numbers", {})
        own, peers = numbers.get("shoal", {}).get("milliseconds"), peers_of(found, part.net) if part.net else {}
        if part.net is not None and own and peers:
            best = min(peers, key=lambda name: peers[name])
            mode = str(numbers["shoal"].get("chosen", "eager")).partition(",")[0]
            ratios[part.name] = own / peers[best], part.net, best, f"shoal {mode}"
    if not ratios:
        found.not_run = "no part before it has a record here"
        found.write()
        return
    name = max(ratios, key=lambda name: ratios[name][0])
    ratio, net, *ways = ratios[name]
    found.put("of the best by hand", {part: round(one[0], 3) for part, one in ratios.items()})
    for way in ways:
        kernels, longest = traced(net.job(found.dry), Loop(way, net.half), first=12, most=20)
        found.put(f"{name}, {way}", {"launches": kernels, "microseconds": round(sum(longest.values())), **longest})
    found.judge("shoal takes 1.02 of the best peer at most, everywhere", ratio <= 1.02)


def counted_launches(job: shoal.Job, half: bool) -> int:
    """Kernels of a plain step, traced without values."""
    tensors = job.train_data().tensors
    precision = PrecisionSection(compute="bfloat16" if half else "float32")
    own = profile(job.model, job.loss, lambda n: [t[:n] for t in tensors], precision=precision, optimizer=job.optimizer)
    return own.optimizer_launches + sum(o.launches for unit in own.units for o in unit.body.operations)


def traced(job: shoal.Job, loop: Loop, first: int = 6, steps: int = 3, most: int = 8) -> tuple[float, dict[str, float]]:
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

    if loop.name in PEERS:
        step = plain(job, device, loop)
        for number in range(1, first + steps + 1):
            step()
            after(number)
    else:
        trained(job, first + steps + 2, loop, lambda record, rank: after(record.step))
    wanted = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    others = ("Memcpy", "Memset")
    seen = [e for e in profiler.events() if e.device_type == wanted and not getattr(e, "is_user_annotation", False)]
    events = [event for event in seen if not event.name.startswith(others)]
    taken = Counter[str]()
    for event in events:
        taken[event.name[:120]] += event.device_time if gpu else event.self_cpu_time_total
    return len(events) / steps, {name: round(value / steps, 1) for name, value in taken.most_common(most)}


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


def layouts(found: Found, which: str, least_gpus: int = 1) -> None:
    """`shoal verify` of each layout of two or four ranks, which share one GPU over Gloo or have one each over NCCL."""
    if not found.dry and torch.cuda.device_count() < least_gpus:
        found.not_run = f"{least_gpus} GPUs are needed, and torch sees {torch.cuda.device_count()}"
        found.write()
        return
    tested(found, "tests/gpu/test_layouts.py", "-k", which)


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
        trained(job, 2, Loop("shoal compiled", half=True), lambda record, rank: None)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        step = plain(job, device, Loop("compiled", True))
        step()
        step()
        synchronize(device)
    found.put("seconds", round(time.perf_counter() - began, 2))


def float8(found: Found) -> None:
    """A plain compiled loop of Llama 1B, beside one whose blocks multiply in float8 with a scale a tensor."""
    net, taken = Net("llama", half=True), dict[str, float]()
    for way, loop in {"compiled": Loop("compiled", True), "compiled, float8": Loop("compiled", True)}.items():
        job = net.job(found.dry)
        model = job.model
        if "float8" in way:
            job = replace(job, model=lambda model=model: with_float8(model()))
        device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.perf_counter()
        blocks = plain_blocks(job, loop, *((1, 2) if found.dry else (3, 4)))
        taken[way] = statistics.median(blocks)
        found.put(
            way, {"milliseconds": round(taken[way] * 1e3, 3), "whole_seconds": round(time.perf_counter() - began, 1)}
        )
        torch._dynamo.reset()
        gc.collect()
        synchronize(device)
    found.judge("float8 is 1.1 times as fast", 1.1 * taken["compiled, float8"] <= taken["compiled"])


def of_net(name: str, row: int, seconds: int, net: Net, steps: int, **bounds: Any) -> tuple[Part, Part]:
    """The loops of a net by hand, and shoal's, whose conditions are the net's goals."""
    goals = ["1.02 of the best"]
    if "most_milliseconds" in bounds:
        goals.append(f"{bounds['most_milliseconds']} ms")
    if "least_tokens" in bounds:
        goals.append(f"{bounds['least_tokens'] / 1e3:g}k tok/s")
    hand = Part(name + _BY_HAND, row, "", seconds, partial(by_hand, net=net, steps=steps), net)
    run = partial(by_shoal, net=net, steps=steps, **bounds)
    return hand, Part(name, row, "; ".join(goals), seconds, run, net)


def of_gpt2(batch: int, tokens: int, least: float) -> tuple[Part, Part]:
    net = Net("gpt2", half=True, settings={"batch": batch, "tokens": tokens})
    name, steps = f"gpt2, {batch} x 1024, {tokens} tokens", max(3, 160 // batch)
    return of_net(name, 4, LONGEST_SECONDS, net, steps, least_tokens=least)


FORMATS = "channels last 1.25x; 8 grains 1.05 of one"
VERIFIES = "`verify` passes"
COMPILES = "cold 60 s; cached 10 s"
# Most wanted first: the first seven fit into ten minutes, the next three into five more; then the questions in order.
PARTS = (
    Part("tests", 1, "all pass", 100, tests),
    *of_net("lenet", 2, 60, Net("lenet"), 400, most_milliseconds=0.64),
    *of_net("resnet18, bf16", 2, 90, Net("resnet18", half=True), 50, most_milliseconds=4.3),
    *of_gpt2(64, 50_304, 463e3)[:1],
    Part("nccl group of one", 6, "ends in 30 s", 45, group_of_one),
    *of_gpt2(64, 50_304, 463e3)[1:],
    Part("kernels of the worst", 5, "1.02 of the best everywhere", 100, worst),
    Part("launches", 5, "as counted on CPUs, 5 %", 60, launches),
    *of_net("resnet18, TF32", 2, 90, Net("resnet18"), 50),
    Part("resnet18, formats in TF32", 3, FORMATS, LONGEST_SECONDS, partial(formats, half=False)),
    Part("resnet18, formats in bf16", 3, FORMATS, LONGEST_SECONDS, partial(formats, half=True)),
    *of_gpt2(16, 50_257, 354e3),
    *of_gpt2(16, 50_304, 354e3),
    *of_gpt2(64, 50_257, 463e3),
    Part("two ranks on a gpu", 7, VERIFIES, LONGEST_SECONDS, partial(layouts, which="share_one_gpu and 2-ranks")),
    Part("four ranks on a gpu", 7, VERIFIES, LONGEST_SECONDS, partial(layouts, which="share_one_gpu and 4-ranks")),
    Part("ranks over nccl", 7, VERIFIES, LONGEST_SECONDS, partial(layouts, which="gpu_each or nccl", least_gpus=2)),
    Part("compile, a plain loop", 8, COMPILES, LONGEST_SECONDS, partial(compile_seconds, own=False)),
    Part("compile, shoal", 8, COMPILES, LONGEST_SECONDS, partial(compile_seconds, own=True)),
    *of_net("llama 1b", 9, LONGEST_SECONDS, Net("llama", half=True), 4, least_tokens=42e3),
    *of_net("vit-s", 10, LONGEST_SECONDS, Net("vit", half=True), 10),
    *of_net("bert-base", 10, LONGEST_SECONDS, Net("bert", half=True), 10),
    Part("float8", 11, "1.1x, else dropped", LONGEST_SECONDS, float8),
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
    seconds = {part.name: part.seconds for part in PARTS}
    run[options.name](Found(options.out, options.dry, seconds.get(options.name, LONGEST_SECONDS)))


if __name__ == "__main__":
    main()
