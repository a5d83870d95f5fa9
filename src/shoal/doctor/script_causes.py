"""Causes of lost time in a training script, with remedies in the words of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from shoal.doctor.causes import LostTime, Remedy, in_order, ms, of_any_loop
from shoal.doctor.read_backs import ReadBacks, lost_in
from shoal.doctor.script_times import PARTS, REGIONS, ScriptTimes

_FEWEST_READS = 2
_OFTEN, _SLOWER = 0.8, 0.05  # a slow rank, as shoal.doctor.causes has it
_RAGGED = 0.1
_SMALL_ELEMENTS = 1024  # of an exchange of numbers rather than of gradients
_RARER = 100
_COMPILED_AWAY = 0.5  # share of Python's time between operators that torch.compile saves
_TRIAL_ELEMENTS = 1 << 26
_TENSOR_CORES = 8  # compute capability from which products of float32 may run in TF32
_TF32_SAVES = 0.5

Losses = Iterator[LostTime]


def script_causes(times: ScriptTimes, script: str) -> tuple[LostTime, ...]:
    """Return the causes worth reporting, the largest possible saving first. `script`: the path of the script."""
    rules = (
        *(_loader_starts, _accumulation, _small_batch, _unused, _exchanges, _optimizer, _zero, _loop, _small_operators),
        *(_ragged, _copies, _products),
    )
    own = [loss for rule in rules for loss in rule(times)]
    return in_order([*(_in_words(loss, times) for loss in of_any_loop(times.run)), *_reads(times, script), *own])


def place(line: str) -> str:
    """Return a line of a script with its path from the present directory, if that is shorter."""
    path, colon, number = line.rpartition(":")
    return min(os.path.relpath(path), path, key=len) + colon + number if colon else line


def _at(times: ScriptTimes, part: str, rank: int | None = None) -> str:
    """Return where most of a part is, such as "; 80% of it at train.py:12", or an empty text."""
    line, share = times.lines[times.slowest if rank is None else rank].get(part, ("", 0.0))
    return f"; {share:.0%} of it at {place(line)}" if line else ""


def _lost(
    times: ScriptTimes, cause: str, title: str, seconds: float, *, seen: str, words: str, saved: float = 1.0
) -> LostTime:
    """Return a cause whose remedy has its name. `saved`: the share of the seconds that the remedy saves."""
    share = seconds / times.run.total
    return LostTime(cause, title, seconds, share, seen, (Remedy(cause, words, saved * share),))


def _in_words(loss: LostTime, times: ScriptTimes) -> LostTime:
    """Return a cause of any training loop with the remedies that a script has."""
    remedies, seen = [], loss.seen
    # What the slowest rank has most of beyond the quickest.
    slow = times.parts[times.slowest]
    quick = min(times.parts, key=lambda own: sum(own.values()) - own["communication"])
    part, more = max(((p, slow[p] - quick[p]) for p in PARTS if p != "communication"), key=lambda item: item[1])
    same = {  # of the remedies of any loop
        "larger-buckets": "DistributedDataParallel(bucket_cap_mb=25), its default, or more",
        "bfloat16": "model.register_comm_hook(None, bf16_compress_hook): sums in bfloat16, which rounds gradients",
    }
    if part not in ("host", "kernels"):
        same["mend-slow-rank"] = f"rank {times.slowest} as quick as the others: {PARTS[part]} on all ranks, or on none"
    for remedy in loss.remedies:
        if remedy.name == "without-slow-rank":  # its estimate wants a plan
            continue
        words = same.get(remedy.name, remedy.words).partition(", or without")[0].partition(", or unset")[0]
        if remedy.name == "workers":
            wanted, (_, where, has) = remedy.sections["data"]["workers"], words.partition(", where")
            pinned = ", pin_memory=True" * times.on_gpu
            words = f"DataLoader(num_workers={wanted}, persistent_workers=True{pinned}){where}{has}"
        remedies.append(replace(remedy, words=words, sections={}, arguments=(), variables={}, devices=None))
    if loss.cause == "slow rank":
        seen += f"; {ms(more)} more in {PARTS[part]}{_at(times, {'host': 'loop', 'kernels': 'model'}.get(part, part))}"
    else:
        seen += _at(times, {"checkpoints": "checkpoint"}.get(loss.cause, loss.cause))
    return replace(loss, seen=seen, remedies=tuple(remedies))


def _loader_starts(times: ScriptTimes) -> Losses:
    loaders = times.records[0]["loaders"]
    if not any(one["workers"] and not one["persistent"] for one in loaders):
        return
    starts, seconds = times.per_step("loader_starts"), times.per_step("data_first")
    if starts:
        first = ms(seconds / starts)
        seen = f"data workers start after every {1 / starts:.3g} steps, and the first batch takes {first}"
        words = "DataLoader(persistent_workers=True), which starts its processes once"
        yield _lost(times, "persistent-workers", "starts of data workers", seconds, seen=seen, words=words)


def _accumulation(times: ScriptTimes) -> Losses:
    backwards = times.of_profile("summing_backwards") / len(times.records[0]["optimizers"])
    if backwards < 1.5:
        return
    exposed = times.run.ranks["exposed_communication"].least
    seconds = exposed * (1 - 1 / backwards)
    seen = f"{backwards:.3g} backwards before an update sum their gradients over the ranks, and one of them needs to"
    words = "with model.no_sync(): around forward and backward of all but the last microbatch"
    if any(one["sharded"] for one in times.records[0]["optimizers"]):
        words = (
            "model.set_requires_gradient_sync(False) but for the last microbatch, which keeps whole gradients in memory"
        )
    yield _lost(times, "no-sync", "needless sums of gradients", seconds, seen=seen, words=words)


def _small_batch(times: ScriptTimes) -> Losses:
    others = [*_accumulation(times), *_exchanges(times)]
    seconds = times.run.ranks["exposed_communication"].least - sum(loss.seconds for loss in others)
    samples = times.run.samples / len(times.records)
    seen = f"one sum of all gradients for {f'{samples:.3g} samples' if samples else 'the samples'} of a rank"
    words = "twice the batch of a process, or accumulation: half as many sums for the same samples"
    yield _lost(times, "larger-batch", "sums for few samples", seconds, seen=seen, words=words, saved=0.5)


def _unused(times: ScriptTimes) -> Losses:
    for one in times.records[0]["replicas"][:1]:
        if not one["find_unused_parameters"] or one["unused_parameter_size"]:
            continue
        sums = times.run.ranks["exposed_communication"].least
        seconds = times.of_profile("search_seconds") + sums / (times.of_profile("sums") + 1)
        seen = "each forward searches for parameters without gradients, and there are none"
        words = "find_unused_parameters=False, or static_graph=True"
        yield _lost(times, "unused-parameters", "search for unused parameters", seconds, seen=seen, words=words)


def _exchanges(times: ScriptTimes) -> Losses:
    """Find what the script's own lines exchange. The rank that waits least says how long it takes by itself."""
    optimizer, steps = times.records[0]["optimizers"][0], len(times.records[0]["steps"])
    lines = times.records[0]["exchanges"]
    waits = min(times.span("exchange", rank) for rank in range(len(times.records)))
    for line, own in lines.items():
        least = waits * own["seconds"] / sum(one["seconds"] for one in lines.values())
        calls, elements = own["calls"] / steps, own["elements"] / own["calls"]
        seen = f"{calls:.3g} calls a step exchange {elements:,.0f} elements each at {place(line)}, while the rank waits"
        library, is_small = line.partition(" in ")[2], elements <= _SMALL_ELEMENTS
        if library and not is_small:  # its sums of gradients
            continue
        if library:
            words, saved = f"a setting of {library.partition('.')[0]} that leaves them out", 1.0
        elif not times.records[0]["replicas"] and calls >= max(2, optimizer["parameters"] - 1):
            words, saved = "DistributedDataParallel, which sums few buckets while the backward computes", 0.5
        elif is_small:
            words, saved = f"numbers exchanged every {_RARER} steps, or together in one tensor", 1 - 1 / _RARER
        else:
            words, saved = "this exchange left out, or made with async_op=True", 1.0
        title = f"exchanges by {library.partition('.')[0] or 'the script'}"
        yield _lost(times, "exchange", title, least, seen=seen, words=words, saved=saved)


