"""Benchmarks of the engine's overhead in a step, on models that compute almost nothing."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.distributed.mesh import Mesh
from shoal.hardware.fastest_all_reduce import shares_memory
from shoal.hardware.values import SHARED_MEMORY
from shoal.jobs.job import Job, Steps
from shoal.planner.measure.probes import LAYER_OPERATORS
from shoal.plans.plan import Plan
from shoal.plans.resolve import complete
from shoal.training.observe.metering import StepMeter
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build

# Layers of the two models, whose difference gives the cost for each parameter.
FEW, MANY = 1, 25
_WIDTH, _WARM_UP, _STEPS, _QUICK_STEPS = 8, 5, 60, 15
_PAIR = 2  # layers of a block: a tensor axis cuts one by its outputs and one by its inputs


def tensors(layers: int) -> int:
    """Return the number of parameters of a model with `layers` layers."""
    return 2 * layers


def operators(layers: int) -> int:
    """Return the operators of a step as a profile counts them.

    They are not traced here, so that the process uses no more memory than a run.
    """
    return LAYER_OPERATORS * layers + 1


def steps(mesh: Mesh, quick: bool, axis: str = "data") -> Iterator[dict[str, Any]]:
    """Yield rows of seconds per step by a model's number of parameters; their work is the number of operators.

    `axis`: the mesh axis of all ranks. Collective: all ranks.
    """
    for layers in (FEW, MANY) if axis == "data" else (_PAIR * mesh.world_size, MANY - 1):
        job = _job(layers) if axis == "data" else replace(_job(layers), model=functools.partial(_blocks, layers))
        # One microbatch per rank, or one per stage on the pipeline axis.
        ranks = mesh.world_size
        shares = ranks if axis in ("data", "shard", "pipeline") else 1
        document: dict[str, Any] = {
            "layout": {axis: ranks},
            "batch": {"grains_per_microbatch": job.num_grains // shares},
        }
        if axis == "shard":
            document["shard"] = {"level": "parameters"}
        if axis != "pipeline" and shares_memory(ranks):
            document["collectives"] = {"all_reduce": SHARED_MEMORY}
        meter, count = StepMeter(), _WARM_UP + (_QUICK_STEPS if quick else _STEPS)
        plan = complete(Plan().with_sections(**document), job.num_grains, job.grain_size)
        engine = build(job, plan, mesh, Options(observer=meter))
        around = Surroundings(note=_unheard, on_step=_unheard, stop_requested=lambda: False)
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:  # records and meter, as in a run
                meter.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy, [])
                records = RecordWriter(Path(folder) / "records.jsonl" if mesh.rank == 0 else None)
                with contextlib.closing(records):
                    outcome = engine.trainer(None, count, around, records).train()
        finally:
            meter.close()
            engine.close()
        seconds = outcome.step_seconds[_WARM_UP:]
        yield {"name": "step", "size": tensors(layers), "work": float(operators(layers)), "seconds": seconds}


def _unheard(*reports: object) -> None:
    """Ignore reports from this training."""


def _model(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))


def _blocks(layers: int) -> nn.Module:
    return nn.Sequential(*(_model(_PAIR) for _ in range(layers // _PAIR)))


def _loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).sum(), len(batch[0])


def _job(layers: int) -> Job:
    grains = 8
    return Job(
        model=functools.partial(_model, layers),
        loss=_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9),
        train_data=torch.utils.data.TensorDataset(torch.ones(64, _WIDTH)),
        global_batch=grains,
        grains=grains,
        length=Steps(10_000),
    )
