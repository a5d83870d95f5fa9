"""Preflight checks before the first step: the plan against the job and its model, and the ranks against each other.

A resume also compares digests of the job's data with those of the run.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.data.order import spread
from shoal.data.source import MapSource, Opened, Source, TensorSource, digest_of_samples, one_grain
from shoal.distributed.failures import as_shoal_error, to_json
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, LaunchError
from shoal.jobs.differences import ABSENT, differences
from shoal.jobs.job import Job
from shoal.jobs.job_file import LoadedJob, load
from shoal.launch.supervise.child import look_in_child
from shoal.launch.supervise.host_process import MOST_APART_SECONDS
from shoal.parallel.model.structure import facts_of, repeated_blocks
from shoal.plans.legal import ModelFacts
from shoal.plans.plan import Plan
from shoal.plans.resolve import Judged, judge
from shoal.runs.request import RunRequest, dumped
from shoal.runs.version import __version__
from shoal.training.setup.job_model import grains_of, outline

_MOST_LINES = 64
_SAME_EVERYWHERE = "start every rank with the same files, versions and arguments, on hosts whose clocks agree"
_WHOLE_DATA = (
    "give every rank the whole data, which shoal divides: leave out RANK, WORLD_SIZE and get_rank(); start every rank "
    "with the same files"
)
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Samples in each part of a data set's digest, and the time within which the last part has to start.
_PARTS = (1, 1, 2, 4, 8, 16, 32, 64, 128)
_SECONDS = 0.2
_CHILD_SECONDS = 10.0


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
    divided = plan.layout.shares_grains > 1 or plan.layout.expert > 1
    model, why = outline(job) if divided or job.grains is None else None, "as the job says"
    if job.grains is None:
        grains = grains_of(job, model)
        job, why = replace(job, grains=grains.num_grains), grains.why
    facts = facts_of_job(job)
    if divided and model is not None:
        batch = one_grain(job) if plan.layout.context > 1 else None
        known = facts_of(model, batch, num_grains=job.num_grains, grain_size=job.grain_size)
        known = replace(known, has_global_loss=facts.has_global_loss, has_global_norm=facts.has_global_norm)
        facts = replace(known, repeats=bool(repeated_blocks(model)))
    return replace(judge(plan, facts, max_microbatch), why_grains=why)


def facts_of_job(job: Job) -> ModelFacts:
    """Return the limits of a layout that follow from the job without its model."""
    loss, norm = job.outputs is not None, job.batch_norm == "batch"
    return ModelFacts(job.num_grains, job.grain_size, has_global_loss=loss, has_global_norm=norm)


def with_judged_grains(judgement: Judged, job: Job) -> Job:
    """Return the job with the number of grains that its plan was judged for.

    Raises: JobError if this process has loaded a different job.
    """
    same = job if job.grains is not None else replace(job, grains=judgement.num_grains)
    if (judgement.num_grains, judgement.grain_size) != (same.num_grains, same.grain_size):
        raise JobError(
            given=f"grains={same.grains} of {same.grain_size} samples in this process",
            conflict=f"the plan was judged for the same file with grains={judgement.num_grains} of "
            f"{judgement.grain_size}",
            remedy="write a job file that makes the same job in every process, whatever its environment",
        )
    return same


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
        "--share-gpu": request.where.shares_gpu,
        **request.course.compared(),
        "device": mesh.device.type,
    }
    apart: dict[int, float] = {}
    if mesh.world_size > 1:
        mesh.gather_json(None)  # all ranks return from a gather at nearly the same time
        clocks = mesh.gather_json(time.time())
        apart = {rank: clock - clocks[0] for rank, clock in enumerate(clocks)}
    refuse_differences(mesh, mine, {rank: s for rank, s in apart.items() if abs(s) > MOST_APART_SECONDS})


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
    rows = mesh.gather_json({**mine, "host": mesh.host})
    differing: dict[tuple[str, str], list[int]] = {}  # ranks of one host usually differ in the same way
    first: dict[str, None] = {}
    for rank, other in enumerate(rows):
        for name in (name for name in mine if other[name] != rows[0][name]):
            theirs, here = other[name], rows[0][name]
            if isinstance(theirs, dict) and isinstance(here, dict):
                parts = differences(theirs, here)
                theirs = {one.name: one.mine for one in parts if one.mine is not ABSENT}
                here = {one.name: one.theirs for one in parts if one.theirs is not ABSENT}
            differing.setdefault((other["host"], f"{name} = {str(theirs)[:200]}"), []).append(rank)
            first[f"{name} = {str(here)[:200]}"] = None
    for rank, seconds in (clocks or {}).items():
        way = "ahead of" if seconds > 0 else "behind"
        clock = f"its clock is {abs(seconds):.0f} s {way} rank 0's"
        differing.setdefault((rows[rank]["host"], clock), []).append(rank)
        first[f"time = {datetime.now(UTC).isoformat(timespec='seconds')}"] = None
    lines = [f"rank {', '.join(map(str, ranks[:16]))} on {host}: {what}" for (host, what), ranks in differing.items()]
    raise LaunchError(
        given="\n".join(lines[:_MOST_LINES]),
        conflict=f"rank 0 on {rows[0]['host']} has {'; '.join(first)}",
        remedy=remedy,
    )


def compare_models(mesh: Mesh, model: nn.Module) -> None:
    """Compare the structure of the model on all ranks. Raises and collective: as `refuse_differences`."""
    structure = {}  # class, tensors and, for torch's own classes, printed arguments of each module by name
    for name, module in model.named_modules():
        kind = type(module)
        said = _ADDRESS.sub("", module.extra_repr()) if kind.__module__.startswith("torch.") else ""
        own = {**module._parameters, **module._buffers}
        tensors = [f"{n} {t.dtype} {list(t.shape)} {t.requires_grad}" for n, t in own.items() if t is not None]
        structure[name or "(model)"] = f"{kind.__name__}({said}) {'; '.join(tensors)}"
    refuse_differences(mesh, {"the model's structure": structure})


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


def data_digests(
    data: Opened, workers: int | None, evaluations: Mapping[str, Source], saved: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return digests of up to 256 samples of the training data and of each evaluation set, in parts.

    Streams and data that differ between two readings have no digest. `workers`: of the training data. `evaluations`:
    the evaluation sets by name. `saved`: limits the number of parts.
    """
    if data.reading.get("multiprocessing_context") not in (None, "fork"):
        workers = None  # spawned workers may read other values than this process
    sources: dict[str, tuple[Source, int | None]] = {"train_data": (data.source, workers)}
    sources |= {f"eval_data {name}".strip(): (own, 0) for name, own in evaluations.items()}
    digests = {
        name: _digests_of(own, own_workers, len(saved.get(name) or _PARTS))
        for name, (own, own_workers) in sources.items()
    }
    return {name: parts for name, parts in digests.items() if parts}


