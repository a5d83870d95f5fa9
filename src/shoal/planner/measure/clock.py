"""Benchmark timer: seconds of a call, repeated for a slice of time, on a CPU or a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from shoal.planner.measure.probes import Call, Probe

# Shortest sample, so that reading the clock does not matter.
_SAMPLE_SECONDS = 1e-4
_GRAPH_CALLS = 20
_FEWEST_SAMPLES, _MOST_SAMPLES = 3, 400
# Number of slices after which sampling stops even with fewer than `_FEWEST_SAMPLES`.
_PATIENCE = 2


def sample(probe: Probe, device: torch.device, slice_seconds: float) -> tuple[list[float], float]:
    """Return samples of one call's seconds, taken for about `slice_seconds` after a warm-up, and its least seconds.

    The second value decides what to try next: on a CPU it may be processor time divided by threads. With one CPU thread
    the samples are processor time too, which other programs do not affect.
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
    """Return the seconds of each of `count` calls that all ranks make together.

    Collective: the ranks of the probe.
    """
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
    """Return the call to time and the probe's calls in it: on a GPU many in one graph, which excludes the host."""
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
    """Return a call that cycles through equal calls, each with its own operands and result."""
    calls = [probe.make() for _ in range(max(1, int(probe.turn_bytes / probe.operand_bytes)))]
    results: list[Any] = [call() for call in calls]
    places = itertools.cycle(range(len(calls)))

    def next_one() -> None:
        place = next(places)
        results[place] = calls[place]()

    return next_one
