"""The `shoal predict` command: writes a trained model's outputs for each sample of a dataset to one file."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from shoal.cli.export import output_of
from shoal.cli.options import PredictOptions
from shoal.cli.trained_engine import PredictRequest, handed_over, in_ranks, on_this_host, trained_engine
from shoal.data.opened import open_evaluation, said_of
from shoal.data.source import Opened
from shoal.distributed.agreement import together
from shoal.distributed.worker_process import as_rank
from shoal.errors import CommandError, ExitCode, nearest
from shoal.jobs.job import Job
from shoal.jobs.job_file import JobRequest, parse_target
from shoal.launch.environment import Environment, inside_run
from shoal.launch.environments.detect import joined, refuse_rank
from shoal.runs.address import is_address
from shoal.training.microbatch.evaluation import Evaluator
from shoal.training.microbatch.predictions import Predictions, of_first_part, refuse_file

_TRAIN, _EVAL = "train", "eval"


def predict(options: PredictOptions) -> ExitCode:
    """Predict in this process, or start ranks on this host that do. Raises: ShoalError."""
    request = handed_over(PredictRequest)
    if request is None:
        refuse_rank(os.environ, "shoal predict")
        with on_this_host(predict_request(options)) as request:
            return _predicted(request, options.devices or 1)
    return _predicted(request, 1)


def _predicted(request: PredictRequest, devices: int) -> ExitCode:
    if devices > 1:
        ended = in_ranks(request, "predict", devices)
        if ended.error is not None:
            print(ended.error.render(), file=sys.stderr)
        return ExitCode(ended.code)
    environment = joined(os.environ) or Environment()
    with inside_run(os.environ):
        return as_rank(environment, lambda: _predict(request, environment))


def predict_request(options: PredictOptions, **more: Any) -> PredictRequest:
    """Create the request from options. Raises: JobFileError, SettingError, CommandError."""
    job = options.job if isinstance(options.job, JobRequest) else parse_target(options.job, options.set)
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
            function = job.predict or of_first_part
            together(mesh, lambda: evaluator.predict(engine.model, function, predictions.add))
            predictions.write()
    if environment.rank == 0 and not request.quiet:
        weights = "averaged weights of step" if request.ema else "step"
        print(f"{request.shown} {weights} {saved.step}: {predictions.count} samples of {name} in {request.output}")
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
