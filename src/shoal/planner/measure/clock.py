"""Benchmark timer: seconds of a call, many times over a slice of time, on a CPU or a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from shoal.planner.measure.probes import Call, Probe

# A sample covers at least this much, so that reading the clock does not count.
_SAMPLE_SECONDS = 1e-4
_GRAPH_CALLS = 20
_FEWEST_SAMPLES, _MOST_SAMPLES = 3, 400
# The fewest samples are taken while they fit into so many slices.
_PATIENCE = 2


def sample(probe: Probe, device: torch.device, slice_seconds: float) -> tuple[list[float], float]:
    """Seconds of one call, sampled for about `slice_seconds` after a warm-up, and how long one takes undisturbed.

    The second is for deciding what to try next: on a CPU the processor's time over the threads. On one thread of a
    CPU the samples are the processor's time too, to which other programs add nothing.
    """
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    call, calls = _prepared(probe, device)
    _timed(call, 1, device)  # caches, allocator, a library's choice of algorithm
    began = time.process_time()
    once = _timed(call, 1, device)
    own = once if device.type == "cuda" else min(once, (time.process_time() - began) / torch.get_num_threads())
    repeats = max(1, min(10_000, int(_SAMPLE_SECONDS / max(once, 1e-9))))
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < _MOST_SAMPLES:
        found.append(_timed(call, repeats, device, clock) / repeats / calls)
        slices = (time.perf_counter() - begun) / slice_seconds
        if slices > (1 if len(found) >= _FEWEST_SAMPLES else _PATIENCE):
            break
    return found, min(own, *found)


def sample_together(probe: Probe, device: torch.device, count: int) -> list[float]:
    """Seconds of `count` calls that all the ranks make, each by itself. Collective, as the probe is."""
    call = probe.make()
    call()
    return [_timed(call, 1, device) for _ in range(count)]


def _timed(call: Call, repeats: int, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begun


def _prepared(probe: Probe, device: torch.device) -> tuple[Call, int]:
    """The call to time and how many of the probe's it makes: on a GPU a graph of many, so that no host is in it."""
    if device.type == "cpu" and probe.operand_bytes:
        return _in_turn(probe), 1
    call = probe.make()
    if device.type != "cuda" or not probe.graph:
        return call, 1
    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_CALLS):
            call()
    return graph.replay, _GRAPH_CALLS


def _in_turn(probe: Probe) -> Call:
    """A call of one of many that are alike, of which each has operands and keeps a result of its own."""
    calls = [probe.make() for _ in range(max(1, int(probe.turn_bytes / probe.operand_bytes)))]
    results: list[Any] = [call() for call in calls]
    places = itertools.cycle(range(len(calls)))

    def next_one() -> None:
        place = next(places)
        results[place] = calls[place]()

    return next_one
