"""Claim: a checkpoint of one copy on two ranks holds up training for 40 ms, and for 50 ms with a copy each.

An MLP of 16.8 M parameters with AdamW, 201 MB of state, two processes of one thread. Each row is a save between two
steps once the one before is written: until both ranks could go on. By turns of 5: a snapshot in memory that all ranks
map, which a thread writes; and what all ranks write themselves. Then the same with a copy each, in rank 0's own memory.
On a disk of tmpfs where /dev/shm is one.

    python -m benchmarks.one_copy_checkpoint
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from benchmarks.sharded_memory import of_each_rank, train
from shoal.checkpoint.keeper import RunState
from shoal.distributed.mesh import Mesh
from shoal.plans.plan import Plan
from shoal.training.setup.engine import Engine, Options, build

LAYERS, WIDTH, TURNS, SAVES = 64, 512, 3, 5


def mlp(layers: int) -> nn.Module:
    """Layers of 1.05 MB each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The summed square of what the model gives."""
    return model(batch[0]).square().sum(), torch.tensor(float(len(batch[0])))


def job(layers: int) -> shoal.Job:
    """Two steps of AdamW."""
    return shoal.Job(
        model=partial(mlp, layers),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        train_data=(torch.randn(8, WIDTH),),
        global_batch=4,
        length=shoal.Steps(2),
    )


def saved(engine: Engine, mesh: Mesh, step: int) -> float:
    """Milliseconds of a save, until the slower rank could go on."""
    mesh.gather_json(None)
    began = time.perf_counter()
    engine.keeper.save(RunState(step=step))
    own = 1e3 * (time.perf_counter() - began)
    found: float = max(mesh.gather_json(own))
    engine.keeper.save(RunState(step=step), wait=True)
    return found


def costs(folder: str, made: shoal.Job, plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """Saves after two steps, of both kinds where the ranks have one copy."""
    engine = build(made, plan, mesh, Options(telemetry=False, checkpoints=Path(folder), keep_checkpoints=1))
    keeper, found, step = engine.keeper, dict[str, list[float]](), 10
    try:
        train(engine)
        first = keeper._snapshots._trained
        kinds = {True: "in mapped memory", False: "written together"} if first.has_one_copy else {False: "a copy each"}
        saved(engine, mesh, step)  # opens the memory
        for mapped, name in list(kinds.items()) * TURNS:
            keeper._snapshots._trained = replace(first, has_one_copy=mapped)
            for _ in range(SAVES):
                step += 1
                found.setdefault(name, []).append(saved(engine, mesh, step))
    finally:
        engine.close()
    return {
        name: {"n": len(own), "median_ms": round(statistics.median(own), 2), "most_ms": round(max(own), 2)}
        for name, own in found.items()
    }


def main() -> None:
    """Measures and prints."""
    base, found = "/dev/shm" if os.path.isdir("/dev/shm") else None, dict[str, Any]()
    for shared in (True, False):
        sections = {"collectives": {"all_reduce": "shared_memory"}, "memory": {"shared": shared}}
        whole = shoal.Plan().with_sections(layout={"data": 2}, **sections)
        with tempfile.TemporaryDirectory(dir=base) as folder:
            found |= of_each_rank(whole, (job(2), job(LAYERS)), partial(costs, folder), lean=False)[0]
    print(json.dumps({"cores": os.cpu_count(), "torch": torch.__version__, "2 ranks": found}, indent=2))


if __name__ == "__main__":
    main()
