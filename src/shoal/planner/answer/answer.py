"""Question and answer of `shoal plan` as values: a job on a cluster, and the result that tables and page show."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.data.opened import opened, training_data
from shoal.data.order import Order
from shoal.data.source import MapSource
from shoal.errors import PlanError, ShoalError
from shoal.hardware import cluster as find_cluster
from shoal.hardware.fastest_all_reduce import fastest_on
from shoal.jobs.job import Epochs, Job, Samples
from shoal.numerics.operators import tensors_in
from shoal.numerics.precision import Precision
from shoal.parallel.model.structure import facts_of
from shoal.parallel.pipeline.stages import places
from shoal.parallel.shard import torch_release
from shoal.planner.answer.finer import Finer, finer
from shoal.planner.answer.outlook import (
    Case,
    Change,
    Goodput,
    ScalingCurve,
    curve,
    failures,
    goodput,
    sensitivity,
)
from shoal.planner.calibrate.comparison import section
from shoal.planner.calibrate.lessons import read as read_correction
from shoal.planner.predict.segments import segments
from shoal.planner.predict.workload import Workload
from shoal.planner.profile.profiles import Batches, is_small, profile_job
from shoal.planner.search.aims import Aim
from shoal.planner.search.choice import Choice, NothingFitsError, Rejected, choose, counted, gib
from shoal.planner.search.search import Candidate, Wanted
from shoal.planner.search.space import Illegal, Space, counts
from shoal.plans.legal import ModelFacts
from shoal.plans.plan import Plan, described, plan_text
from shoal.plans.resolve import Wishes, apply_wishes
from shoal.runs.directory import write_file
from shoal.runs.version import __version__
from shoal.training.setup.choices import copy_need
from shoal.training.setup.choices import is_small as is_copied
from shoal.training.setup.default_grains import deferred_outline, grains_of, outline, with_grains
from shoal.training.setup.job_model import build_model
from shoal.training.setup.memory_format_choice import choose_format
from shoal.training.setup.preflight import one_grain
from shoal.training.update.job_optimizer import Parameters, build_optimizer

_TRIALS = 3


@dataclass(frozen=True)
class Question:
    """Case to search, and the number of steps of the job (None if unknown).

    `why_grains`: reason for the job's number of grains.
    `sample_tokens`: tokens in a sample, padding included; None if samples are not sequences of integers.
    `precise`: another precision as written on the command line, and a function that makes the case for it.
    """

    case: Case
    num_steps: int | None
    why_grains: str = "as the job says"
    sample_tokens: int | None = None
    precise: tuple[str, Callable[[], Case]] | None = None

    def of_length(self, *, tokens: float | None = None, samples: float | None = None) -> Question:
        """Return the question for a job of `tokens` or `samples`. Raises: PlanError if samples have no tokens."""
        if tokens is not None:
            if self.sample_tokens is None:
                raise PlanError(
                    given=f"--tokens {tokens:g}",
                    conflict="the samples of this job are no sequences of integer tokens",
                    remedy="write --samples N",
                )
            samples = tokens / self.sample_tokens
        return self if samples is None else replace(self, num_steps=ceil(samples / self.case.work.global_batch))

    def at_price(self, dollars: float | None) -> Question:
        """Return the question with a price of `dollars` (US) per device-hour."""
        if dollars is None:
            return self
        device = self.case.cluster.device
        sources = {**device.sources, "price_per_hour": "--price"}
        device = replace(device, price_per_hour=dollars, sources=sources)
        return replace(self, case=replace(self.case, cluster=replace(self.case.cluster, device=device)))


def question(job: Job, base: Plan, cluster_name: str, most: int | None) -> Question:
    """Return the planner's input for a job; `base` has the settings that the search does not vary.

    Raises: HardwareError for an unknown cluster; UserCodeError for a job that cannot be traced.
    """
    cluster = find_cluster(cluster_name)
    model = outline(job)
    grains = grains_of(job, model)
    job = replace(job, grains=min(grains.num_grains, job.global_batch))  # a step has at least one sample per grain
    model = model or deferred_outline(job)
    device = "cuda" if cluster.device.kind == "gpu" else "cpu"
    profile = profile_job(job, base, device=device)
    grain = Batches(job)(job.grain_size)
    facts, uncut = ModelFacts(job.num_grains, job.grain_size), ""
    if model is not None:
        facts = facts_of(model, one_grain(job), num_grains=job.num_grains, grain_size=job.grain_size)
        try:
            facts = replace(facts, places=places(model, job.loss, grain))
        except ShoalError as error:
            facts, uncut = replace(facts, places=()), f"{error.conflict}; {error.remedy}"
    # Why this machine cannot shard gradients and parameters; the releases of other machines are unknown.
    lacking = torch_release.missing() if cluster_name == "here" else ""
    fastest = {ranks: fastest_on(cluster, ranks) for ranks in range(2, cluster.devices_per_host + 1)}
    others = {ranks: name for ranks, name in fastest.items() if name != "native"}
    space = Space(
        base,
        facts,
        counts(cluster, most),
        None if job.fuse else 1,
        len(segments(profile.units, facts.places)),
        uncut=uncut,
        whole=lacking and f"this machine has torch {torch.__version__}: {lacking}",
        tensor=any(weight.tensor_dim is not None for unit in profile.units for weight in unit.body.weights),
        all_reduces=others if cluster.num_hosts == 1 else {},
    )
    if device == "cpu" and space.all_reduces:
        space = replace(space, one_copy=_allows_one_copy(job, model))
    work = Workload(profile, job.global_batch, job.num_grains, _sample_seconds(job), facts.places)
    case = Case(work, cluster, space, correction=read_correction(cluster.name))
    # The tokens in a sample: the length of its longest integer sequence, if a sample has no other arrays.
    arrays = [t for t in tensors_in(grain) if t.ndim > 1 and t.dtype != torch.bool]
    has_tokens = bool(arrays) and not any(t.is_floating_point() or t.ndim > 2 for t in arrays)
    tokens = max(t.shape[1] for t in arrays) if has_tokens else None
    # A half precision that the device supports, if the plan is for float32.
    halves = [name for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if dtype in cluster.device.flops]
    precise = None
    if cluster.device.kind == "gpu" and base.precision.compute == "float32" and halves:

        def in_half() -> Case:
            other = apply_wishes(base, Wishes(precision=halves[0]), from_file=False)
            traced = replace(work, profile=profile_job(job, other, device="cuda"))
            return replace(case, work=traced, space=replace(case.space, base=other))

        precise = halves[0], in_half
    return Question(case, _num_steps(job), grains.why, tokens, precise)


def _allows_one_copy(job: Job, model: nn.Module | None) -> bool:
    """Return True if a plan without `memory.shared` lets the ranks of a host share one copy of the parameters.

    Return False if only the built model could show it. `model`: the job's model on the meta device.
    """
    if model is None or is_copied(model):
        return False
    try:
        optimizer = build_optimizer(job.optimizer, Parameters(model))
    except ShoalError:  # the job's own optimizer function reads values
        return False
    return copy_need(model, optimizer, job.callbacks) is None


def _sample_seconds(job: Job) -> float:
    """Return the seconds in which this machine fetches a sample, the best of a few grains; 0 for streams."""
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
        order = Order(len(source), job.global_batch, job.num_grains, job.seed, bool(job.shuffle), job.length)
        return order.num_steps
    if isinstance(job.length, Epochs):
        return None
    return -(-job.length.count // job.global_batch) if isinstance(job.length, Samples) else job.length.count


_LARGEST = 1024  # hosts, in the search for a cluster on which a plan fits


@dataclass(frozen=True, repr=False)
class SearchResult:
    """Result of a search with its outlook.

    `goodput`: set if the devices' failure rate is known. `finer`: set if more grains allow a better plan.
    """

    question: Question
    choice: Choice
    curve: ScalingCurve
    changes: tuple[Change, ...]
    goodput: Goodput | None
    search_seconds: float
    job: str
    finer: Finer | None = None

    @property
    def best(self) -> Candidate:
        """The chosen plan and its prediction: step seconds, terms, memory."""
        return Candidate(self.plan, self.chosen.prediction)

    @property
    def choices(self) -> tuple[Candidate, ...]:
        """The best plan and the next best layouts on the same number of devices, each with its prediction."""
        return (self.best, *self.choice.alternatives)

    @property
    def refused(self) -> tuple[Rejected | Illegal, ...]:
        """Layouts that were not chosen, each with its reason."""
        return (*self.choice.rejected, *self.choice.illegal)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as TOML for `shoal run --plan`, and return the file's path."""
        write_file(Path(path), plan_text(self.plan))
        return Path(path)

    @property
    def chosen(self) -> Candidate:
        """The chosen plan and its prediction."""
        return self.choice.chosen

    @property
    def price(self) -> float | None:
        """US dollars per device-hour, or None if unknown."""
        return self.question.case.cluster.device.price_per_hour

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks of the chosen plan on one host."""
        return min(self.chosen.devices, self.question.case.cluster.devices_per_host)

    @property
    def peak(self) -> tuple[str, float]:
        """The dtype of the products and the device's dense peak for it in FLOP/s, the reference of `mfu`."""
        case, plan = self.question.case, self.chosen.plan
        computer = case.predictor.staging.costs(plan).computer
        dtype = computer.dtype(plan.precision.compute)
        return dtype, computer.device.flops[dtype]

    def job_seconds(self, seconds: float) -> float | None:
        """Return the seconds of the whole job at `seconds` per step, or None if its length is unknown."""
        return seconds * self.question.num_steps if self.question.num_steps else None

    def cost(self, candidate: Candidate) -> float | None:
        """Return the US dollars of the whole job, or None if the price or the length is unknown."""
        seconds = self.job_seconds(candidate.seconds)
        if self.price is None or seconds is None:
            return None
        return candidate.devices * seconds / 3600.0 * self.price

    @property
    def plan(self) -> Plan:
        """The chosen plan, complete, with its prediction."""
        case = self.question.case
        about: dict[str, Any] = {
            "cluster": case.cluster.name,
            "devices": self.chosen.devices,
            "device": case.cluster.device.name,
            "device_kind": case.cluster.device.kind,
            "aim": str(self.choice.aim),
            "planner": __version__,
            "job": self.job,
            "parameters": case.work.profile.num_parameters,
            "flops_per_sample": case.work.profile.flops(1.0),
            "factors": dict(case.correction.factors),
            "host_seconds": case.correction.host_seconds,
            "curve": {str(p.devices): p.best.seconds for p in self.curve.points if p.best is not None},
        }
        if self.chosen.prediction.mfu is not None:
            about["peak_dtype"], about["peak_flops"] = self.peak
        about |= {"price_per_hour": self.price} if self.price is not None else {}
        about |= {"sample_tokens": self.question.sample_tokens} if self.question.sample_tokens is not None else {}
        document = self.chosen.plan.to_mapping()
        # The modules at which the prediction cuts the model, for the run to reuse; the plan's own split if unusable.
        split, at = self.chosen.prediction.split, self.chosen.plan
        known = all(name in case.space.facts.cuts for name in split)
        usable = known and len(split) == at.layout.pipeline * at.pipeline.stages_per_rank - 1
        document["pipeline"]["split"] = list(split if usable else at.pipeline.split)
        document["prediction"] = section(self.chosen.prediction, about)
        return Plan.from_mapping(document, source="plan")


