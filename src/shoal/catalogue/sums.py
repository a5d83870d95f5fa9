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

# Which of them a plan can name.
ALGORITHMS = ("native", "ring", "tree", "recursive_doubling", "hierarchical", "shared_memory")
# A bucket of gradients on CPUs is about so large.
BUCKET_BYTES = 4 << 20
# A choice that was measured to win by less may be noise.
_WORTH = 0.95


def comparison_file(ranks: int) -> Path:
    """Where `shoal bench collectives` keeps what it measured on this machine with so many ranks."""
    known = measured_file()
    return known.with_name(f"{known.stem}-collectives-{ranks}.json")


def all_reduce_here(ranks: int, num_bytes: int = BUCKET_BYTES) -> str:
    """The name for a plan of so many ranks, all of them processes of this machine."""
    if gpus() or ranks < 2 or sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "native"
    try:
        comparison = json.loads(comparison_file(ranks).read_text(encoding="utf-8"))
        return fastest(comparison, num_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "native"  # nothing was measured, or by another version


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
