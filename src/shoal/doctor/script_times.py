"""Times of a training script's steps, from the clocks and profiles of its ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import mean, pstdev
from typing import Any

from shoal.doctor.read_backs import divided
from shoal.doctor.run_times import Periodic, RankSpread, RunTimes

# Parts of a step, in words; on a GPU the second one is that of kernels.
PARTS = {
    "data": "waiting for data",
    "kernels": "operators",
    "host": "Python of the host",
    "communication": "exposed communication",
    "optimizer": "optimizer",
    "evaluation": "evaluations",
    "checkpoint": "checkpoints",
}
REGIONS = {"backward": ("backward",), "optimizer": ("optimizer", "zero"), "rest": ("step", "closure")}
# Namespaces of operators that only contain others or wait for other ranks.
_NO_WORK = ("autograd", "c10d", "_c10d_functional", "_c10d_functional_autograd")
_COMPILED = "## Call CompiledFxGraph"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_REDUCES = ("c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_", "c10d::allreduce_coalesced_")
_COPIES = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
_SYNCHRONIZES = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_WAITS = 50.0  # microseconds: what is shorter is Python between operators
_FEWEST_SAMPLES = 8
_DRY_MICROSECONDS = 20.0  # an idle device this soon after the end of a synchronization waits because of it

Stretch = tuple[float, float]


def joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the union of stretches of time, in order and disjoint."""
    union: list[Stretch] = []
    for began, ended in sorted(stretches):
        if union and began <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], ended))
        else:
            union.append((began, ended))
    return union


def without(union: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return what of disjoint, ordered stretches is in none of the other ones."""
    rest: list[Stretch] = []
    for began, ended in union:
        for place in range(_index(other, began), len(other)):
            if other[place][0] >= ended:
                break
            if other[place][0] > began:
                rest.append((began, other[place][0]))
            began = max(began, other[place][1])
        if began < ended:
            rest.append((began, ended))
    return rest


def both(union: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return what of disjoint, ordered stretches is in the other ones too."""
    return without(union, without(union, other))


def length(union: Sequence[Stretch]) -> float:
    """Return the seconds of disjoint stretches in microseconds."""
    return sum(ended - began for began, ended in union) * 1e-6


@dataclass(frozen=True)
class ProfiledSteps:
    """Means of the steps of a rank's profile, in seconds a step, with the profiler's own cost.

    `operators`, `waits` for collectives and `host`: by region of a step, on the host.
    `waiting` for other ranks, and `busy` otherwise: seconds of each step.
    `device`: seconds of a GPU by what it did, empty on a CPU.
    """

    steps: int = 0
    operators: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, float] = field(default_factory=dict)
    busy: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    device: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)


def profiled_steps(document: Mapping[str, Any]) -> ProfiledSteps:
    """Return the means of a profile's steps, without its first step, in which the profiler starts."""
    events = [e for e in document.get("traceEvents", ()) if e.get("ph") == "X" and "dur" in e]
    marks: dict[str, list[Stretch]] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("shoal:"):
            marks.setdefault(event["name"].removeprefix("shoal:"), []).append(_stretch(event))
    windows = joined(marks.get("step", ()))[1:]
    if not windows:
        return ProfiledSteps()
    threads = {e["tid"] for e in events if e["name"].startswith(("shoal:step", "autograd::engine::"))}
    on_host = [e for e in events if e.get("cat") == "cpu_op" and e["tid"] in threads]
    operators = joined(_stretch(e) for e in on_host if _works(e["name"]))
    apart = joined(s for name in ("data", "evaluation", "checkpoint", "exchange") for s in marks.get(name, ()))
    sums = joined(_stretch(e) for e in on_host if e["name"].partition("::")[0] in _NO_WORK[1:])
    gaps = without(windows, joined([*operators, *sums, *apart]))
    in_replicas = any("::reducer::" in e["name"] for e in on_host) or any(e["name"] == _COPIES for e in on_host)
    passes = joined(marks.get("backward", ())) if in_replicas else []
    waits = joined([*sums, *_after_sums([gap for gap in gaps if gap[1] - gap[0] >= _WAITS], sums, passes)])
    waits = without(without(waits, operators), apart)
    regions = {name: joined(s for own in spans for s in marks.get(own, ())) for name, spans in REGIONS.items()}
    regions["optimizer"] = without(regions["optimizer"], regions["backward"] + joined(marks.get("closure", ())))
    regions["rest"] = without(windows, joined([*regions["backward"], *regions["optimizer"], *apart]))
    of = {name: both(own, windows) for name, own in regions.items()}
    num = len(windows)
    worked = {name: length(both(operators, own)) / num for name, own in of.items()}
    waited = {name: length(both(waits, own)) / num for name, own in of.items()}
    exchange = joined(marks.get("exchange", ()))
    blocked = joined([*waits, *exchange])
    return ProfiledSteps(
        num,
        worked,
        waited,
        {name: max(0.0, length(own) / num - worked[name] - waited[name]) for name, own in of.items()},
        tuple(length([one]) - length(both([one], blocked)) for one in windows),
        tuple(length(both([one], blocked)) for one in windows),
        _on_device(events, windows, marks),
        _counts(events, on_host, windows, of["rest"], marks.get("backward", ())),
    )


