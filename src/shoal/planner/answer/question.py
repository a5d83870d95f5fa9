"""Input of `shoal plan`: a job and a cluster as the planner's values."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from shoal.data.opened import opened, training_data
from shoal.data.order import Order
from shoal.data.source import MapSource
from shoal.errors import ShoalError
from shoal.hardware import cluster as find_cluster
from shoal.hardware.fastest_all_reduce import fastest_on
from shoal.job import Epochs, Job, Samples
from shoal.parallel.model.deferred_init import deferred
from shoal.parallel.model.model_facts import facts_of
from shoal.parallel.pipeline.stage_places import places
from shoal.planner.answer.outlook import Case
from shoal.planner.calibrate.files import read as read_correction
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.segments import segments
from shoal.planner.predict.workload import Workload
from shoal.planner.profile.jobs import Batches, profile_job
from shoal.planner.search.space import Space, counts
from shoal.plans.legal import ModelFacts
from shoal.plans.plan import Plan
from shoal.training.preflight import one_grain, outline

_TRIALS = 3


@dataclass(frozen=True)
class Question:
    """Case to search, and the number of steps of the job (None: not known)."""

    case: Case
    num_steps: int | None

    @property
    def correction(self) -> Correction:
        """Correction for this cluster, from earlier runs."""
        return self.case.correction or Correction()


def question(job: Job, base: Plan, cluster_name: str, most: int | None) -> Question:
    """Planner's input for a job; `base` has the settings that the search does not vary.

    Raises: HardwareError of an unknown cluster; what the job's model, loss or data raise.
    """
    cluster = find_cluster(cluster_name)
    device = "cuda" if cluster.device.kind == "gpu" else "cpu"
    profile = profile_job(job, base, device=device)
    numbers, (facts, uncut) = counts(cluster, most), _facts(job)
    work = Workload(profile, job.global_batch, job.grains, _sample_seconds(job), facts.places)
    stages = len(segments(profile.units, facts.places))
    space = Space(base, facts, numbers, None if job.fuse else 1, stages, uncut=uncut)
    is_cut = any(weight.tensor_dim is not None for unit in profile.units for weight in unit.body.weights)
    fastest = {ranks: fastest_on(cluster, ranks) for ranks in range(2, cluster.devices_per_host + 1)}
    others = {ranks: name for ranks, name in fastest.items() if name != "native"}
    space = replace(space, tensor=is_cut, all_reduces=others if cluster.num_hosts == 1 else {})
    return Question(Case(work, cluster, space, correction=read_correction(cluster.name)), _num_steps(job))


def _facts(job: Job) -> tuple[ModelFacts, str]:
    """The facts, with the places where the engine cuts; and why a pipeline cannot divide the model, where it cannot."""
    model = outline(job) or _deferred(job)
    if model is None:
        return ModelFacts(job.grains, job.grain_size), ""
    facts = facts_of(model, one_grain(job), num_grains=job.grains, grain_size=job.grain_size)
    try:
        return replace(facts, places=places(model, job.loss, Batches(job)(job.grain_size))), ""
    except ShoalError as error:
        return replace(facts, places=()), f"{error.conflict}; {error.remedy}"


def _deferred(job: Job) -> nn.Module | None:
    """The outline of a model whose constructor computes with values, as far as that can be put off."""
    try:
        return deferred(job.model, job.seed)[0]
    except Exception:
        return None


def _sample_seconds(job: Job) -> float:
    """Seconds in which this machine fetches a sample: the fastest of some grains; 0 of a stream, which is not begun."""
    source = training_data(job).source
    if not isinstance(source, MapSource):
        return 0.0
    rows = min(len(source), job.grain_size)
    best = float("inf")
    for trial in range(_TRIALS):
        ids = (np.arange(rows) + trial * rows) % len(source)
        began = time.perf_counter()
        source.fetch([ids], [trial])
        best = min(best, time.perf_counter() - began)
    return best / rows


def _num_steps(job: Job) -> int | None:
    job = opened(job)
    source = job.train_data.source
    if isinstance(source, MapSource):
        order = Order(len(source), job.global_batch, job.grains, job.seed, bool(job.shuffle), job.length)
        return order.num_steps
    if isinstance(job.length, Epochs):
        return None
    return -(-job.length.count // job.global_batch) if isinstance(job.length, Samples) else job.length.count
