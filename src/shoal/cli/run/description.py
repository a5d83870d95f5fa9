"""Description of a run in its directory: job.json, the plan and the model's configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shoal.distributed.process_setup import versions
from shoal.errors import RunDirectoryError
from shoal.jobs.job_file import LoadedJob
from shoal.jobs.read_files import digests_of
from shoal.parallel.model.adapters.transformers import save_config
from shoal.plans.plan import Plan, plan_text
from shoal.runs.certificate import Certificate
from shoal.runs.directory import RunDirectory
from shoal.runs.generation import Fence
from shoal.runs.request import RunRequest
from shoal.training.setup.data_digests import data_digests
from shoal.training.setup.engine import Engine


def describe(
    loaded: LoadedJob, engine: Engine, request: RunRequest, why_grains: str, saved: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the content of job.json: numbers and names that describe the training.

    `saved`: job.json of the run to resume. Restarted ranks, and all ranks but rank 0, copy the digests of data and
        files from it.
    """
    if request.restarts or engine.mesh.rank != 0:
        digests = {name: (saved or {}).get(name, {}) for name in ("files", "data")}
    else:
        digests = {
            "files": digests_of(loaded.files, request.what.job.module.folders),
            "data": data_digests(engine, (saved or {}).get("data", {})),
        }
    shapes = "\n".join(f"{name} {list(shape)}" for name, shape in engine.sharded_model.shapes().items())
    return {
        "file": str(request.what.job.path),
        "file_sha256": loaded.file_sha256,
        "module": loaded.module,
        "function": loaded.function,
        "settings": loaded.settings,
        "code": loaded.code,
        **digests,
        "given": dict(request.what.job.settings),
        "by_value": request.what.job.by_value,
        **request.course.saved(),
        **loaded.job.describe(),
        "why_grains": why_grains,
        "train_samples": engine.num_train_samples,
        "parameters": engine.num_parameters,
        "shapes_sha256": hashlib.sha256(shapes.encode()).hexdigest(),
        "versions": versions(),
    }


def initial_weights_of(engine: Engine, saved: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the entry of job.json on external initial weights, from this call or the resumed run."""
    if engine.taken is not None:
        return engine.taken.to_json()
    entry: dict[str, Any] | None = (saved or {}).get("initial_weights")
    return entry


def without_initial_weights(began: dict[str, Any]) -> RunDirectoryError:
    """Create the error for a resume that has neither a checkpoint nor the run's initial weights."""
    return RunDirectoryError(
        given="--resume of a run without any checkpoint",
        conflict=f"it began with weights of {began['from']} (SHA-256 {began['sha256']}), which no checkpoint has",
        remedy=f"start anew with --init-from {began['from']} and another --out",
    )


def certified(request: RunRequest, loaded: LoadedJob, plan: Plan) -> str | None:
    """Return the SHA-256 of the required certificate. Raises: CertificateError if it does not cover this run."""
    if request.course.require_certificate is None:
        return None
    certificate = Certificate.read(Path(request.course.require_certificate))
    certificate.check(loaded.describe(), plan.to_mapping(), versions())
    return certificate.sha256


def write_description(directory: RunDirectory, engine: Engine, description: dict[str, Any], fence: Fence) -> None:
    """Write the files for the generation that is about to train. Raises: OSError; FencedError; StorageError."""
    directory.path.mkdir(parents=True, exist_ok=True)
    fence.write(directory.plan, plan_text(engine.plan))
    save_config(engine.model, directory.model, engine.sharded_model.shapes())
    fence.write(directory.job, json.dumps(description, indent=2) + "\n")
    engine.keeper.send()