def _after_sums(gaps: Sequence[Stretch], sums: Sequence[Stretch], passes: Sequence[Stretch]) -> list[Stretch]:
    """Return the gaps that follow a collective operator at once, and those after the first one of a backward.

    A backward of replicas waits for their sums in one place, after its last operator.
    """
    begins, ends = [began for began, _ in sums], [ended for _, ended in sums]

    def waits(gap: Stretch) -> bool:
        place, own = bisect_left(ends, gap[0]), _index(passes, gap[1])
        if own < len(passes) and passes[own][0] <= gap[0]:
            first = bisect_left(begins, passes[own][0])
            return first < len(begins) and begins[first] < gap[0]
        return place < len(ends) and ends[place] - gap[0] < 1.0

    return [gap for gap in gaps if waits(gap)]


def _index(union: Sequence[Stretch], moment: float) -> int:
    """Return the index of the first of disjoint, ordered stretches that ends no earlier than a moment."""
    return bisect_left(union, moment, key=itemgetter(1))


def _stretch(event: Mapping[str, Any]) -> Stretch:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _works(name: str) -> bool:
    space, colons, _ = name.partition("::")
    return (bool(colons) and space not in _NO_WORK) or name.startswith(_COMPILED)


def _counts(
    events: Sequence[Mapping[str, Any]],
    on_host: Sequence[Mapping[str, Any]],
    windows: Sequence[Stretch],
    rest: Sequence[Stretch],
    backwards: Sequence[Stretch],
) -> dict[str, float]:
    """Return what happens in a step: operators, sums, backwards that sum gradients, searches, reads of numbers."""

    def inside(event: Mapping[str, Any], union: Sequence[Stretch]) -> bool:
        place = _index(union, event["ts"])
        return place < len(union) and union[place][0] <= event["ts"]

    steps = len(windows)
    passes = joined(backwards)
    sums = [e for e in events if e["name"] in _REDUCES and inside(e, passes) and inside(e, windows)]
    summing = {_index(passes, e["ts"]) for e in sums}
    reading, other = divided(sorted((e for e in on_host if inside(e, rest)), key=lambda e: float(e["ts"])))
    searches = [e for e in events if e["name"] == _SEARCH and inside(e, windows)]
    return {
        "operators": sum(_works(e["name"]) and inside(e, windows) for e in on_host) / steps,
        "compiled": sum(e["name"].startswith(_COMPILED) for e in on_host) / steps,
        "sums": len(sums) / steps,
        "summing_backwards": len(summing) / steps,
        "search_seconds": sum(float(e["dur"]) for e in searches) * 1e-6 / steps,
        "reads": sum(e["name"] == "aten::item" for e in on_host if inside(e, windows)) / steps,
        "read_seconds": reading * 1e-6 / steps,
        "unread_seconds": other * 1e-6 / steps,
    }


def _on_device(
    events: Sequence[Mapping[str, Any]], windows: Sequence[Stretch], marks: Mapping[str, Sequence[Stretch]]
) -> dict[str, float]:
    """Return the seconds a step in which a GPU computes, updates, waits for ranks, data or the host. Empty on a CPU."""
    kernels = [e for e in events if e.get("cat") in _ON_DEVICE]
    if not kernels:
        return {}
    updates = joined(marks.get("optimizer", ()))
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    starts = {e.get("args", {}).get("correlation"): e for e in calls}

    def updates_weights(event: Mapping[str, Any]) -> bool:
        start = starts.get(event.get("args", {}).get("correlation"))
        return start is not None and bool(both([_stretch(start)], updates))

    sums = joined(_stretch(e) for e in kernels if "nccl" in e["name"].lower())
    computing = joined(_stretch(e) for e in kernels if "nccl" not in e["name"].lower())
    optimizer = joined(_stretch(e) for e in kernels if updates_weights(e))
    idle = without(windows, joined([*sums, *computing]))
    data = joined(marks.get("data", ()))
    ends = sorted(_stretch(e)[1] for e in calls if e["name"].startswith(_SYNCHRONIZES))

    def is_dry(gap: Stretch) -> bool:  # a synchronization ends at the begin of a gap: the host has nothing prepared
        place = bisect_left(ends, gap[0])
        return place < len(ends) and ends[place] <= gap[0] + _DRY_MICROSECONDS

    def seconds(choose: Callable[[str], bool]) -> float:
        return length(both(joined(_stretch(e) for e in kernels if choose(e["name"])), windows)) / len(windows)

    own = [e for e in kernels if e.get("cat") == "kernel" and "nccl" not in e["name"].lower()]
    return {
        "kernels": (length(both(computing, windows)) - length(both(optimizer, windows))) / len(windows),
        "optimizer": length(both(optimizer, windows)) / len(windows),
        "communication": length(both(without(sums, computing), windows)) / len(windows),
        "data": length(both(idle, data)) / len(windows),
        "host": length(without(idle, data)) / len(windows),
        "dry": length([gap for gap in without(idle, data) if is_dry(gap)]) / len(windows),
        "synchronizations": sum(bool(both([(end, end + 1e-3)], windows)) for end in ends) / len(windows),
        "pageable": seconds(lambda name: "Pageable -> Device" in name),
        "float32_products": seconds(lambda name: "sgemm" in name or "f32f32" in name),
        "kernel_seconds": mean([float(e["dur"]) * 1e-6 for e in own] or [0.0]),
    }


