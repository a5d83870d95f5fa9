"""Services of trackers: each opens a run, logs metrics, and closes the run. Packages are imported on use."""

from __future__ import annotations

import importlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.jobs.differences import flat

# Step numbers, with metrics by name.
Metrics = Sequence[tuple[int, Mapping[str, float]]]


@dataclass(frozen=True)
class TrackedRun:
    """Run for a tracker. `where`: from `--track NAME:WHERE`. `out`: run directory. `about`: settings, plan and job."""

    where: str | None
    out: Path | None
    name: str
    about: Mapping[str, Any]
    first_step: int


class Service(ABC):
    """Interface of a tracker's service."""

    @abstractmethod
    def open(self, run: TrackedRun, identity: str | None) -> str:
        """Open a run, or continue the run with the given identity; return the identity."""

    @abstractmethod
    def log(self, metrics: Metrics) -> None:
        """Log metrics of steps."""

    @abstractmethod
    def close(self, result: Mapping[str, Any]) -> None:
        """End the run with its result."""


class TensorBoard(Service):
    """Event files in a folder, by default `tensorboard` in the run directory."""

    def open(self, run: TrackedRun, identity: str | None) -> str:
        """Open the event files, and hide entries of steps that are trained again."""
        folder = Path(run.where) / run.name if run.where else (run.out or Path()) / "tensorboard"
        purge = run.first_step + 1 if run.first_step else None
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=purge)
        rows = "\n".join(f"| {name} | {value} |" for name, value in flat(run.about))
        self._writer.add_text("run", f"| | |\n|---|---|\n{rows}", run.first_step)
        return str(folder)

    def log(self, metrics: Metrics) -> None:
        for step, values in metrics:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, result: Mapping[str, Any]) -> None:
        self._writer.add_text("result", "\n".join(f"- {name}: {value}" for name, value in result.items()))
        self._writer.close()


class MLflow(Service):
    """A run of an MLflow experiment. `where` is a tracking URI; default: MLFLOW_TRACKING_URI or MLflow's own."""

    def open(self, run: TrackedRun, identity: str | None) -> str:
        self._client, self._entities = (importlib.import_module(f"mlflow.{name}") for name in ("client", "entities"))
        self._client = self._client.MlflowClient(tracking_uri=run.where)
        known = identity or os.environ.get("MLFLOW_RUN_ID")
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return known
        name = os.environ.get("MLFLOW_RUN_NAME", run.name)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shoal")
            known_experiment = self._client.get_experiment_by_name(title)
            create = self._client.create_experiment
            experiment = str(create(title) if known_experiment is None else known_experiment.experiment_id)
        self._id = str(self._client.create_run(experiment, run_name=name).info.run_id)
        params = [self._entities.Param(key, str(value)[:500]) for key, value in flat(run.about)]
        for first in range(0, len(params), 100):  # the server's limit per request
            self._client.log_batch(self._id, params=params[first : first + 100])
        return self._id

    def log(self, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        entries = [
            self._entities.Metric(name, value, now, step) for step, values in metrics for name, value in values.items()
        ]
        for first in range(0, len(entries), 1000):
            self._client.log_batch(self._id, metrics=entries[first : first + 1000])

    def close(self, result: Mapping[str, Any]) -> None:
        for name, value in result.items():
            self._client.set_tag(self._id, f"result.{name}", str(value)[:5000])
        status = {"completed": "FINISHED", "preempted": "KILLED"}.get(result["status"], "FAILED")
        self._client.set_terminated(self._id, status)


class WeightsAndBiases(Service):
    """A run of Weights & Biases. `where` is a project; default: WANDB_PROJECT or "shoal". The package reads WANDB_*."""

    def open(self, run: TrackedRun, identity: str | None) -> str:
        known: dict[str, Any] = {"id": identity, "resume": "allow"} if identity is not None else {}
        self._run = importlib.import_module("wandb").init(
            project=run.where or os.environ.get("WANDB_PROJECT", "shoal"),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=os.environ.get("WANDB_DIR", str(run.out or Path())),
            config=json.loads(json.dumps(run.about, default=str)),
            **known,
        )
        return str(self._run.id)

    def log(self, metrics: Metrics) -> None:
        for step, values in metrics:
            self._run.log(dict(values), step=step)

    def close(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update({f"result/{name}": value for name, value in result.items()})
        self._run.finish(exit_code=0 if result["status"] != "failed" else 1)


class Trackio(Service):
    """A run of Trackio. `where` is a project; default: TRACKIO_PROJECT or "shoal". The package reads TRACKIO_*."""

    def open(self, run: TrackedRun, identity: str | None) -> str:
        project = run.where or os.environ.get("TRACKIO_PROJECT", "shoal")
        name = identity or os.environ.get("TRACKIO_NAME", run.name)
        config = json.loads(json.dumps(dict(flat(run.about)), default=str))
        self._run = importlib.import_module("trackio").init(
            project=project, name=name, config=config, resume="allow", embed=False
        )
        return str(name)

    def log(self, metrics: Metrics) -> None:
        for step, values in metrics:
            self._run.log(dict(values), step=step)

    def close(self, result: Mapping[str, Any]) -> None:
        self._run.log({f"result/{name}": value for name, value in result.items()})
        self._run.finish()


SERVICES: dict[str, Callable[[], Service]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