def with_way_out(error: NothingFitsError, case: Case) -> NothingFitsError:
    """Add the smallest larger cluster of the same kind on which a plan fits to the error's remedy, if there is one."""
    cluster, most = case.cluster, case.space.counts[-1]
    hosts = cluster.num_hosts
    while hosts <= _LARGEST:
        devices = [n for n in counts(replace(cluster, num_hosts=hosts)) if n > most]
        if hosts > 1 and cluster.between is None:
            break
        for number in devices[:: max(1, len(devices) // 8)] if devices else []:
            larger = replace(case, cluster=replace(cluster, num_hosts=hosts), space=case.space.at(number))
            found = next(iter(larger.search().take(Wanted())), None)
            if found is not None:
                words = (
                    f"on {counted(number)} it fits ({described(found.plan)}, {gib(found.prediction.peak_bytes)} each)"
                )
                return NothingFitsError(
                    given=error.given, conflict=error.conflict, remedy=f"{words}; or {error.remedy}"
                )
        hosts *= 2
    return error


def answer(question: Question, aim: Aim, job: str, device_hours: float | None, clock: Any) -> SearchResult:
    """Search for the best plan and evaluate its outlook. Raises: PlanError if no plan serves the aim."""
    case, precise = question.case, question.precise
    began = clock()
    search = case.search()
    try:
        choice = choose(search, aim, question.num_steps)
    except NothingFitsError as error:
        if aim.name == "deadline":
            raise
        more_grains = finer(case, aim, None)
        if more_grains is None:
            raise with_way_out(error, case) from None
        raise NothingFitsError(
            given=error.given,
            conflict=f"{more_grains.cause}; {error.conflict}",
            remedy=f"write {more_grains.effect}; or {error.remedy}",
        ) from None
    seconds = clock() - began
    hours = device_hours or case.cluster.mean_hours_between_failures
    devices = choice.chosen.devices
    return SearchResult(
        question=question,
        choice=choice,
        curve=curve(search, devices),
        changes=sensitivity(case, search, choice.chosen, None if precise is None else (precise[0], precise[1]())),
        goodput=goodput(failures(case, devices, hours)) if hours else None,
        search_seconds=seconds,
        job=job,
        finer=finer(case, aim, choice.chosen),
    )


def with_chosen_format(job: Job, base: Plan, cluster_name: str) -> Plan:
    """Return the plan with the memory format that a run of the job chooses by default.

    Two samples are computed if the model has convolutions; other plans are returned unchanged.
    Raises: HardwareError for an unknown cluster.
    """
    if find_cluster(cluster_name).device.kind != "cpu" or base.execution.exact:
        return base
    model = outline(job)
    if model is None or not is_small(model) or not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return base
    precision = Precision.of(base.precision, torch.device("cpu"))
    with contextlib.suppress(Exception):  # the run reports any error raised here
        job = with_grains(opened(job))
        chosen = choose_format(job, build_model(job, precision), precision, job.train_data)
        return base.with_sections(execution={"channels_last": chosen.channels_last})
    return base