@dataclass(frozen=True)
class ScriptTimes:
    """Times of a script: `parts` of a mean step for each rank, in seconds, what its clocks noted, and `run` for rules.

    `loop_host`: the host's seconds outside of modules, by rank. `lines`: for each rank, the script's line where most
    samples of a part are, with their share.
    `sizes`: the standard deviation of the elements in a step's batches, over steps and ranks, relative to their mean.
    """

    run: RunTimes
    parts: tuple[Mapping[str, float], ...]
    records: tuple[Mapping[str, Any], ...]
    profiles: tuple[ProfiledSteps, ...]
    steps: int
    under_profiler: bool
    slowest: int
    imbalance: float
    sizes: float
    loop_host: tuple[float, ...]
    lines: tuple[Mapping[str, tuple[str, float]], ...]

    @property
    def on_gpu(self) -> bool:
        """True if the ranks used GPUs."""
        return self.run.device == "gpu"

    def per_step(self, count: str) -> float:
        """Return a count of the clocks, a step and rank."""
        return mean(_mean(record, "counts", count) for record in self.records)

    def span(self, name: str, rank: int | None = None) -> float:
        """Return the seconds of a span of the clocks, a step, of a rank or of their mean."""
        return mean(_mean(one, "seconds", name) for one in (self.records if rank is None else [self.records[rank]]))

    def of_profile(self, count: str) -> float:
        """Return a count of the profiles, a step and rank."""
        return mean(profile.counts.get(count, 0.0) for profile in self.profiles)


def script_times(records: Sequence[Mapping[str, Any]], documents: Sequence[Mapping[str, Any]]) -> ScriptTimes:
    """Return the times of a script from the record and the profile of each rank."""
    profiles = tuple(profiled_steps(document) for document in documents)
    parts = tuple(_parts(record, profile) for record, profile in zip(records, profiles, strict=True))
    steps = min(len(_timed(record)) for record in records)
    exposed = [own["communication"] for own in parts]
    totals = [sum(own.values()) for own in parts]
    busy = [total - wait for total, wait in zip(totals, exposed, strict=True)]
    # Of each step the rank that waits least shows how long the sums take by themselves.
    least = min(exposed)
    waiting = [profile.waiting for profile in profiles]
    if all(waiting) and (shortest := min(mean(one) for one in waiting)):
        least *= mean(min(one) for one in zip(*waiting, strict=False)) / shortest
    by_step = list(zip(*(profile.busy for profile in profiles), strict=False))
    slowest_of = Counter(step.index(max(step)) for step in by_step)
    slowest = busy.index(max(busy))
    often = slowest_of[slowest] / len(by_step) if by_step else 0.0
    first = records[0]
    events = {name: max(own[name] for own in parts) for name in ("evaluation", "checkpoint")}
    every = {name: _every(records[0], name) for name in events}
    step = max(total - sum(own[name] for name in events) for total, own in zip(totals, parts, strict=True))
    optimizer = first["optimizers"][0]
    sums = round(mean(p.counts.get("sums", 0.0) for p in profiles))
    replicas = [one for record in records for one in record["replicas"]]
    on_gpu = first["device"] != "cpu"
    spans = {"data_wait": mean(own["data"] for own in parts), "exposed_communication": mean(exposed)}
    spans |= {"forward": mean(own["kernels"] for own in parts)}
    run = RunTimes(
        num_steps=steps,
        step=step,
        spread=(1.0, 1.0),
        spans=spans,
        undisturbed={"other": step - least},
        ranks={
            "exposed_communication": RankSpread(least, max(exposed)),
            "busy_seconds": RankSpread(min(busy), max(busy), slowest, often),
            "data_wait": RankSpread(min(own["data"] for own in parts), max(own["data"] for own in parts)),
        },
        evaluation=_periodic(events["evaluation"], every["evaluation"]),
        checkpoint=_periodic(events["checkpoint"], every["checkpoint"]),
        world_size=len(records),
        device="gpu" if on_gpu else "cpu",
        threads=first["threads"],
        cores=first["cores"],
        samples=sum(_mean(record, "counts", "rows") for record in records),
        messages=sums if replicas else None,
        message_bytes=optimizer["bytes"],
        reads_compute=_mean(records[slowest], "counts", "data_cpu") > 0.5 * max(own["data"] for own in parts),
        plan={
            "data": {"workers": max((own["workers"] for own in first["loaders"]), default=0)},
            "collectives": {"all_reduce": "shared_memory"},  # which no script has
        },
    )
    elements = [s["counts"].get("elements", 0) for record in records for s in record["steps"]] or [0]
    deviation = pstdev(elements) / mean(elements) if any(elements) else 0.0
    places = [_lines(record, own) for record, own in zip(records, parts, strict=True)]
    imbalance = mean(max(one) - mean(one) for one in by_step) if by_step else 0.0
    return ScriptTimes(
        run,
        parts,
        tuple(records),
        profiles,
        steps,
        all(one["profiled"] for one in _timed(first)),
        slowest,
        imbalance,
        deviation,
        tuple(loop for loop, _ in places),
        tuple(lines for _, lines in places),
    )


