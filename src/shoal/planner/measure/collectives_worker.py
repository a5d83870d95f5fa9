"""One rank of `shoal bench collectives`, which times every algorithm at each size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.distributed.collectives.base import Collective, Team
from shoal.distributed.collectives.choose import open_collective
from shoal.distributed.mesh import Mesh, open_mesh
from shoal.distributed.process_setup import prepare_process
from shoal.hardware.fastest_all_reduce import ALGORITHMS
from shoal.launch.environment import Environment
from shoal.plans.layout import Layout
from shoal.runs.directory import write_file


@dataclass(frozen=True)
class Sampling:
    """Sizes in bytes, samples for each, seconds of one sample, and the folder for the result."""

    folder: Path
    sizes: Sequence[int]
    samples: int
    sample_seconds: float
    threads: int


def measure_collectives(sampling: Sampling, environment: Environment) -> None:
    """Write `rank-N.json` with rows of name, size and seconds of a call by sample."""
    prepare_process(exact=False, num_threads=sampling.threads)
    with open_mesh(environment, Layout(data=environment.world_size)) as mesh:
        rows = _rows(mesh, sampling)
    write_file(sampling.folder / f"rank-{environment.rank}.json", json.dumps({"rows": rows}))


def _rows(mesh: Mesh, sampling: Sampling) -> list[dict[str, object]]:
    """Return the measured rows; algorithms alternate within each sample, so that disturbances affect all of them."""
    opened = {name: open_collective(name, Team(), mesh.device) for name in ALGORITHMS}
    rows: list[dict[str, object]] = []
    for size in sampling.sizes:
        calls, release = _calls(opened, size)
        counts = {name: _count(mesh, call, sampling.sample_seconds) for name, call in calls.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(sampling.samples):
            for name, call in calls.items():
                dist.barrier()
                call()
                began = time.perf_counter()
                for _ in range(counts[name]):
                    call()
                seconds[name].append((time.perf_counter() - began) / counts[name])
        rows += [{"name": name, "size": size, "seconds": found} for name, found in seconds.items()]
        release()
    for collective in opened.values():
        collective.close()
    return rows


def _calls(opened: dict[str, Collective], size: int) -> tuple[dict[str, Callable[[], object]], Callable[[], None]]:
    """Return an all_reduce of zeros for each algorithm, and a function that releases their memory."""
    numel = max(1, size // 4)
    tensors = {name: collective.allocate(numel, torch.float32) for name, collective in opened.items()}
    calls: dict[str, Callable[[], object]] = {n: partial(opened[n].all_reduce, t) for n, t in tensors.items()}
    # Tensors that the algorithm did not allocate go through its staging areas.
    calls["shared_memory, copied"] = partial(opened["shared_memory"].all_reduce, torch.zeros(numel))

    def release() -> None:
        for name, tensor in tensors.items():
            opened[name].release(tensor)
        tensors.clear()

    return calls, release


def _count(mesh: Mesh, call: Callable[[], object], seconds: float) -> int:
    """Return the number of calls in a sample, the same on all ranks."""
    call()
    began = time.perf_counter()
    call()
    once = float(mesh.all_gather([time.perf_counter() - began]).mean())
    return max(1, min(200, int(seconds / once)))
