"""Preflight checks: a plan judged against its job and the job's model, and ranks that run the same, before a step."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.data.opened import training_data
from shoal.data.source import MapSource
from shoal.distributed.failures import as_shoal_error, to_json
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, LaunchError
from shoal.job import Job
from shoal.parallel.model.model_facts import facts_of
from shoal.parallel.model.repeated_blocks import repeated_blocks
from shoal.plans.legal import ModelFacts
from shoal.plans.plan import Plan
from shoal.plans.resolve import Judged, judge
from shoal.runs.handover import dumped
from shoal.runs.job_file import LoadedJob, load
from shoal.runs.request import RunRequest
from shoal.runs.version import __version__


def look(request: RunRequest) -> dict[str, Any]:
    """A request with its plan judged for its loaded job, or the error for which no rank is started; as JSON."""
    try:
        found = judged(load(request.job).job, request.plan, request.wishes.max_microbatch)
        return {"request": dumped(replace(request, judged=found))}
    except (Exception, SystemExit) as caught:
        return {"error": {**to_json(as_shoal_error(caught), 0, platform.node()), "rank": None}}


def judged(job: Job, plan: Plan, max_microbatch: int | None = None) -> Judged:
    """The plan judged for a job; where the layout divides the model that is built without weights.

    Raises: PlanError with every conflict at once, each with the nearest legal values.
    """
    model = outline(job) if plan.degrees.shares_grains > 1 else None
    return judge(plan, _facts(job, plan, model), max_microbatch)


def refuse_other_grains(found: Judged, job: Job) -> None:
    """Raises: JobError where this process has loaded another job than the one that the plan was judged for."""
    if (found.num_grains, found.grain_size) != (job.grains, job.grain_size):
        raise JobError(
            given=f"grains={job.grains} of {job.grain_size} samples in this process",
            conflict=f"the plan was judged for the same file with grains={found.num_grains} of {found.grain_size}",
            remedy="write a job file that makes the same job in every process, whatever its environment",
        )


def outline(job: Job) -> nn.Module | None:
    """The job's model without values; None where its constructor computes with them, and only building it tells."""
    try:
        with torch.device("meta"):
            model = job.model()
    except Exception:
        return None
    return model if isinstance(model, nn.Module) else None


def _facts(job: Job, plan: Plan, model: nn.Module | None) -> ModelFacts:
    if model is None:
        return ModelFacts(job.grains, job.grain_size)
    batch = one_grain(job) if plan.layout.context > 1 else None
    facts = facts_of(model, batch, num_grains=job.grains, grain_size=job.grain_size)
    return replace(facts, repeats=bool(repeated_blocks(model)))


def one_grain(job: Job) -> Any:
    """A batch of the first samples, for the length of their sequences; None of a stream, which is not begun."""
    source = training_data(job).source
    if not isinstance(source, MapSource):
        return None
    return source.fetch([np.arange(min(len(source), job.grain_size))], [0])


def shake_hands(mesh: Mesh, loaded: LoadedJob, request: RunRequest) -> None:
    """Compares versions, job, plan and device of all ranks. Raises and collective: as `refuse_differences`."""
    mine = {
        "shoal": __version__,
        "torch": torch.__version__,
        "job": loaded.job.describe(),
        "settings": loaded.settings,
        "plan": request.plan.to_mapping(),
        "--max-microbatch": request.wishes.max_microbatch,
        "device": mesh.device.type,
    }
    refuse_differences(mesh, mine)


def refuse_differences(mesh: Mesh, mine: dict[str, Any]) -> None:
    """Compares values under the same names on all ranks. Raises: LaunchError, on every rank, for the first difference.

    Collective: all ranks, one JSON gather of a digest, and where they differ another.
    """
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(mesh.gather_json(digest))) == 1:
        return
    told = mesh.gather_json({**mine, "host": mesh.host})
    for rank, other in enumerate(told):
        differing = [name for name in mine if other[name] != told[0][name]]
        if differing:
            name = differing[0]
            theirs, first = _apart(other[name], told[0][name]), _apart(told[0][name], other[name])
            raise LaunchError(
                given=f"rank {rank} on {other['host']}: {name} = {str(theirs)[:200]}",
                conflict=f"rank 0 on {told[0]['host']} has {name} = {str(first)[:200]}",
                remedy="start every rank with the same files, versions and arguments",
            )


def _apart(value: Any, beside: Any) -> Any:
    """Of a mapping the entries that another has not; anything else whole."""
    if not isinstance(value, dict) or not isinstance(beside, dict):
        return value
    return {key: _apart(one, beside.get(key)) for key, one in value.items() if beside.get(key) != one}
