"""Claim: a snapshot of 200 MB costs a step 13 ms, and steps beside the thread that writes it take 1.02 times as long.

Repeat with `python -m benchmarks.checkpoints`: a state of 200 MB (tensors of 1 MB) is copied into fresh memory, and
into memory that is kept; then steps of a small model, whose time is Python's as much as its kernels', run alone, beside
the thread that writes checkpoints, and beside a process that writes the same from shared memory. Writing is hashing
with SHA-256, writing, fsync and rename, as in a run. On a disk of tmpfs where /dev/shm is one, so that the disk is no
part of it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import Tensor

from shoal.checkpoint.keeper import CheckpointWriter, SnapshotMemory
from shoal.checkpoint.store import Snapshot, Store

NUM_TENSORS, ELEMENTS = 200, 250_000
_TRIALS, _SECONDS = 15, 6.0


def state() -> dict[str, Tensor]:
    """A state of 200 MB."""
    return {f"t{number}": torch.full((ELEMENTS,), float(number)) for number in range(NUM_TENSORS)}


def spread(seconds: list[float]) -> dict[str, float]:
    """Count, median and largest, in milliseconds."""
    return {
        "n": len(seconds),
        "median_ms": round(1e3 * statistics.median(seconds), 2),
        "most_ms": round(1e3 * max(seconds), 2),
    }


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copies() -> dict[str, Any]:
    """Copies of the state into fresh memory and into kept memory, by turns."""
    tensors, memory = state(), SnapshotMemory()
    memory.copied("model", tensors)
    fresh, kept = [], []
    for _ in range(_TRIALS):
        fresh.append(timed(lambda: {name: tensor.clone() for name, tensor in tensors.items()}))
        kept.append(timed(lambda: memory.copied("model", tensors)))
    return {"fresh memory": spread(fresh), "kept memory": spread(kept)}


def steps(seconds: float) -> list[float]:
    """Times of steps of a model that is as much Python as kernels."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    batch, found, end = torch.randn(32, 64), [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.perf_counter() - began)
    return found


def _write(folder: str, tensors: dict[str, Tensor], ready: Any, ended: Any) -> None:
    """Writes checkpoints until told to end, one after the other."""
    torch.set_num_threads(1)
    store, number = Store(Path(folder), keep=1), 0
    ready.set()
    while not ended.is_set():
        store.write(Snapshot(number, {"model": tensors}, {}))
        number += 1


def beside_a_process(folder: str) -> list[float]:
    """Steps while another process writes from shared memory."""
    tensors = {name: tensor.share_memory_() for name, tensor in state().items()}
    spawned = processes.get_context("spawn")
    ready, ended = spawned.Event(), spawned.Event()
    process = spawned.Process(target=_write, args=(folder, tensors, ready, ended))
    process.start()
    ready.wait()
    found = steps(_SECONDS)
    ended.set()
    process.join()
    return found


def beside_the_thread(folder: str) -> list[float]:
    """Steps while the writer's thread writes, one checkpoint after the other."""
    writer, tensors = CheckpointWriter(Store(Path(folder), keep=1)), state()
    found: list[float] = []
    end, number = time.perf_counter() + _SECONDS, 0
    while time.perf_counter() < end:
        writer.write(Snapshot(number, {"model": tensors}, {}))
        number += 1
        found += steps(0.25)  # less than a write takes
    writer.close()
    return found


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        found = {
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "copy of 200 MB": copies(),
            "write of 200 MB": spread([timed(lambda: Store(Path(folder), 1).write(Snapshot(0, {"m": state()}, {})))]),
            "steps alone": spread(steps(_SECONDS)),
            "steps beside the thread": spread(beside_the_thread(folder)),
            "steps beside a process": spread(beside_a_process(folder)),
            "steps alone, again": spread(steps(_SECONDS)),
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
