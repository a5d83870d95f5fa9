"""Which all-reduce is fastest between processes of this machine, as `shoal bench collectives` measured it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.catalogue.here import gpus, measured_file
from shoal.catalogue.text import load
from shoal.errors import HardwareError
from shoal.hardware import Cluster

SHARED_MEMORY = "shared_memory"
# Which of them a plan can name.
ALGORITHMS = ("native", "ring", "tree", "recursive_doubling", "hierarchical", SHARED_MEMORY)
# A bucket of gradients on CPUs is about so large.
BUCKET_BYTES = 4 << 20
# A choice that was measured to win by less may be noise.
_WORTH = 0.95


def comparison_file(ranks: int) -> Path:
    """Where `shoal bench collectives` keeps what it measured on this machine with so many ranks."""
    known = measured_file()
    return known.with_name(f"{known.stem}-collectives-{ranks}.json")


def shares_memory(ranks: int) -> bool:
    """Whether so many ranks, all of them processes of this machine, can sum in memory that all of them map."""
    return ranks > 1 and sys.platform == "linux" and hasattr(os, "memfd_create")


def all_reduce_here(ranks: int, num_bytes: int = BUCKET_BYTES) -> str:
    """The name for a plan of so many ranks, all of them processes of this machine: the fastest that was measured."""
    if gpus() or not shares_memory(ranks):
        return "native"
    try:
        comparison = json.loads(comparison_file(ranks).read_text(encoding="utf-8"))
        return fastest(comparison, num_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nothing was measured, or by another version
    try:
        return fastest_on(load(measured_file()), ranks, num_bytes)
    except HardwareError:
        return "native"


def fastest_on(cluster: Cluster, ranks: int, num_bytes: int = BUCKET_BYTES) -> str:
    """The algorithm with the least seconds among so many ranks of a host of the cluster, of those measured there."""
    if cluster.within is None or not 1 < ranks <= cluster.devices_per_host:
        return "native"
    links = {"native": cluster.within, **{name: cluster.algorithms[name] for name in cluster.algorithms}}
    size = str(num_bytes)
    return fastest(
        {"all_reduce_seconds": {n: {size: k.sum_seconds(num_bytes, ranks)} for n, k in links.items()}}, num_bytes
    )


def fastest(comparison: Mapping[str, Any], num_bytes: int) -> str:
    """The algorithm with the least seconds at a size, between those measured on a line of logarithms.

    Native, unless another is faster by more than a twentieth.
    """
    known = comparison["all_reduce_seconds"]
    seconds = {name: _at(known[name], num_bytes) for name in ALGORITHMS if name in known}
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < _WORTH * seconds.get("native", math.inf) else "native"


def _at(measured: Mapping[str, float], num_bytes: int) -> float:
    points = sorted((math.log(int(size)), math.log(seconds)) for size, seconds in measured.items())
    place = min(max(math.log(num_bytes), points[0][0]), points[-1][0])
    for (left, low), (right, high) in pairwise(points):
        if place <= right:
            return math.exp(low + (high - low) * (place - left) / (right - left))
    return math.exp(points[-1][1])
