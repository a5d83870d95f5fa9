"""Admission: a plan judged against its job and the job's model, and completed, before any rank computes."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shoal.data.opened import training_data
from shoal.data.source import MapSource
from shoal.distributed.failures import as_shoal_error, to_json, user_error
from shoal.distributed.mesh import Mesh
from shoal.errors import LaunchError
from shoal.job import Job
from shoal.parallel.model.model_facts import facts_of
from shoal.parallel.model.repeated_blocks import repeated_blocks
from shoal.plans.legal import ModelFacts, conflicts, notes, refuse
from shoal.plans.plan import Plan
from shoal.plans.resolve import complete
from shoal.runs.job_file import LoadedJob, load
from shoal.runs.request import RunRequest
from shoal.runs.version import __version__


class Admitted(NamedTuple):
    """A complete plan, and what its layout does not give, a sentence each."""

    plan: Plan
    notes: tuple[str, ...]


def admit(request: RunRequest) -> dict[str, Any] | None:
    """The error, as a JSON value, for which no rank of this request is started; None where there is none.

    Loads the job, and builds its model without weights where the layout divides it.
    """
    try:
        job = load(request.job).job
        admitted(job, request.plan, request.wishes.max_microbatch)
    except (Exception, SystemExit) as caught:
        error = user_error("a sys.exit()", caught) if isinstance(caught, SystemExit) else as_shoal_error(caught)
        return {**to_json(error, 0, platform.node()), "rank": None}
    return None


def admitted(job: Job, plan: Plan, max_microbatch: int | None = None) -> Admitted:
    """The plan of a job, judged and completed.

    Raises: PlanError with every conflict at once, each with the nearest legal values.
    """
    model = outline(job) if plan.degrees.shares_grains > 1 else None
    facts = _facts(job, plan, model)
    if plan.layout.data * plan.layout.shard > job.grains:  # which cannot be completed
        refuse(conflicts(plan, facts))
    plan = complete(plan, job.grains, job.grain_size, max_microbatch)
    refuse(conflicts(plan, facts))
    return Admitted(plan, tuple(notes(plan, facts)))


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


def shake_hands(mesh: Mesh, loaded: LoadedJob, plan: Plan) -> None:
    """Raises: LaunchError, on every rank, where the ranks do not run the same thing."""
    mine = {
        "shoal": __version__,
        "torch": torch.__version__,
        "job": loaded.job.describe(),
        "settings": loaded.settings,
        "plan": plan.to_mapping(),
        "device": mesh.device.type,
    }
    told = mesh.gather_json({**mine, "host": mesh.host})
    for rank, other in enumerate(told):
        differing = [name for name in mine if other[name] != told[0][name]]
        if differing:
            name = differing[0]
            raise LaunchError(
                given=f"rank {rank} on {other['host']}: {name} = {str(other[name])[:200]}",
                conflict=f"rank 0 on {told[0]['host']} has {name} = {str(told[0][name])[:200]}",
                remedy="start every rank with the same files, versions and arguments",
            )