def _reads(times: ScriptTimes, script: str) -> Losses:
    from shoal.doctor.read_backs import places_of

    count = times.of_profile("reads")
    if times.on_gpu:
        count = mean(profile.device.get("synchronizations", 0.0) for profile in times.profiles)
    if count < (1 if times.on_gpu else _FEWEST_READS):
        return
    places = [place(line) for line, _ in read_lines(times)] or list(places_of(Path(script)))
    yield lost_in(ReadBacks(count, read_seconds(times)), times.run, places)


def read_lines(times: ScriptTimes) -> list[tuple[str, float]]:
    """Return lines of the loop and of the model that read numbers back, by where samples are."""
    import linecache

    lines = []
    for name in ("loop", "model"):
        line, share = times.lines[times.slowest].get(name, ("", 0.0))
        path, _, number = line.rpartition(":")
        text = linecache.getline(path, int(number)) if line else ""
        if any(f"{call}(" in text for call in ("item", "tolist", "float")):
            lines.append((line, share))
    return lines


def read_seconds(times: ScriptTimes) -> float:
    """Return the seconds a step in which the host reads numbers back, or in which a GPU is idle after it has."""
    if times.on_gpu:
        return mean(profile.device.get("dry", 0.0) for profile in times.profiles)
    reading, other = times.of_profile("read_seconds"), times.of_profile("unread_seconds")
    rest = sum(times.span(name) for name in REGIONS["rest"])
    return rest * reading / (reading + other) if reading else 0.0


