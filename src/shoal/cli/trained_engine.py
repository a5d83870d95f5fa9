"""Engine of a job with the weights of a run on ranks, for `shoal evaluate` and `shoal predict`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, TypeVar

from shoal.checkpoint.callback_state import AVERAGES
from shoal.checkpoint.manifest import ManifestError
from shoal.checkpoint.pieces import fill, refuse_other_model
from shoal.checkpoint.store import SavedCheckpoint
from shoal.checkpoint.weights import averages, damaged, find, with_checkpoint
from shoal.checkpoint.whole_optimizer import EVALUATED
from shoal.cli.export import run_of, step_of
from shoal.distributed.agreement import decided_by_rank_0, together
from shoal.distributed.mesh import Mesh, open_mesh
from shoal.distributed.process_setup import prepare_process
from shoal.hardware.detect import cores
from shoal.jobs.job import Job
from shoal.jobs.job_file import JobRequest, LoadedJob, load
from shoal.jobs.job_object import HandedJob
from shoal.launch.environment import REQUEST_FILE, Environment
from shoal.launch.signals import Signals
from shoal.launch.supervise.ranks import LaunchEnd, LocalRun, launch
from shoal.plans import Plan
from shoal.plans.plan import ServerSection, read_plan
from shoal.plans.resolve import Judged, relaid
from shoal.runs.directory import read_json
from shoal.runs.request import dumped, loaded
from shoal.training.setup.engine import Engine, Options, build
from shoal.training.setup.preflight import judged, with_judged_grains

_Value = TypeVar("_Value", bound="WeightsRequest")


@dataclass(frozen=True)
class WeightsRequest:
    """A job, and the run or checkpoint whose weights its model gets. `step`: "last", "best" or a number.

    Settings of the job default to the settings of the run.
    """

    job: JobRequest
    run: Path
    step: str = "last"
    ema: bool = False
    address: str | None = None  # of the run, if `run` is a copy

    @property
    def shown(self) -> str:
        """The run as the user gave it."""
        return self.address or str(self.run)

    @property
    def saved(self) -> SavedCheckpoint:
        """The checkpoint. Raises: as `find`."""
        return find(self.run, step_of(self.step))

    @property
    def loaded_job(self) -> LoadedJob:
        """The job, with the run's settings and number of grains as defaults."""
        of_run = read_json(run_of(self.run).job) or {}
        settings = {**of_run.get("given", {}), **dict(self.job.settings)}
        loaded = load(replace(self.job, settings=tuple(settings.items())))
        grains = of_run.get("grains")
        if loaded.job.grains is None and grains is not None:
            return replace(loaded, job=replace(loaded.job, grains=grains))  # saves computing the default
        return loaded

    def plan(self, devices: int) -> Plan:
        """Return the run's plan for `devices` devices, without the parts that concern only updates."""
        plan_file = run_of(self.run).plan
        plan = read_plan(plan_file) if plan_file.exists() else Plan()
        plan = plan.model_copy(update={"server": ServerSection()}).uncompressed
        return relaid(plan.with_sections(memory={"shared": False}, execution={"cuda_graph": False}), devices)


@dataclass(frozen=True)
class EvaluateRequest(WeightsRequest):
    """A call of `shoal evaluate`. `result`: file for the result, which is printed if None."""

    json: bool = False
    result: Path | None = None


@dataclass(frozen=True)
class PredictRequest(WeightsRequest):
    """A call of `shoal predict`: the job's data by name or `handed` data, and the output file.

    `quiet`: print nothing.
    """

    output: Path = Path("predictions.npz")
    data: str | None = None
    handed: HandedJob | None = None
    quiet: bool = False

    def plan(self, devices: int) -> Plan:
        """Return the run's plan with the whole model on each of `devices` data ranks."""
        return super().plan(1).with_sections(layout={"data": devices})


@contextlib.contextmanager
def on_this_host(request: _Value) -> Iterator[_Value]:
    """Yield the request with a temporary copy of the run if the run is at an address. Raises: as `with_checkpoint`."""
    if request.address is None:
        yield request
        return
    with with_checkpoint(request.address, step_of(request.step)) as folder:
        yield replace(request, run=folder)


def handed_over(kind: type[_Value]) -> _Value | None:
    """Return the request that the parent process passed to this one, or None."""
    path = os.environ.pop(REQUEST_FILE, None)
    return loaded(kind, Path(path).read_text(encoding="utf-8")) if path is not None else None


def in_ranks(
    request: WeightsRequest, command: str, devices: int, signals: Signals | None = None, stream: TextIO | None = None
) -> LaunchEnd:
    """Run the request in ranks on this host. Raises: as `find`, before any rank starts."""
    find(request.run, step_of(request.step))
    exact = request.plan(devices).execution.exact
    return launch(
        LocalRun(
            [command, request.job.target, str(request.run)],
            devices,
            1 if exact else max(1, cores() // devices),
            run_of(request.run).path / "logs",
            request=dumped(request),
            stream=stream,
        ),
        signals,
    )


@contextlib.contextmanager
def trained_engine(
    request: WeightsRequest, devices: int, environment: Environment, with_data: Job | None = None
) -> Iterator[tuple[Mesh, Judged, Engine, SavedCheckpoint]]:
    """Yield mesh, plan, engine and checkpoint; the engine's model has the weights of the checkpoint.

    Collective: all ranks.
    """
    plan = request.plan(devices)
    prepare_process(plan.execution.exact, max(1, cores() // environment.local_world_size))
    job = with_data or request.loaded_job.job
    with open_mesh(environment, plan.degrees) as mesh:
        judgement = decided_by_rank_0(mesh, Judged, lambda: judged(job, plan))
        ready = together(mesh, lambda: with_judged_grains(judgement, job))
        engine = build(ready, judgement.plan, mesh, Options(telemetry=False, take_workers=True))
        try:
            saved = together(mesh, lambda: request.saved)

            def take_up() -> None:
                tensors = engine.sharded_model.tensors()
                refuse_other_model(saved, tensors, engine.sharded_model.absent())
                averaged = averages(saved) if request.ema else {}
                try:
                    fill(saved, "model", tensors)
                    evaluated = saved.document["tensors"].get(EVALUATED, {})
                    fill(saved, EVALUATED, {name: target for name, target in tensors.items() if name in evaluated})
                    fill(saved, AVERAGES, {name: target for name, target in tensors.items() if name in averaged})
                except ManifestError as error:
                    raise damaged(saved.folder, error) from error

            together(mesh, take_up)
            yield mesh, judgement, engine, saved
        finally:
            engine.close()
