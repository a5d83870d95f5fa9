"""The commands `shoal evaluate` and `shoal predict`, and the engine with a run's weights that both use."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from shoal.checkpoint.callback_state import AVERAGES
from shoal.checkpoint.manifest import ManifestError
from shoal.checkpoint.pieces import fill, refuse_other_model
from shoal.checkpoint.store import SavedCheckpoint
from shoal.checkpoint.weights import averages, damaged, find, with_checkpoint
from shoal.checkpoint.whole_optimizer import EVALUATED
from shoal.cli.export import output_of, run_of, step_of
from shoal.cli.options import EvaluateOptions, PredictOptions
from shoal.data.source import Opened, open_evaluation, said_of
from shoal.distributed.mesh import Mesh, decided_by_rank_0, open_mesh, together
from shoal.distributed.process_setup import as_rank, prepare_process
from shoal.errors import CommandError, ExitCode, folded, nearest
from shoal.hardware.detect import cores
from shoal.jobs.handed_job import HandedJob
from shoal.jobs.job import Job
from shoal.jobs.job_file import JobRequest, LoadedJob, load, parse_target, with_settings_of
from shoal.jobs.settings import note_other_secrets
from shoal.launch.environment import REQUEST_FILE, Environment, inside_run
from shoal.launch.environments.detect import joined, refuse_rank
from shoal.launch.signals import Signals
from shoal.launch.supervise.ranks import LaunchEnd, LocalRun, launch
from shoal.plans import Plan
from shoal.plans.plan import ServerSection, described, read_plan
from shoal.plans.resolve import Judged, relaid
from shoal.runs.address import is_address
from shoal.runs.directory import read_json, write_file
from shoal.runs.request import devices_here, dumped, loaded
from shoal.training.microbatch.evaluation import Evaluator
from shoal.training.microbatch.predictions import Predictions, predict_function, refuse_file
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
    def loaded_job(self) -> LoadedJob:
        """The job, with the run's settings and number of grains as defaults."""
        of_run = read_json(run_of(self.run).job, exactly=True) or {}
        loaded = load(with_settings_of(self.job, of_run, all_known=True))
        note_other_secrets(loaded.settings, of_run)
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
    words, logs = [command, request.job.target, str(request.run)], run_of(request.run).path / "logs"
    threads = 1 if request.plan(devices).execution.exact else max(1, cores() // devices)
    return launch(LocalRun(words, devices, threads, logs, request=dumped(request), stream=stream), signals)


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
    with open_mesh(environment, plan.layout) as mesh:
        judgement = decided_by_rank_0(mesh, Judged, lambda: judged(job, plan))
        ready = together(mesh, lambda: with_judged_grains(judgement, job))
        engine = build(ready, judgement.plan, mesh, Options(telemetry=False, take_workers=True))
        try:
            saved = together(mesh, lambda: find(request.run, step_of(request.step)))

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


def evaluate(options: EvaluateOptions) -> ExitCode:
    """Evaluate as a rank, or start ranks on this host that do. Raises: ShoalError."""
    request = handed_over(EvaluateRequest)
    with contextlib.nullcontext(request) if request is not None else on_this_host(evaluate_request(options)) as here:
        environment = joined(os.environ)
        devices = environment.world_size if environment else options.devices or devices_here()
        if environment is None and devices > 1:
            return _reported(in_ranks(here, "evaluate", devices))
        at = environment or Environment()
        with inside_run(os.environ):
            return as_rank(at, lambda: _evaluate(here, options.devices or devices, at))


def evaluate_request(options: EvaluateOptions, result: Path | None = None) -> EvaluateRequest:
    """Create the request from options. Raises: JobFileError, SettingError."""
    job = parse_target(options.job, options.set, options.config)
    address = options.run if is_address(options.run) else None
    return EvaluateRequest(job, Path(options.run), options.step, options.ema, address, options.json, result)


def _reported(ended: LaunchEnd) -> ExitCode:
    """Print the error of ranks that have ended, if there is one. Return the exit code."""
    if ended.error is not None:
        print(ended.error.render(), file=sys.stderr)
    return ExitCode(ended.code)


def _evaluate(request: EvaluateRequest, devices: int, environment: Environment) -> ExitCode:
    job = request.loaded_job.job
    if job.eval_data is None:
        raise CommandError(
            given=f"shoal evaluate {request.job.target}",
            conflict="the job has no eval_data",
            remedy="give Job(eval_data=...) what is to be evaluated",
        )
    with trained_engine(request, devices, environment, job) as (mesh, verdict, engine, saved):
        metrics, count = engine.evaluator.evaluate(engine.model)
        engine.strategy.rest()
        document = {"run": request.shown, "step": saved.step, "samples": count, "metrics": metrics}
        if mesh.rank == 0 and request.result is not None:
            write_file(request.result, json.dumps(document))
        elif mesh.rank == 0 and request.json:
            print(json.dumps(document), flush=True)
        elif mesh.rank == 0:
            weights = "averaged weights of step" if request.ema else "step"
            layout = described(verdict.plan)
            print(folded(f"{request.shown} {weights} {saved.step}, {layout}: {count} samples evaluated"))
            for name, value in metrics.items():
                print(f"  {name} {value:.6g}")
            sys.stdout.flush()
    return ExitCode.DONE


_TRAIN, _EVAL = "train", "eval"


def predict(options: PredictOptions) -> ExitCode:
    """Predict in this process, or start ranks on this host that do. Raises: ShoalError."""
    request = handed_over(PredictRequest)
    if request is None:
        refuse_rank(os.environ, "shoal predict")
    with contextlib.nullcontext(request) if request is not None else on_this_host(predict_request(options)) as here:
        devices = 1 if request is not None else options.devices or 1
        if devices > 1:
            return _reported(in_ranks(here, "predict", devices))
        environment = joined(os.environ) or Environment()
        with inside_run(os.environ):
            return as_rank(environment, lambda: _predict(here, environment))


def predict_request(options: PredictOptions, **more: Any) -> PredictRequest:
    """Create the request from options. Raises: JobFileError, SettingError, CommandError."""
    job = parse_target(options.job, options.set, options.config)
    output = output_of(options.run, options.output, "predictions.npz")
    refuse_file(output)
    weights = (Path(options.run), options.step, options.ema, options.run if is_address(options.run) else None)
    return PredictRequest(job, *weights, output=output, data=options.data, **more)


def _predict(request: PredictRequest, environment: Environment) -> ExitCode:
    """Predict with the whole model on each rank, whatever layout trained it.

    Collective: all ranks.
    """
    job = request.loaded_job.job
    name, data = _data_of(job, request)
    with trained_engine(request, environment.world_size, environment, job) as (mesh, _, engine, saved):
        source = data if isinstance(data, Opened) else together(mesh, lambda: open_evaluation(name, data, job.collate))
        evaluator = Evaluator(engine.job, mesh, engine.precision, source, {}, name=name)
        predictions = Predictions(mesh, request.output)
        with contextlib.closing(predictions):
            together(mesh, lambda: evaluator.predict(engine.model, predict_function(job), predictions.add))
            predictions.write()
    if environment.rank == 0 and not request.quiet:
        weights = "averaged weights of step" if request.ema else "step"
        samples = f"{predictions.count} samples of {name} in {request.output}"
        print(folded(f"{request.shown} {weights} {saved.step}: {samples}"))
    return ExitCode.DONE


def _data_of(job: Job, request: PredictRequest) -> tuple[str, Any]:
    """Return the requested data and their name. Raises: CommandError if the job does not have them."""
    if request.handed is not None:
        return "data", request.handed.fetch(None)
    sets = job.evaluation_sets
    if request.data == _TRAIN and _TRAIN not in sets:
        return "train_data", job.train_data
    if request.data in sets and request.data:
        return said_of(request.data), sets[request.data]
    if request.data in (None, _EVAL) and len(sets) == 1:
        name, data = next(iter(sets.items()))
        return said_of(name), data
    known = [name for name in sets if name] or [_EVAL] * bool(sets)
    given = "no --data" if request.data is None else f"--data {request.data}"
    raise CommandError(
        given=f"shoal predict {request.job.target} with {given}",
        conflict=f"the job has {', '.join([*known, _TRAIN])}{nearest(request.data or '', [*known, _TRAIN])}",
        remedy=f"write --data {next(iter(known), _TRAIN)}",
    )
