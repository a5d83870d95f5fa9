"""Parallel training for PyTorch: one model, any number of devices, the same training run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Public name -> the module that defines it. Modules load on first use, so that `import shoal` does not import torch.
_HOMES = {
    "__version__": "shoal.runs.version",
    "Job": "shoal.jobs.job",
    "Epochs": "shoal.jobs.job",
    "Steps": "shoal.jobs.job",
    "Samples": "shoal.jobs.job",
    "Progress": "shoal.jobs.job",
    "warmup_cosine": "shoal.jobs.job",
    "Plan": "shoal.plans",
    "Layout": "shoal.plans",
    "StepRecord": "shoal.runs.records",
    "RunRecord": "shoal.runs.records",
    "ShoalError": "shoal.errors",
    "ExitCode": "shoal.errors",
    "Callback": "shoal.training.callbacks.base",
    "EarlyStopping": "shoal.training.callbacks.ready_made",
    "LossSpikes": "shoal.training.callbacks.ready_made",
    "KeepBest": "shoal.training.callbacks.ready_made",
    "EMA": "shoal.training.callbacks.ema",
    "Sample": "shoal.training.callbacks.ready_made",
    "Schedule": "shoal.training.update.lr_schedule",
    "track": "shoal.training.trackers.tracker",
    "cross_entropy": "shoal.numerics.losses",
    "mse": "shoal.numerics.losses",
    "accuracy": "shoal.numerics.losses",
    "over_all": "shoal.numerics.over_all",
    "summed": "shoal.numerics.outputs",
    "Session": "shoal.training.session",
    "Verdict": "shoal.verification",
    "verify": "shoal.verification",
    "verify_session": "shoal.verification",
    "Parquet": "shoal.data.parquet",
    "from_spark": "shoal.data.parquet",
    "Balanced": "shoal.data.samplers",
    "ByLength": "shoal.data.samplers",
    "Curriculum": "shoal.data.samplers",
    "Mixture": "shoal.data.samplers",
    "TokenBudget": "shoal.data.samplers",
    "Weighted": "shoal.data.samplers",
    "load": "shoal.checkpoint.weights",
    "from_training_arguments": "shoal.jobs.training_arguments",
    "weights_sha256": "shoal.checkpoint",
    "Answer": "shoal.planner.answer.display",
    "Run": "shoal.cli.finished_run",
    "evaluate": "shoal.cli.from_python",
    "export": "shoal.cli.from_python",
    "observe": "shoal.programs.observer",
    "plan": "shoal.cli.from_python",
    "predict": "shoal.cli.from_python",
    "run": "shoal.cli.from_python",
}

__all__ = [
    "EMA",
    "Answer",
    "Balanced",
    "ByLength",
    "Callback",
    "Curriculum",
    "EarlyStopping",
    "Epochs",
    "ExitCode",
    "Job",
    "KeepBest",
    "Layout",
    "LossSpikes",
    "Mixture",
    "Parquet",
    "Plan",
    "Progress",
    "Run",
    "RunRecord",
    "Sample",
    "Samples",
    "Schedule",
    "Session",
    "ShoalError",
    "StepRecord",
    "Steps",
    "TokenBudget",
    "Verdict",
    "Weighted",
    "__version__",
    "accuracy",
    "cross_entropy",
    "evaluate",
    "export",
    "from_spark",
    "from_training_arguments",
    "load",
    "mse",
    "observe",
    "over_all",
    "plan",
    "predict",
    "run",
    "summed",
    "track",
    "verify",
    "verify_session",
    "warmup_cosine",
    "weights_sha256",
]

if TYPE_CHECKING:
    from shoal.checkpoint import weights_sha256
    from shoal.checkpoint.weights import load
    from shoal.cli.finished_run import Run
    from shoal.cli.from_python import evaluate, export, plan, predict, run
    from shoal.data.parquet import Parquet, from_spark
    from shoal.data.samplers import Balanced, ByLength, Curriculum, Mixture, TokenBudget, Weighted
    from shoal.errors import ExitCode, ShoalError
    from shoal.jobs.job import Epochs, Job, Progress, Samples, Steps, warmup_cosine
    from shoal.jobs.training_arguments import from_training_arguments
    from shoal.numerics.losses import accuracy, cross_entropy, mse
    from shoal.numerics.outputs import summed
    from shoal.numerics.over_all import over_all
    from shoal.planner.answer.display import Answer
    from shoal.plans import Layout, Plan
    from shoal.programs.observer import observe
    from shoal.runs.records import RunRecord, StepRecord
    from shoal.runs.version import __version__
    from shoal.training.callbacks.base import Callback
    from shoal.training.callbacks.ema import EMA
    from shoal.training.callbacks.ready_made import EarlyStopping, KeepBest, LossSpikes, Sample
    from shoal.training.session import Session
    from shoal.training.trackers.tracker import track
    from shoal.training.update.lr_schedule import Schedule
    from shoal.verification import Verdict, verify, verify_session


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = found  # cached, since a loss function looks its name up in every step
        return found
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
