"""Functions `shoal.export`, `shoal.evaluate` and `shoal.predict`: the commands of these names."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.finished_run import Run
from shoal.cli.from_python import JobLike, PathText, settings_of, target_of
from shoal.cli.options import EvaluateOptions, ExportOptions, PredictOptions, option_names, options_from
from shoal.errors import CommandError, ExitCode
from shoal.jobs.job_object import hand_over_value
from shoal.launch.environments.detect import refuse_rank
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import other_stream
from shoal.runs.directory import read_json
from shoal.runs.request import devices_here

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.store import Step

RunLike = PathText | Run


def export(
    run: RunLike,
    output: PathText | None = None,
    *,
    step: Step = "last",
    ema: bool = False,
    max_shard_size: str | int = "5GB",
    dtype: str | None = None,
    tokenizer: PathText | None = None,
) -> Path:
    """Export a run's weights as safetensors in the Hugging Face layout, and return the folder; as `shoal export`.

    | argument | meaning |
    |---|---|
    | `run` | a run directory, one checkpoint, or a `shoal.Run` |
    | `output` | a new folder; default: RUN/export |
    | `step` | "last", "best", or the step of a checkpoint |
    | `ema` | use the averaged weights of a run with the callback EMA |
    | `max_shard_size` | maximum size of a file: "5GB" |
    | `dtype` | "bfloat16", "float16" or "float32", for floating-point tensors |
    | `tokenizer` | a folder from which the tokenizer's files are copied |

    Raises: the errors of the command.
    """
    from shoal.cli.export import exported  # torch

    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise CommandError(
            given=f"dtype={dtype!r}",
            conflict="dtype takes 'bfloat16', 'float16' or 'float32'",
            remedy="write dtype='bfloat16', or leave it out for that of the training",
        )
    paths = {"output": output, "tokenizer": tokenizer}
    texts = {name: os.fspath(path) if path is not None else None for name, path in paths.items()}
    given = {"step": str(step), "ema": ema, "max_shard_size": str(max_shard_size), "dtype": dtype}
    return exported(options_from(ExportOptions, {"run": _path(run), **given, **texts}))[0]


def evaluate(
    job: JobLike,
    run: RunLike,
    *,
    settings: Mapping[str, Any] | None = None,
    step: Step = "last",
    ema: bool = False,
    devices: int | None = None,
    **job_settings: Any,
) -> dict[str, Any]:
    """Evaluate a job with a run's weights, and return {"metrics", "samples", "step", "run"}; as `shoal evaluate`.

    | argument | meaning |
    |---|---|
    | `job` | a job function, a `shoal.Job`, or "file.py:function" |
    | `run` | a run directory, one checkpoint, or a `shoal.Run` |
    | `settings` | parameters of the job function, also as keywords; default: the settings of the run |
    | `step` | "last", "best", or the step of a checkpoint |
    | `ema` | use the averaged weights of a run with the callback EMA |
    | `devices` | number of processes, one per GPU or on the CPU; default: all GPUs, or 1 |

    Each process is a new interpreter, as for `shoal.run`.
    Raises: the errors of the command; LaunchError inside a rank; KeyboardInterrupt.
    """
    return _evaluate(dict(locals()))


def predict(
    job: JobLike,
    run: RunLike,
    *,
    data: Any = None,
    output: PathText | None = None,
    settings: Mapping[str, Any] | None = None,
    step: Step = "last",
    ema: bool = False,
    devices: int | None = None,
    **job_settings: Any,
) -> dict[str, Tensor]:
    """Return the outputs of a run's model by name, and `ids`, with one row per sample in the order of the data.

    | argument | meaning |
    |---|---|
    | `job` | a job function, a `shoal.Job`, or "file.py:function"; its `predict` defines the outputs |
    | `run` | a run directory, one checkpoint, or a `shoal.Run` |
    | `data` | a dataset of any kind that a job takes, "train", "eval" (default), or an evaluation set's name |
    | `output` | a new file, .npz or .safetensors, for the outputs |
    | `settings` | parameters of the job function, also as keywords; default: the settings of the run |
    | `step` | "last", "best", or the step of a checkpoint |
    | `ema` | use the averaged weights of a run with the callback EMA |
    | `devices` | number of processes, each with the whole model; default: 1 |

    Each process is a new interpreter, as for `shoal.run`. The command `shoal predict` only writes the file, of any
    size.
    Raises: the errors of the command; LaunchError inside a rank; KeyboardInterrupt.
    """
    return _predict(dict(locals()))


def _evaluate(given: dict[str, Any]) -> dict[str, Any]:
    refuse_rank(os.environ, "shoal.evaluate")
    signals = Signals(impatient=False)
    with signals.handled(), tempfile.TemporaryDirectory(prefix="shoal-job-") as folder:
        options = options_from(EvaluateOptions, _values("shoal.evaluate", EvaluateOptions, given, Path(folder)))
        from shoal.cli.evaluate import evaluate_request  # torch
        from shoal.cli.trained_engine import in_ranks, on_this_host

        result = Path(folder) / "result.json"
        devices = options.devices or devices_here()
        with on_this_host(evaluate_request(options, result)) as request:
            ended = in_ranks(request, "evaluate", devices, signals, other_stream())
        _raise(ended.error, ended.code, signals)
        return read_json(result) or {}


def _predict(given: dict[str, Any]) -> dict[str, Tensor]:
    refuse_rank(os.environ, "shoal.predict")
    signals, data = Signals(impatient=False), given["data"]
    with signals.handled(), tempfile.TemporaryDirectory(prefix="shoal-job-") as folder:
        output = given["output"] if given["output"] is not None else Path(folder) / "predictions.safetensors"
        values = _values("shoal.predict", PredictOptions, given, Path(folder))
        named = data if isinstance(data, str) else None
        options = options_from(PredictOptions, {**values, "output": os.fspath(output), "data": named})
        from shoal.cli.predict import predict_request  # torch
        from shoal.cli.trained_engine import in_ranks, on_this_host
        from shoal.training.microbatch.predictions import read

        request = predict_request(options, quiet=True)
        if data is not None and named is None:
            request = replace(request, handed=hand_over_value(data, Path(folder)))
        with on_this_host(request) as here:
            ended = in_ranks(here, "predict", options.devices or 1, signals, other_stream())
        _raise(ended.error, ended.code, signals)
        return read(Path(output))


def _values(call: str, kind: Any, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options of a call by name, with the job prepared for other processes."""
    values = {name: given[name] for name in option_names(kind) if name in given}
    settings = settings_of(call, kind, given)
    return values | {"run": _path(given["run"]), "step": str(given["step"])} | target_of(given["job"], settings, folder)


def _path(run: RunLike) -> str:
    return os.fspath(run.out if isinstance(run, Run) else run)


def _raise(error: Exception | None, code: int, signals: Signals) -> None:
    """Raise the error of the processes, or KeyboardInterrupt or SystemExit if this process was stopped."""
    if signal.SIGINT in signals.received:
        raise KeyboardInterrupt
    if signals.received:
        sys.exit(int(ExitCode.INTERRUPTED))
    if error is not None:
        raise error
    if code != ExitCode.DONE:
        raise SystemExit(code)
