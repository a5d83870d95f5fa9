"""Preflight checks before the first step: the plan against the job and its model, and the ranks against each other."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.data.opened import training_data
from shoal.data.quarantine import Quarantine
from shoal.data.source import MapSource, digest_of_samples
from shoal.distributed.failures import as_shoal_error, to_json
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, LaunchError
from shoal.jobs.differences import ABSENT, differences
from shoal.jobs.job import Job
from shoal.jobs.job_file import LoadedJob, load
from shoal.launch.supervise.host_process import MOST_APART_SECONDS
from shoal.parallel.model.structure import facts_of, repeated_blocks
from shoal.plans.legal import ModelFacts
from shoal.plans.plan import Plan
from shoal.plans.resolve import Judged, judge
from shoal.runs.request import RunRequest, dumped
from shoal.runs.version import __version__
from shoal.training.setup.default_grains import grains_of, outline

_MOST_LINES = 64
_SAME_EVERYWHERE = "start every rank with the same files, versions and arguments, on hosts whose clocks agree"
_WHOLE_DATA = (
    "give every rank the whole data, which shoal divides: leave out RANK, WORLD_SIZE and get_rank(); start every rank "
    "with the same files"
)
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def look(request: RunRequest) -> dict[str, Any]:
    """Return, as JSON, the request with its judged plan, or the error that prevents the start of any rank."""
    try:
        judged = judged_for(request, load(request.what.job).job)
        return {"request": dumped(replace(request, what=replace(request.what, judged=judged)))}
    except (Exception, SystemExit) as caught:
        return {"error": {**to_json(as_shoal_error(caught), 0, platform.node()), "rank": None}}


def judged_for(request: RunRequest, job: Job) -> Judged:
    """Return the request's plan, judged for its job. A resumed run keeps its number of grains. Raises: as `judged`."""
    recorded = request.what.recorded_grains
    if job.grains is None and recorded is not None:
        job = replace(job, grains=recorded)
        return replace(judged(job, request.what.plan, request.what.max_microbatch), why_grains="as the run began")
    return judged(job, request.what.plan, request.what.max_microbatch)


def judged(job: Job, plan: Plan, max_microbatch: int | None = None) -> Judged:
    """Return the plan, judged for a job. If the layout divides the model, it is built without weights.

    Raises: PlanError with all conflicts, each with the nearest legal values.
    """
    divided = plan.degrees.shares_grains > 1
    model = outline(job) if divided or job.grains is None else None
    grains = grains_of(job, model)
    job = replace(job, grains=grains.num_grains)
    return replace(judge(plan, _facts(job, plan, model if divided else None), max_microbatch), why_grains=grains.why)


def with_judged_grains(found: Judged, job: Job) -> Job:
    """Return the job with the number of grains that its plan was judged for.

    Raises: JobError if this process has loaded a different job.
    """
    same = job if job.grains is not None else replace(job, grains=found.num_grains)
    if (found.num_grains, found.grain_size) != (same.num_grains, same.grain_size):
        raise JobError(
            given=f"grains={same.grains} of {same.grain_size} samples in this process",
            conflict=f"the plan was judged for the same file with grains={found.num_grains} of {found.grain_size}",
            remedy="write a job file that makes the same job in every process, whatever its environment",
        )
    return same


def _facts(job: Job, plan: Plan, model: nn.Module | None) -> ModelFacts:
    if model is None:
        return ModelFacts(job.num_grains, job.grain_size)
    batch = one_grain(job) if plan.layout.context > 1 else None
    facts = facts_of(model, batch, num_grains=job.num_grains, grain_size=job.grain_size)
    return replace(facts, repeats=bool(repeated_blocks(model)))


def one_grain(job: Job) -> Any:
    """Return a batch of the first grain's samples to measure sequence lengths, or None for a stream.

    Other samples replace unreadable samples here: the run itself decides later whether to skip them.
    """
    source = training_data(job).source
    if not isinstance(source, MapSource):
        return None
    return source.looked_at(np.arange(min(len(source), job.grain_size)), Quarantine(len(source)))


def shake_hands(mesh: Mesh, loaded: LoadedJob, request: RunRequest) -> None:
    """Compare versions, code, job, options, plan, device and clock of all ranks.

    Raises: LaunchError. Collective: all ranks, as `refuse_differences`, and two JSON gathers for the clocks.
    """
    mine = {
        "shoal": __version__,
        "torch": torch.__version__,
        "job": loaded.job.describe(),
        "callbacks": [type(callback).__name__ for callback in loaded.job.callbacks],
        "settings": loaded.settings,
        "code": loaded.code,
        "plan": request.what.plan.to_mapping(),
        "--max-microbatch": request.what.max_microbatch,
        **request.course.compared(),
        "device": mesh.device.type,
    }
    refuse_differences(mesh, mine, _clocks_apart(mesh))


