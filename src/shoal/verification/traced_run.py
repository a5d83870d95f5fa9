"""Traced parallel run of `shoal verify`: the real engine with a recorder, on one rank.

In a parameter-server run, a worker writes what it computes for a part of a step and what it has pulled. The conductor
writes the servers' results. Together they form the trace of a run with one rank for each part of a step.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.distributed.mesh import alone, open_mesh
from shoal.distributed.process_setup import has_drawn_since_loading
from shoal.jobs.job import Job
from shoal.launch.environment import Environment
from shoal.numerics.gradient_norm import clip_values
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.plan import Plan
from shoal.plans.resolve import CompletePlan
from shoal.training.microbatch.evaluation import SAMPLED_CHUNK
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.observe.trace.recorder import TraceRecorder
from shoal.training.observe.trace.traces import FACTS, StepTrace, digest, read, write
from shoal.training.setup.engine import Options, build
from shoal.training.update.optimizer_step import clipping

if TYPE_CHECKING:
    from shoal.training.parameter_server.server import Servers

_OUTCOME, _PARTS, _CONDUCTOR = "outcome.json", "parts", "conductor"
# Evaluation is compared on at most this many samples: six chunks or one a rank, and a short one.
EVAL_SAMPLES = 21
AS_PLANNED = Options()  # no option overrides the plan


def left_out(plan: Plan) -> list[str]:
    """Return a note if the plan compresses: the same plan without compression is verified."""
    scheme = plan.collectives.compression
    if scheme == "none":
        return []
    return [
        f'verified is the plan with collectives.compression = "none": by design {scheme} makes other sums than one '
        "process does; what they lose is measured in the run itself, every compression.guard_every steps"
    ]


def runs(plan: CompletePlan) -> dict[str, CompletePlan]:
    """Return the runs to trace: the plan's own and, in exact mode, the same on one process."""
    return {"parallel": plan} | ({"alone": plan.alone} if plan.execution.exact and plan.num_processes > 1 else {})


@dataclass(frozen=True)
class Traced:
    """Outcome of a traced run except for the traces of its steps, read from the ranks' folder."""

    num_steps: int
    world_size: int
    metrics: dict[str, float]
    eval_samples: int
    most_eval_samples: int
    computation: dict[str, Any]
    notes: list[str]
    shares_memory: bool = False  # whether the ranks shared one copy of the parameters
    num_threads: int = 1  # of a rank's kernels

    def steps(self, folder: Path, tensors: bool = True) -> Iterator[StepTrace]:
        """Yield the state before the first step, then every step; each is read when it is needed."""
        for step in range(-1, self.num_steps):
            yield read(folder, step, self.world_size, tensors)


def trace_rank(
    job: Job,
    plan: CompletePlan,
    environment: Environment,
    folder: Path,
    num_steps: int,
    *,
    options: Options = AS_PLANNED,
) -> None:
    """Train `num_steps` steps on this rank and write their traces to `folder`.

    `options`: the engine's options, some of which the trace overrides.
    Collective: all ranks of the environment.
    """
    notes: list[str] = []
    around = Surroundings(notes.append, lambda record, rank: None, lambda: False)
    samples = max(EVAL_SAMPLES, SAMPLED_CHUNK * plan.layout.divides_grains + 1)
    if job.on_nonfinite == "rollback":  # there is no checkpoint to restore
        job = replace(job, on_nonfinite="skip")
    if plan.serves:
        from shoal.training.parameter_server.members import role
        from shoal.training.parameter_server.worker import take_part

        part = _PartRecorder(folder / _PARTS, role(plan, environment.rank).number)
        if take_part(job, plan, environment, part):
            return
    with contextlib.ExitStack() as opened:
        recorder: TraceRecorder
        if plan.serves:
            from shoal.training.parameter_server.members import Members, identity

            for name in (_PARTS, _CONDUCTOR):
                (folder / name).mkdir()
            crew = opened.enter_context(Members(environment, plan.server.num_servers, identity(job, plan)))
            mesh, recorder = alone(torch.device("cpu")), _ConductorRecorder(folder / _CONDUCTOR, job)
        else:
            mesh = opened.enter_context(open_mesh(environment, plan.layout))
            recorder = TraceRecorder(folder, mesh.rank)
        drawn = has_drawn_since_loading()
        options = replace(options, telemetry=False, eval_samples=samples, observer=recorder)
        options = replace(options, checks_seed=True, drawn_at_import=drawn, compares_replicas=False)
        engine = build(job, plan, mesh, options)
        notes += engine.unseeded
        opened.callback(engine.close)
        last, writer = min(num_steps, engine.order.num_steps), RecordWriter(None)
        if isinstance(recorder, _ConductorRecorder):
            from shoal.training.parameter_server.conductor import Conductor

            conductor = Conductor(engine, around, engine.first_state(), last, writer, crew=crew)
            recorder.servers = conductor.servers
        engine.rehearse()
        recorder.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy)
        opened.callback(recorder.close)
        if plan.serves:
            outcome = conductor.train()
            conductor.show()
        else:
            outcome = engine.trainer(None, last, around, writer).train()
    for step in range(-1, outcome.state.step) if plan.serves else ():
        _put_together(folder, step, plan.layout.data)
    if mesh.rank != 0:
        return
    (folder / _OUTCOME).write_text(
        json.dumps(
            asdict(
                Traced(
                    num_steps=outcome.state.step,
                    world_size=engine.plan.layout.world_size,
                    metrics=outcome.metrics,
                    eval_samples=outcome.eval_samples,
                    most_eval_samples=samples,
                    computation=outcome.state.computation or {},
                    notes=notes,
                    shares_memory=engine.plan.shares_memory,
                    num_threads=torch.get_num_threads(),
                )
            )
        ),
        encoding="utf-8",
    )


