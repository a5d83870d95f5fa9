"""The `shoal evaluate` command: a job's evaluation on the weights of a checkpoint, by any number of ranks."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.callback_state import AVERAGES
from shoal.checkpoint.manifest import ManifestError
from shoal.checkpoint.pieces import fill, refuse_other_model
from shoal.checkpoint.store import SavedCheckpoint
from shoal.checkpoint.weights import averages, damaged, find
from shoal.cli.export import run_of, step_of
from shoal.cli.options import EvaluateOptions
from shoal.data.opened import opened
from shoal.distributed.agreement import decided_by_rank_0, together
from shoal.distributed.mesh import Mesh, open_mesh
from shoal.distributed.process_setup import prepare_process
from shoal.distributed.worker_process import as_rank
from shoal.errors import CommandError, ExitCode
from shoal.hardware.detect import cores
from shoal.job import Job
from shoal.launch.environment import Environment, inside_run
from shoal.launch.environments.detect import joined
from shoal.launch.local import launch
from shoal.launch.rank_processes import LocalRun
from shoal.parallel.model.sharded_model import TensorSlices
from shoal.plans import Plan
from shoal.plans.plan import ServerSection, described, read_plan
from shoal.plans.relaid import relaid
from shoal.plans.resolve import Judged
from shoal.runs.directory import read_json
from shoal.runs.job_file import LoadedJob, load, parse_target
from shoal.runs.request import devices_here
from shoal.training.engine import Options, build
from shoal.training.preflight import judged, with_judged_grains


def evaluate(options: EvaluateOptions) -> ExitCode:
    """Evaluates, as a rank or with ranks on this host that it starts. Raises: ShoalError."""
    environment = joined(os.environ)
    devices = options.devices or (environment.world_size if environment else devices_here())
    plan = _plan(Path(options.run), devices)
    if environment is not None or devices == 1:
        at = environment or Environment()
        with inside_run(os.environ):
            return as_rank(at, lambda: _evaluate(options, plan, at))
    find(Path(options.run), step_of(options.step))  # before any rank is started
    logs = run_of(Path(options.run)).path / "logs"
    threads = 1 if plan.execution.exact else max(1, cores() // devices)
    code, error, _ = launch(LocalRun(_arguments(options, devices), devices, threads, logs))
    if error is not None:
        print(error.render(), file=sys.stderr)
    return ExitCode(code)


def _arguments(options: EvaluateOptions, devices: int) -> list[str]:
    settings = [text for setting in options.set for text in ("--set", setting)]
    own = ["evaluate", options.job, options.run, "--step", options.step, "--devices", str(devices), *settings]
    return [*own, *(["--ema"] if options.ema else []), *(["--json"] if options.json else [])]


def _plan(run: Path, devices: int) -> Plan:
    """The run's plan on so many devices, without what is about updates alone."""
    kept = run_of(run).plan
    plan = read_plan(kept) if kept.exists() else Plan()
    return relaid(plan.model_copy(update={"server": ServerSection()}).uncompressed, devices)


def _job(options: EvaluateOptions) -> LoadedJob:
    """The job with the settings and the number of grains of the run, where this call does not say."""
    of_run = read_json(run_of(Path(options.run)).job) or {}
    request = parse_target(options.job, options.set)
    loaded = load(replace(request, settings=tuple({**of_run.get("given", {}), **dict(request.settings)}.items())))
    grains = of_run.get("grains")
    if loaded.job.grains is None and grains is not None:
        return replace(loaded, job=replace(loaded.job, grains=grains))  # or the default is looked for
    return loaded


def _evaluate(options: EvaluateOptions, plan: Plan, environment: Environment) -> ExitCode:
    prepare_process(plan.execution.exact, max(1, cores() // environment.local_world_size))
    loaded = _job(options)
    with open_mesh(environment, plan.degrees) as mesh:
        found = decided_by_rank_0(mesh, Judged, lambda: judged(loaded.job, plan))

        def own() -> Job:
            if loaded.job.eval_data is None:
                raise CommandError(
                    given=f"shoal evaluate {options.job}",
                    conflict="the job has no eval_data",
                    remedy="give Job(eval_data=...) what is to be evaluated",
                )
            return opened(with_judged_grains(found, loaded.job))

        loaded = replace(loaded, job=together(mesh, own))
        document = _evaluated(mesh, found, loaded, options)
        if mesh.rank == 0:
            _show(document, options, found)
    return ExitCode.DONE


def _evaluated(mesh: Mesh, found: Judged, loaded: LoadedJob, options: EvaluateOptions) -> dict[str, Any]:
    """What `--json` prints. Collective: all ranks."""
    engine = build(loaded.job, found.plan, mesh, Options(telemetry=False, take_workers=True))
    try:
        saved = together(mesh, lambda: find(Path(options.run), step_of(options.step)))

        def take_up() -> None:
            held = engine.sharded_model.tensors()
            refuse_other_model(saved, held, engine.sharded_model.absent())
            _fill(saved, held, options.ema)

        together(mesh, take_up)
        metrics, count = engine.evaluator.evaluate(engine.model)
        engine.strategy.rest()
    finally:
        engine.close()
    return {"run": options.run, "step": saved.step, "samples": count, "metrics": metrics}


def _fill(saved: SavedCheckpoint, held: TensorSlices, ema: bool) -> None:
    averaged = averages(saved) if ema else {}
    try:
        fill(saved, "model", held)
        fill(saved, AVERAGES, {name: target for name, target in held.items() if name in averaged})
    except ManifestError as error:
        raise damaged(saved.folder, error) from error


def _show(document: dict[str, Any], options: EvaluateOptions, found: Judged) -> None:
    if options.json:
        print(json.dumps(document), flush=True)
        return
    print(f"{options.run} step {document['step']}, {described(found.plan)}: {document['samples']} samples evaluated")
    for name, value in document["metrics"].items():
        print(f"  {name} {value:.6g}")
    sys.stdout.flush()