def _timed(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the steps after the profile and the one in which it is written; if there are none, the profiled ones."""
    steps: Sequence[Mapping[str, Any]] = record["steps"]
    last = max((place for place, one in enumerate(steps) if one["profiled"]), default=len(steps))
    return steps[last + 2 :] or [one for one in steps if one["profiled"]][1:] or steps


def _mean(record: Mapping[str, Any], kind: str, *names: str) -> float:
    return float(mean(sum(step[kind].get(name, 0.0) for name in names) for step in _timed(record)))


def _every(record: Mapping[str, Any], name: str) -> float | None:
    timed = _timed(record)
    times = sum(name in step["seconds"] for step in timed)
    return len(timed) / times if times else None


def _periodic(per_step: float, every: float | None) -> Periodic:
    return Periodic(per_step * (every or 0.0), every, per_step)


def _parts(record: Mapping[str, Any], profile: ProfiledSteps) -> dict[str, float]:
    """Divide a mean step. Operators and Python, which the profiler slows, share what waits leave of its time."""
    parts = dict.fromkeys(PARTS, 0.0)
    for name in ("data", "evaluation", "checkpoint"):
        parts[name] = _mean(record, "seconds", name)
    exchange = _mean(record, "seconds", "exchange")
    of = {name: _mean(record, "seconds", *spans) for name, spans in REGIONS.items()}
    device = profile.device
    if device:
        whole = sum(of.values()) + exchange + parts["data"]
        parts["communication"] = min(device["communication"], whole)
        parts["data"] = min(device["data"], whole - parts["communication"])
        rest = whole - parts["communication"] - parts["data"]
        busy = device["kernels"] + device["optimizer"] + device["host"]
        for name in ("kernels", "optimizer", "host"):
            parts[name] = rest * device[name] / busy if busy else 0.0
        return parts
    parts["communication"] = exchange
    for name, seconds in of.items():
        waits = min(profile.waits.get(name, 0.0), seconds)
        work, host = profile.operators.get(name, 0.0), profile.host.get(name, 0.0)
        share = work / (work + host) if work + host else 1.0
        parts["communication"] += waits
        if name == "optimizer":
            parts["optimizer"] += seconds - waits
        else:
            parts["kernels"] += (seconds - waits) * share
            parts["host"] += (seconds - waits) * (1 - share)
    return parts


def _lines(record: Mapping[str, Any], parts: Mapping[str, float]) -> tuple[float, dict[str, tuple[str, float]]]:
    """Return the host's seconds outside of modules, and the line where most samples of each part are."""
    samples: dict[str, Counter[str]] = {}
    for span, in_model, line, count in record["lines"]:
        name = ("model" if in_model else "loop") if span in REGIONS["rest"] else span
        samples.setdefault(name, Counter())[line] += count
    lines = {}
    for name, counter in samples.items():
        line, count = counter.most_common(1)[0]
        if line and counter.total() >= _FEWEST_SAMPLES:
            lines[name] = (line, count / counter.total())
    inside, outside = (samples.get(name, Counter()).total() for name in ("model", "loop"))
    rest = _mean(record, "seconds", *REGIONS["rest"])
    loop = rest * outside / (inside + outside) if inside + outside else 0.0
    return min(loop, parts["host"]), lines