def read_outcome(folder: Path) -> Traced:
    """Read the outcome that `trace_rank` wrote."""
    return Traced(**json.loads((folder / _OUTCOME).read_text(encoding="utf-8")))


class _PartRecorder(TraceRecorder):
    """Recorder of a worker: it records each part of a step under the part's number, and what the worker has pulled."""

    def attach(self, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
        folder, self._number = self._folder, self._rank
        self._folder = folder / f"start-{self._number}"
        self._folder.mkdir(parents=True)
        super().attach(sharded_model, optimizer, strategy)
        self._folder = folder

    def pulled(self, version: int) -> None:
        tensors = self._sharded_model.tensors()
        parameters = {name for name, _ in self._sharded_model.model.named_parameters()}
        kinds = {name: "update" if name in parameters else "buffers" for name in tensors}
        text = json.dumps({f"{kinds[name]}/{name}": digest(t) for name, (_, t) in tensors.items()})
        (self._folder / f"held-{version - 1}-{self._number}.json").write_text(text, encoding="utf-8")

    def part_begins(self, part: int) -> None:
        self._rank = part

    def part_computed(self) -> None:
        """Write the worker's gradients without division by the step's weight, which is not known yet."""
        self._trace.forward = self._forward.fingerprints
        self._trace.gradients[self._rank] = dict(self._own.sums)
        write(self._folder, self._trace, self._rank)


class _ConductorRecorder(TraceRecorder):
    """Recorder of the servers' state, which it requests from the servers."""

    servers: Servers

    def __init__(self, folder: Path, job: Job) -> None:
        super().__init__(folder, 0)
        self._job, self._scale = job, 1.0

    def reduced(self, loss: float, weight: float, scale: float) -> None:
        """Record the mean gradients from the sums on the servers."""
        self.servers.gradients()
        self._scale = scale
        super().reduced(loss, weight, scale)

    def clipped(self, norm: float) -> None:
        """Record the gradients times the factor that the servers apply."""
        gradients = [p.grad for _, p in self._named if p.grad is not None]
        torch._foreach_mul_(gradients, self._scale * clipping(self._job.clip_norm, norm))
        clip_values(gradients, self._job.clip_value)
        super().clipped(norm)

    def updated(self, skipped: str | None) -> None:
        self.servers.fetch(optimizer=True)
        super().updated(skipped)


def _put_together(folder: Path, step: int, num_parts: int) -> None:
    """Write the trace of a step with `num_parts` ranks from the workers' parts and the servers' results."""
    served = read(folder / _CONDUCTOR, step, 1)
    for part in range(num_parts):
        if not (folder / _PARTS / f"step-{step}-{part}.json").exists():  # no grains, or before the first step
            write(folder / _PARTS, StepTrace(step), part)
    whole = read(folder / _PARTS, step, num_parts)
    whole.tensors = served.tensors
    for name in FACTS:
        setattr(whole, name, getattr(served, name))
    scale = 1.0 / (served.weight * served.factor) if served.weight else 1.0
    for part in range(num_parts):
        whole.gradients[part] = {name: g * scale for name, g in whole.gradients.get(part, {}).items()}
        file = folder / _PARTS / f"held-{step}-{part}.json"  # if its worker computed a part of the next step
        pulled = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        whole.digests[part] = {**served.digests[0], **pulled}
        whole.updates[part] = None
        # `whole` combines the parts of all ranks, but each rank's file is to have only its own parts.
        own = StepTrace(**{**vars(whole), "parts": [p for p in whole.parts if p.rank == part]})
        own.forward = whole.forward if part == 0 else {}
        write(folder, own, part)