def _clocks_apart(mesh: Mesh) -> dict[int, float]:
    """Return the seconds by which ranks' clocks are ahead of rank 0's, for ranks beyond the tolerance."""
    if mesh.world_size == 1:
        return {}
    mesh.gather_json(None)  # all ranks return from a gather at nearly the same time
    clocks = mesh.gather_json(time.time())
    apart = {rank: clock - clocks[0] for rank, clock in enumerate(clocks)}
    return {rank: seconds for rank, seconds in apart.items() if abs(seconds) > MOST_APART_SECONDS}


def refuse_differences(
    mesh: Mesh, mine: dict[str, Any], clocks: Mapping[int, float] | None = None, remedy: str = _SAME_EVERYWHERE
) -> None:
    """Compare named values on all ranks, and raise LaunchError with all differences on every rank.

    `clocks`: seconds by which a rank's clock is ahead of rank 0's, for ranks that differ; the same on all ranks.
    `remedy`: the error's advice.
    Collective: all ranks, one JSON gather of a digest, and a second gather if the digests differ.
    """
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(mesh.gather_json(digest))) == 1 and not clocks:
        return
    told = mesh.gather_json({**mine, "host": mesh.host})
    found: dict[tuple[str, str], list[int]] = {}  # ranks of one host usually differ in the same way
    first: dict[str, None] = {}
    for rank, other in enumerate(told):
        for name in (name for name in mine if other[name] != told[0][name]):
            theirs, here = other[name], told[0][name]
            if isinstance(theirs, dict) and isinstance(here, dict):
                parts = differences(theirs, here)
                theirs = {one.name: one.mine for one in parts if one.mine is not ABSENT}
                here = {one.name: one.theirs for one in parts if one.theirs is not ABSENT}
            found.setdefault((other["host"], f"{name} = {str(theirs)[:200]}"), []).append(rank)
            first[f"{name} = {str(here)[:200]}"] = None
    for rank, seconds in (clocks or {}).items():
        way = "ahead of" if seconds > 0 else "behind"
        found.setdefault((told[rank]["host"], f"its clock is {abs(seconds):.0f} s {way} rank 0's"), []).append(rank)
        first[f"time = {datetime.now(UTC).isoformat(timespec='seconds')}"] = None
    lines = [f"rank {', '.join(map(str, ranks[:16]))} on {host}: {what}" for (host, what), ranks in found.items()]
    raise LaunchError(
        given="\n".join(lines[:_MOST_LINES]),
        conflict=f"rank 0 on {told[0]['host']} has {'; '.join(first)}",
        remedy=remedy,
    )


def compare_models(mesh: Mesh, model: nn.Module) -> None:
    """Compare the structure of the model on all ranks. Raises and collective: as `refuse_differences`."""
    refuse_differences(mesh, {"the model's structure": _structure(model)})


def _structure(model: nn.Module) -> dict[str, str]:
    """Return class, tensors and, for torch's own classes, printed arguments of each module by name."""
    found = {}
    for name, module in model.named_modules():
        kind = type(module)
        said = _ADDRESS.sub("", module.extra_repr()) if kind.__module__.startswith("torch.") else ""
        held = {**module._parameters, **module._buffers}
        tensors = [f"{n} {t.dtype} {list(t.shape)} {t.requires_grad}" for n, t in held.items() if t is not None]
        found[name or "(model)"] = f"{kind.__name__}({said}) {'; '.join(tensors)}"
    return found


def compare_data(mesh: Mesh, source: Any, workers: int) -> None:
    """Compare the number of samples and a few samples on all ranks. Raises and collective: as `refuse_differences`.

    The check excludes streams, which must not be started, and samples that change when they are read again. If worker
    processes read the data, it compares no samples, since the files must not be opened here.
    """
    if mesh.world_size == 1 or not isinstance(source, MapSource):
        return
    refuse_differences(mesh, {"len(train_data)": len(source)}, remedy=_WHOLE_DATA)
    digest = None if workers else _some(source)
    if None not in mesh.gather_json(digest):
        refuse_differences(mesh, {"some samples of train_data, their SHA-256": digest}, remedy=_WHOLE_DATA)


def _some(source: MapSource) -> str | None:
    """Return a digest of a few samples, or None if they cannot be read or change between reads."""
    ids = np.unique(np.linspace(0, len(source) - 1, 3).astype(np.int64))
    try:
        with source.looks():  # one context: a generator in the dataset advances from read to read
            digests = {digest_of_samples(source.fetch([ids], [0])) for _ in range(2)}
    except Exception:
        return None
    return digests.pop() if len(digests) == 1 else None
