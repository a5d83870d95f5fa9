"""Traced parallel run of `shoal verify`: a rank of it, with the real engine and a recorder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.distributed.mesh import open_mesh
from shoal.job import Job
from shoal.launch.environment import Environment
from shoal.plans.plan import Plan
from shoal.plans.resolve import CompletePlan
from shoal.training.engine import Options, build
from shoal.training.evaluation import SAMPLED_CHUNK
from shoal.training.step_records import Outcome, Surroundings
from shoal.training.telemetry import RecordWriter
from shoal.training.trace.recorder import TraceRecorder
from shoal.training.trace.traces import StepTrace, read

_OUTCOME = "outcome.json"
# Evaluation is compared on so many samples at most: six chunks or one a rank, and a short one.
EVAL_SAMPLES = 21


def left_out(plan: Plan) -> list[str]:
    """A line for people where a plan compresses: what is verified is the same plan without."""
    scheme = plan.collectives.compression
    if scheme == "none":
        return []
    return [
        f'verified is the plan with collectives.compression = "none": by design {scheme} makes other sums than one '
        "process does; what they lose is measured in the run itself, every compression.guard_every steps"
    ]


def runs(plan: CompletePlan) -> dict[str, CompletePlan]:
    """The runs to trace: the plan's, and in exact mode the same on one process."""
    return {"parallel": plan} | ({"alone": plan.alone} if plan.execution.exact and plan.num_processes > 1 else {})


@dataclass(frozen=True)
class Traced:
    """Outcome of a traced run besides its steps' traces, read from the ranks' folder."""

    num_steps: int
    world_size: int
    metrics: dict[str, float]
    eval_samples: int
    most_eval_samples: int
    computation: dict[str, Any]
    notes: list[str]

    def steps(self, folder: Path, tensors: bool = True) -> Iterator[StepTrace]:
        """The state before the first step, then every step; read one by one."""
        for step in range(-1, self.num_steps):
            yield read(folder, step, self.world_size, tensors)


def trace_rank(job: Job, plan: CompletePlan, environment: Environment, folder: Path, num_steps: int) -> None:
    """Trains `num_steps` steps on this rank and leaves their trace. Collective: all ranks of the environment."""
    notes: list[str] = []
    samples = max(EVAL_SAMPLES, SAMPLED_CHUNK * plan.degrees.divides_grains + 1)
    if job.on_nonfinite == "rollback":  # there is no checkpoint to go back to
        job = replace(job, on_nonfinite="skip")
    if plan.serves:
        from shoal.verification.traced_served_run import trace_served

        served = trace_served(job, plan, environment, folder, num_steps, samples=samples, note=notes.append)
        if served is not None:
            _leave(folder, served, plan, samples, notes)
        return
    around = Surroundings(notes.append, lambda record, rank: None, lambda: False)
    with open_mesh(environment, plan.degrees) as mesh:
        recorder = TraceRecorder(folder, mesh.rank)
        engine = build(job, plan, mesh, Options(telemetry=False, eval_samples=samples, observer=recorder))
        try:
            recorder.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy)
            last = min(num_steps, engine.order.num_steps)
            outcome = engine.trainer(None, last, around, RecordWriter(None)).train()
            if mesh.rank == 0:
                _leave(folder, outcome, plan, samples, notes)
        finally:
            recorder.close()
            engine.close()


def _leave(folder: Path, outcome: Outcome, plan: Plan, samples: int, notes: list[str]) -> None:
    found = Traced(
        num_steps=outcome.state.step,
        world_size=plan.degrees.world_size,
        metrics=outcome.metrics,
        eval_samples=outcome.eval_samples,
        most_eval_samples=samples,
        computation=outcome.state.computation or {},
        notes=notes,
    )
    (folder / _OUTCOME).write_text(json.dumps(asdict(found)), encoding="utf-8")


def read_outcome(folder: Path) -> Traced:
    """The outcome that `trace_rank` wrote."""
    return Traced(**json.loads((folder / _OUTCOME).read_text(encoding="utf-8")))
