"""Traced parameter-server run of `shoal verify`: every process of it, with recorders.

A worker writes what it computes of a part of a step, and what it has pulled; the conductor what the servers make of it.
Put together that is the trace of as many ranks as a step has parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.distributed.mesh import alone
from shoal.job import Job
from shoal.launch.environment import Environment
from shoal.plans.resolve import CompletePlan
from shoal.training.engine import Engine, Options, build
from shoal.training.optimizer_step import clipping
from shoal.training.parameter_server.conductor import Conductor
from shoal.training.parameter_server.members import Members
from shoal.training.parameter_server.part import take_part
from shoal.training.parameter_server.peers import identity, role
from shoal.training.parameter_server.servers import Servers
from shoal.training.parameter_server.worker import WorkerObserver
from shoal.training.step_records import Outcome, Surroundings
from shoal.training.telemetry import RecordWriter
from shoal.training.trace.recorder import TraceRecorder
from shoal.training.trace.traces import StepTrace, digest, read, write

_PARTS, _CONDUCTOR = "parts", "conductor"


def trace_served(
    job: Job,
    plan: CompletePlan,
    environment: Environment,
    folder: Path,
    num_steps: int,
    *,
    samples: int,
    note: Callable[..., None],
) -> Outcome | None:
    """Does what this rank is to do, and leaves the trace in `folder`; the outcome on the conductor."""
    mine = role(plan, environment.rank)
    if take_part(job, plan, environment, _PartWatch(folder / _PARTS, mine.number)):
        return None
    for name in (_PARTS, _CONDUCTOR):
        (folder / name).mkdir()
    with Members(environment, plan.server.num_servers, identity(job, plan)) as crew:
        recorder = _ConductorRecorder(folder / _CONDUCTOR, job.clip_norm)
        options = Options(telemetry=False, eval_samples=samples, observer=recorder)
        engine = build(job, plan, alone(torch.device("cpu")), options)
        try:
            around = Surroundings(note, lambda record, rank: None, lambda: False)
            last = min(num_steps, engine.order.num_steps)
            conductor = Conductor(engine, around, engine.first_state(), last, RecordWriter(None), crew=crew)
            recorder.servers = conductor.servers
            recorder.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy)
            outcome = conductor.train()
            conductor.show()
        finally:
            recorder.close()
            engine.close()
        for step in range(-1, outcome.state.step):
            _put_together(folder, step, plan.layout.data)
        return outcome


class _PartRecorder(TraceRecorder):
    """Writes a part of a step under the part's number: a worker may compute any."""

    def begins(self, part: int) -> None:
        """A part of a step comes next."""
        self._rank = part

    def computed_part(self) -> None:
        """The part is computed: its own gradients are not divided by the step's weight, which nobody knows yet."""
        self._trace.forward = self._forward.found
        self._trace.gradients[self._rank] = dict(self._own.sums)
        write(self._folder, self._trace, self._rank)

    def held(self) -> dict[str, str]:
        """Digests of the parameters and buffers that this worker has now."""
        parameters = {name for name, _ in self._sharded_model.model.named_parameters()}
        kinds = {name: "update" if name in parameters else "buffers" for name in self._sharded_model.tensors()}
        return {f"{kinds[name]}/{name}": digest(t) for name, (_, t) in self._sharded_model.tensors().items()}


class _PartWatch(WorkerObserver):
    """Tells the recorder of a worker."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        self.observer = self._recorder = _PartRecorder(folder / f"start-{number}", number)

    def attach(self, engine: Engine) -> None:
        start = self._folder / f"start-{self._number}"
        start.mkdir(parents=True)
        self._recorder.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy)
        self._recorder._folder = self._folder

    def pulled(self, version: int) -> None:
        text = json.dumps(self._recorder.held())
        (self._folder / f"held-{version - 1}-{self._number}.json").write_text(text, encoding="utf-8")

    def begins(self, part: int) -> None:
        self._recorder.begins(part)

    def computed(self) -> None:
        self._recorder.computed_part()


class _ConductorRecorder(TraceRecorder):
    """Writes what the servers have, which it asks them for."""

    servers: Servers

    def __init__(self, folder: Path, clip_norm: float | None) -> None:
        super().__init__(folder, 0)
        self._clip_norm, self._scale = clip_norm, 1.0

    def reduced(self, loss: float, weight: float, scale: float) -> None:
        """Keeps the mean gradients, of those that the servers have added up."""
        self.servers.gradients()
        self._scale = scale
        super().reduced(loss, weight, scale)

    def clipped(self, norm: float) -> None:
        """Keeps the gradients times what the servers are told to multiply them by."""
        gradients = [p.grad for _, p in self._named if p.grad is not None]
        torch._foreach_mul_(gradients, self._scale * clipping(self._clip_norm, norm))
        super().clipped(norm)

    def updated(self, skipped: str | None) -> None:
        self.servers.fetch(optimizer=True)
        super().updated(skipped)


def _put_together(folder: Path, step: int, num_parts: int) -> None:
    """Writes the trace of a step, of so many ranks, from its parts and from what the servers made of it."""
    made = read(folder / _CONDUCTOR, step, 1)
    for part in range(num_parts):
        if not (folder / _PARTS / f"step-{step}-{part}.json").exists():  # no grains, or before the first step
            write(folder / _PARTS, StepTrace(step), part)
    whole = read(folder / _PARTS, step, num_parts)
    whole.tensors = made.tensors
    for name in ("loss", "weight", "norm", "factor", "skipped", "optimizer", "divided"):
        setattr(whole, name, getattr(made, name))
    scale = 1.0 / (made.weight * made.factor) if made.weight else 1.0
    for part in range(num_parts):
        whole.gradients[part] = {name: g * scale for name, g in whole.gradients.get(part, {}).items()}
        whole.digests[part] = {**made.digests[0], **_held(folder / _PARTS / f"held-{step}-{part}.json")}
        whole.updates[part] = None
        # What is read together was computed by all: each rank's file is to have its own alone.
        own = StepTrace(**{**vars(whole), "parts": [p for p in whole.parts if p.rank == part]})
        own.forward = whole.forward if part == 0 else {}
        write(folder, own, part)


def _held(path: Path) -> dict[str, Any]:
    """What the worker of that number had pulled after the step, where it computed any of the next."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found
