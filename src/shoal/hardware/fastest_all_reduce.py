"""The fastest all-reduce algorithm on this machine, as measured by `shoal bench collectives`, else by a rule."""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import HardwareError
from shoal.hardware.catalogue import load
from shoal.hardware.detect import gpus, measured_file
from shoal.hardware.values import SHARED_MEMORY, Cluster, Curve

# The algorithms that a plan can name.
ALGORITHMS = ("native", "ring", "tree", "recursive_doubling", "hierarchical", SHARED_MEMORY)
# A typical bucket of gradients on CPUs.
BUCKET_BYTES = 4 << 20
# Machines on which shared memory's counters were tested: see distributed/collectives/shared_memory/region.py.
_ORDERED = ("x86_64", "AMD64")
# A smaller measured gain may be noise.
_WORTH = 0.95


def comparison_file(ranks: int) -> Path:
    """Return the path of `shoal bench collectives`' measurements on this machine with `ranks` ranks."""
    known = measured_file()
    return known.with_name(f"{known.stem}-collectives-{ranks}.json")


def shares_memory(ranks: int) -> bool:
    """Return True if `ranks` processes of this machine can sum through shared memory."""
    return ranks > 1 and why_not_shared() is None


def all_reduce_here(ranks: int, num_bytes: int = BUCKET_BYTES) -> str:
    """Return the algorithm's name for a plan of `ranks` ranks, all on this machine.

    The default without measurements is shared memory, which was faster than Gloo in every measurement, at every size.
    """
    if gpus() or ranks < 2 or why_not_shared() is not None:
        return "native"
    try:
        comparison = json.loads(comparison_file(ranks).read_text(encoding="utf-8"))
        return fastest(comparison, num_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # not measured, or measured by another version
    try:
        machine = load(measured_file())
    except HardwareError:
        return SHARED_MEMORY
    known = SHARED_MEMORY in machine.algorithms and 1 < ranks <= machine.devices_per_host
    return fastest_on(machine, ranks, num_bytes) if known else SHARED_MEMORY


def why_not_shared() -> str | None:
    """Return why processes of this machine cannot share memory, from a trial; None if they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memory without a name"
    if platform.machine() not in _ORDERED:
        return f"on {platform.machine()} the order of writes was not tried"
    try:
        with open(os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb") as memory:
            os.ftruncate(memory.fileno(), mmap.PAGESIZE)
            other = os.open(f"/proc/{os.getpid()}/fd/{memory.fileno()}", os.O_RDWR | os.O_CLOEXEC)
            try:
                with mmap.mmap(memory.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ) as seen:
                    os.pwrite(other, b"\1", 0)
                    return None if seen[0] == 1 else "a page that two descriptors share is not the same page"
            finally:
                os.close(other)
    except (OSError, ValueError) as error:
        return f"memory cannot be opened through /proc: {error}"


def fastest_on(cluster: Cluster, ranks: int, num_bytes: int = BUCKET_BYTES) -> str:
    """Return the fastest measured algorithm among `ranks` ranks on one host of the cluster."""
    if cluster.within is None or not 1 < ranks <= cluster.devices_per_host:
        return "native"
    links = {"native": cluster.within, **cluster.algorithms}
    return _least({name: link.sum_seconds(num_bytes, ranks) for name, link in links.items()})


def fastest(comparison: Mapping[str, Any], num_bytes: int) -> str:
    """Return the fastest algorithm at a size, with log-log interpolation between the measured sizes."""
    seconds = {}
    for name, by_size in comparison["all_reduce_seconds"].items():
        points = sorted((float(size), math.log(measured)) for size, measured in by_size.items())
        seconds[name] = math.exp(Curve(tuple(points)).at(num_bytes))
    return _least(seconds)


def _least(seconds: Mapping[str, float]) -> str:
    """Return the fastest algorithm, or native unless another is faster by more than a twentieth."""
    known = {name: seconds[name] for name in ALGORITHMS if name in seconds}
    best = min(known, key=lambda name: known[name])
    return best if known[best] < _WORTH * known.get("native", math.inf) else "native"
