"""The `shoal evaluate` command: a job's evaluation on a checkpoint's weights, with any number of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from shoal.cli.options import EvaluateOptions
from shoal.cli.trained_engine import EvaluateRequest, handed_over, in_ranks, on_this_host, trained_engine
from shoal.distributed.worker_process import as_rank
from shoal.errors import CommandError, ExitCode
from shoal.jobs.job_file import JobRequest, parse_target
from shoal.launch.environment import Environment, inside_run
from shoal.launch.environments.detect import joined
from shoal.plans.plan import described
from shoal.plans.resolve import Judged
from shoal.runs.address import is_address
from shoal.runs.directory import write_file
from shoal.runs.request import devices_here


def evaluate(options: EvaluateOptions) -> ExitCode:
    """Evaluate as a rank, or start ranks on this host that do. Raises: ShoalError."""
    request = handed_over(EvaluateRequest)
    with contextlib.nullcontext(request) if request is not None else on_this_host(evaluate_request(options)) as found:
        environment = joined(os.environ)
        devices = environment.world_size if environment else options.devices or devices_here()
        if environment is None and devices > 1:
            ended = in_ranks(found, "evaluate", devices)
            if ended.error is not None:
                print(ended.error.render(), file=sys.stderr)
            return ExitCode(ended.code)
        at = environment or Environment()
        with inside_run(os.environ):
            return as_rank(at, lambda: _evaluate(found, options.devices or devices, at))


def evaluate_request(options: EvaluateOptions, result: Path | None = None) -> EvaluateRequest:
    """Create the request from options. Raises: JobFileError, SettingError."""
    job = options.job if isinstance(options.job, JobRequest) else parse_target(options.job, options.set)
    address = options.run if is_address(options.run) else None
    return EvaluateRequest(job, Path(options.run), options.step, options.ema, address, options.json, result)


def _evaluate(request: EvaluateRequest, devices: int, environment: Environment) -> ExitCode:
    job = request.loaded_job.job
    if job.eval_data is None:
        raise CommandError(
            given=f"shoal evaluate {request.job.target}",
            conflict="the job has no eval_data",
            remedy="give Job(eval_data=...) what is to be evaluated",
        )
    with trained_engine(request, devices, environment, job) as (mesh, found, engine, saved):
        metrics, count = engine.evaluator.evaluate(engine.model)
        engine.strategy.rest()
        if mesh.rank == 0:
            _show({"run": request.shown, "step": saved.step, "samples": count, "metrics": metrics}, request, found)
    return ExitCode.DONE


def _show(document: dict[str, Any], request: EvaluateRequest, found: Judged) -> None:
    if request.result is not None:
        write_file(request.result, json.dumps(document))
        return
    if request.json:
        print(json.dumps(document), flush=True)
        return
    weights = "averaged weights of step" if request.ema else "step"
    layout = described(found.plan)
    print(f"{request.shown} {weights} {document['step']}, {layout}: {document['samples']} samples evaluated")
    for name, value in document["metrics"].items():
        print(f"  {name} {value:.6g}")
    sys.stdout.flush()