def _digests_of(source: Source, workers: int | None, most: int) -> list[str]:
    if not isinstance(source, MapSource) or (workers is None and not isinstance(source, TensorSource)):
        return []
    if not workers or isinstance(source, TensorSource):
        with source.looks():
            return list(_part_digests(source, most))

    def work() -> dict[str, list[str]]:
        torch.set_num_threads(1)  # a forked child has no OpenMP threads
        return {"digests": list(_part_digests(source, most))}

    # A child reads, since files that worker processes open must not be open here when the workers start.
    result = look_in_child(work, _CHILD_SECONDS)
    return result["digests"] if result is not None else []


def _part_digests(source: MapSource, most: int) -> Iterator[str]:
    """Yield a digest of each part of the samples until the time is over; none if a second reading differs."""
    began, done, parts = time.monotonic(), 0, list[str]()
    for size in _PARTS[:most]:
        if done >= len(source) or time.monotonic() - began > _SECONDS:
            break
        places = np.arange(done, min(done + size, len(source)))
        # A small set is read completely. Of a large set, the samples are spread over its whole length.
        ids = places if len(source) <= sum(_PARTS) else spread(places, len(source))
        try:
            digests = {digest_of_samples(source.fetch([ids], [0])) for _ in range(2)}
        except Exception:  # a step reports it
            break
        if len(digests) > 1:
            return
        parts += [digest[:16] for digest in digests if digest is not None]
        done += size
    yield from parts