def _optimizer(times: ScriptTimes) -> Losses:
    for one in times.records[0]["optimizers"]:
        if one["trial"] is None:
            continue
        plain, fused = one["trial"]
        whole = plain * max(1.0, one["elements"] / _TRIAL_ELEMENTS)
        seconds = min(whole, times.span("optimizer"))
        seen = f"{one['parameters']} parameters, copies of which take {ms(plain)} as they are and {ms(fused)} fused"
        words = f"{one['class']}(..., fused=True)"
        yield _lost(times, "fused-optimizer", "optimizer", seconds, seen=seen, words=words, saved=1 - fused / plain)


def _zero(times: ScriptTimes) -> Losses:
    if times.per_step("zeros"):
        seconds = times.span("zero")
        seen, words = "zero_grad(set_to_none=False) writes zeros, to which the backward adds", "zero_grad() drops them"
        yield _lost(times, "set-to-none", "gradients set to zero", seconds, seen=seen, words=words)


def _loop(times: ScriptTimes) -> Losses:
    """Find the script's own Python around the model, of the rank that has least of it: the rest is of a slow rank."""
    rank = times.loop_host.index(min(times.loop_host))
    seconds = times.loop_host[rank] - (0.0 if times.on_gpu else read_seconds(times))
    seen = f"Python outside of the model's forward{_at(times, 'loop', rank)}"
    yield _lost(times, "own-code", "Python of the loop", seconds, seen=seen, words="without it, or more rarely")


def _small_operators(times: ScriptTimes) -> Losses:
    if times.of_profile("compiled"):
        return
    seconds = mean(own["host"] for own in times.parts) - mean(times.loop_host)
    seconds -= read_seconds(times) if times.on_gpu else 0.0
    seen = f"{times.of_profile('operators'):,.0f} operators a step, and {ms(seconds)} between them on the host"
    words = "torch.compile(model), which fuses them" + ', mode="reduce-overhead"' * times.on_gpu
    yield _lost(times, "compile", "many small operators", seconds, seen=seen, words=words, saved=_COMPILED_AWAY)


def _ragged(times: ScriptTimes) -> Losses:
    of_one_rank = len(times.records) < 2 or times.run.ranks["busy_seconds"].how_often >= _OFTEN
    if not of_one_rank and times.sizes >= _RAGGED and times.imbalance >= _SLOWER * times.run.step:
        seen = f"ranks wait for another one in each step; the sizes of batches vary by {times.sizes:.0%}"
        words = "batches of like length on all ranks: samples sorted by length, or packed"
        yield _lost(times, "ragged", "uneven batches", times.imbalance, seen=seen, words=words)


def _copies(times: ScriptTimes) -> Losses:
    seconds = mean(profile.device.get("pageable", 0.0) for profile in times.profiles)
    if seconds:
        words = "DataLoader(pin_memory=True), and .to(device, non_blocking=True)"
        seen = "batches are copied to the GPU from memory that is not pinned"
        yield _lost(times, "pinned", "copies to the GPU", seconds, seen=seen, words=words)


def _products(times: ScriptTimes) -> Losses:
    first = times.records[0]
    if first["matmul_precision"] != "highest" or not first["capability"] or first["capability"][0] < _TENSOR_CORES:
        return
    seconds = mean(profile.device.get("float32_products", 0.0) for profile in times.profiles)
    seen = "products of float32 matrices do not use the tensor cores"
    words = 'torch.set_float32_matmul_precision("high"), which rounds inputs to TF32, or autocast in bfloat16'
    yield _lost(times, "tf32", "float32 products", seconds, seen=seen, words=words, saved=_TF32_SAVES)


def notes(times: ScriptTimes, *, cpu: bool, steps: int) -> Sequence[str]:
    """Return what these times cannot show, in words."""
    said = []
    if cpu:
        said.append("GPUs: the script is written for them, and these are times of the CPU")
    elif not times.on_gpu:
        said.append("GPUs: kernels, copies, synchronizations and precision of a script that trains on them")
    if not times.on_gpu and (count := times.of_profile("reads")) >= 1:
        said.append(f"what {count:.3g} reads of numbers a step (.item()) cost on a GPU, where each waits for it")
    if times.under_profiler:
        said.append("times without the profiler, which slows Python and operators: the script ended before")
    said.append(f"what follows update {steps}, such as evaluations and checkpoints at the end of an epoch")
    return said
