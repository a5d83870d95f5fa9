"""Way from a job and a cluster to the planner's question, and from the question to its answer."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shoal.data.samplers import TokenBudget
from shoal.data.source import MapSource, one_grain, opened, order_of
from shoal.errors import ShoalError
from shoal.hardware import cluster as find_cluster
from shoal.hardware.detect import fastest_on
from shoal.jobs.job import Epochs, Job, Samples
from shoal.numerics.generators import generators_kept
from shoal.numerics.operators import tensors_in
from shoal.numerics.outputs import GrainOutputs, widened_leaf
from shoal.parallel.blocks.narrow_products import float8_layers
from shoal.parallel.data.sparse_rows import sparse_parameters
from shoal.parallel.model.structure import facts_of
from shoal.parallel.pipeline.stages import places
from shoal.parallel.shard import torch_release
from shoal.planner.answer.display import Answer
from shoal.planner.answer.outlook import (
    FLOAT8_PAYS,
    Case,
    KindsOfDevices,
    Question,
    curve,
    failures,
    finer,
    goodput,
    of_some_kinds,
    price_of,
    sensitivity,
)
from shoal.planner.calibrate.lessons import read as read_correction
from shoal.planner.predict.workload import Workload, segments
from shoal.planner.profile.profiles import Batches, profile_job
from shoal.planner.search.search import (
    DISTINCT,
    Aim,
    Limit,
    NothingFitsError,
    Wanted,
    choose,
    gib,
    limit_of,
    simplest,
)
from shoal.planner.search.space import Space, counts
from shoal.plans.legal import ModelFacts, conflicts
from shoal.plans.plan import Plan, described
from shoal.plans.resolve import Wishes, apply_wishes
from shoal.report.quantities import several
from shoal.training.setup.choices import copy_need
from shoal.training.setup.choices import is_small as is_copied
from shoal.training.setup.job_model import deferred_outline, grains_of, outline
from shoal.training.update.closure import needs_closure
from shoal.training.update.job_optimizer import Parameters, build_optimizer

_TRIALS = 3
BALANCED = "routing is assumed to be balanced: each expert computes as many tokens as the mean"
_LARGEST = 1024  # hosts, in the search for a cluster on which a plan fits


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
    has_global_loss = job.outputs is not None
    if model is not None:
        facts = facts_of(model, one_grain(job), num_grains=job.num_grains, grain_size=job.grain_size)
        try:
            facts = replace(
                facts, places=() if has_global_loss or job.batch_norm == "batch" else places(model, job.loss, grain)
            )
        except ShoalError as error:
            facts, uncut = replace(facts, places=()), f"{error.conflict}; {error.remedy}"
    optimizer = _outlined_optimizer(job, model)
    has_closure = optimizer is not None and needs_closure(optimizer)
    facts = replace(
        facts,
        has_global_loss=has_global_loss,
        has_closure=has_closure,
        has_global_norm=job.batch_norm == "batch",
        has_sparse=model is not None and bool(sparse_parameters(model)),
    )
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
        all_reduces=others if cluster.num_hosts == 1 and not cluster.kinds else {},
        kinds=tuple(kind.num_devices for kind in cluster.kinds),
    )
    if device == "cpu" and space.all_reduces:
        space = replace(space, one_copy=_allows_one_copy(job, model, optimizer))
    # Streams have no length and no time to fetch a sample.
    known, sample_seconds = opened(job), 0.0
    source, length, num_steps = known.train_data.source, known.length, None
    if isinstance(source, MapSource):
        sample_seconds = _sample_seconds(source, job.grain_size)
        order = order_of(known.train_data, known, length)
        num_steps = order.num_steps
        if isinstance(known.sampler, TokenBudget):
            profile = replace(profile, notes=(*profile.notes, known.sampler.spread(order)))
    elif not isinstance(length, Epochs):
        num_steps = -(-length.count // known.global_batch) if isinstance(length, Samples) else length.count
    if profile.has_experts:
        profile = replace(profile, notes=(*profile.notes, BALANCED))
    dtype, kinds = base.precision.compute, cluster.kinds or (cluster,)
    if without := [kind.device.name for kind in kinds if dtype not in kind.device.flops]:
        words = f"{', '.join(without)}: no products in {dtype}, so they are priced in float32"
        profile = replace(profile, notes=(*profile.notes, words))
    output_bytes = _output_bytes(job, model, grain)
    work = Workload(profile, job.global_batch, job.num_grains, sample_seconds, facts.places, output_bytes)
    case = Case(work, cluster, space, correction=read_correction(cluster.name))
    # The tokens in a sample: the length of its longest integer sequence, if a sample has no other arrays.
    arrays = [t for t in tensors_in(grain) if t.ndim > 1 and t.dtype != torch.bool]
    has_tokens = bool(arrays) and not any(t.is_floating_point() or t.ndim > 2 for t in arrays)
    tokens = max(t.shape[1] for t in arrays) if has_tokens else None

    def traced(other: Plan) -> Workload:
        return replace(work, profile=profile_job(job, other, device=device))

    # A half precision that the device supports, if the plan is for float32; float8, if it may pay.
    each = [kind.device.flops for kind in case.kinds]
    halves = [
        name for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if all(dtype in flops for flops in each)
    ]
    precise = None
    if cluster.device.kind == "gpu" and base.precision.compute == "float32" and halves:

        def in_half() -> Case:
            other = apply_wishes(base, Wishes(precision=halves[0]), from_file=False)
            return replace(case, work=traced(other), space=replace(case.space, base=other))

        precise = halves[0], in_half
    elif base == apply_wishes(base, Wishes(precision="bf16"), from_file=False) and all("float8" in f for f in each):
        float8 = apply_wishes(base, Wishes(precision="fp8"), from_file=False)
        has_layers = model is None or bool(float8_layers(model, 16))  # its smallest multiple
        if profile.num_parameters >= FLOAT8_PAYS and has_layers and not conflicts(float8):
            precise = "fp8", lambda: replace(case, space=replace(case.space, base=float8))
    return Question(case, num_steps, grains.why, tokens, precise, traced)


def _outlined_optimizer(job: Job, model: nn.Module | None) -> torch.optim.Optimizer | None:
    """Return the job's optimizer of a model on the meta device, or None if its function reads values."""
    if model is None:
        return None
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    try:
        return build_optimizer(job.optimizer, Parameters(model, trainable))
    except ShoalError:
        return None


def _allows_one_copy(job: Job, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return True if a plan without `memory.shared` lets the ranks of a host share one copy of the parameters.

    Return False if only the built model could show it. `model`: the job's model on the meta device.
    """
    if model is None or optimizer is None or is_copied(model):
        return False
    return copy_need(model, optimizer, job.callbacks) is None


def _output_bytes(job: Job, model: nn.Module | None, grain: Any) -> float:
    """Return the bytes of a sample's outputs in a job's loss over the global batch; 0 if a trace shows none.

    `model`: the job's model on the meta device.
    """
    if job.outputs is None or model is None:
        return 0.0
    with contextlib.suppress(Exception), generators_kept(), torch.no_grad():
        outputs = GrainOutputs.of(job.outputs(model, tree_map_only(Tensor, lambda t: t.to("meta"), grain)), None)
        return float(sum(widened_leaf(leaf[:1]).nbytes for leaf in outputs.by_sample))
    return 0.0


def _sample_seconds(source: MapSource, grain_size: int) -> float:
    """Return the seconds in which this machine fetches a sample, the best of a few grains."""
    rows = min(len(source), grain_size)
    best = float("inf")
    for trial in range(_TRIALS):
        ids = (np.arange(rows) + trial * rows) % len(source)
        began = time.perf_counter()
        source.fetch([ids], [trial])
        best = min(best, time.perf_counter() - began)
    return best / rows


def with_way_out(error: NothingFitsError, case: Case) -> NothingFitsError:
    """Add the smallest larger cluster of the same kind on which a plan fits to the error's remedy, if there is one."""
    cluster, most = case.cluster, case.space.counts[-1]
    hosts = cluster.num_hosts
    while hosts <= _LARGEST and not cluster.kinds:
        devices = [n for n in counts(replace(cluster, num_hosts=hosts)) if n > most]
        if hosts > 1 and cluster.between is None:
            break
        for number in devices[:: max(1, len(devices) // 8)] if devices else []:
            larger = replace(
                case, cluster=replace(cluster, num_hosts=hosts), space=replace(case.space, counts=(number,))
            )
            if fitting := larger.search().take(Wanted()):
                plan, peak = fitting[0].plan, gib(fitting[0].prediction.peak_bytes)
                words = f"on {several(number, 'device')} it fits ({described(plan)}, {peak} each)"
                return NothingFitsError(
                    given=error.given, conflict=error.conflict, remedy=f"{words}; or {error.remedy}"
                )
        hosts *= 2
    return error


def answer(question: Question, aim: Aim, job: str, device_hours: float | None, clock: Any) -> Answer:
    """Search for the best plan and evaluate its outlook. Raises: PlanError if no plan serves the aim."""
    if not question.case.cluster.kinds:
        return _answer_of(question, aim, job, device_hours, clock)
    # Each choice of the kinds of devices is searched. The result has the outlook of the best choice.
    results: list[tuple[KindsOfDevices, Question]] = []
    began, choices = clock(), list(of_some_kinds(question))
    limits = [limit_of(own.case.search(), aim, own.num_steps) for own in choices if len(own.case.kinds) == 1]
    limit = Limit(*(min(values) for values in zip(*((one.seconds, one.device_seconds) for one in limits), strict=True)))
    for own in choices:
        before = sum(kind.num_devices for kind in own.case.kinds[:-1])
        numbers = tuple(number for number in own.case.space.counts if number > before)
        names = tuple(kind.name for kind in own.case.kinds)
        if not numbers:
            results.append((KindsOfDevices(names, None, "--max-devices leaves none of the last kind"), own))
            continue
        case = replace(own.case, space=replace(own.case.space, counts=numbers))
        try:
            search, faster = case.search(), limit
            if aim.name == "fastest" and len(names) > 1:  # a choice of several kinds is only of interest if it wins
                best_seconds = min((kinds.best.seconds for kinds, _ in results if kinds.best), default=limit.seconds)
                faster = replace(limit, seconds=min(limit.seconds, best_seconds * (1 + DISTINCT)))
            close = search.take(Wanted(aim, faster, number=float("inf"), ties=True))
            if not close and faster != limit:
                results.append((KindsOfDevices(names, None, over=faster.seconds), own))
                continue
            one = simplest(close) if close else choose(search, aim, own.num_steps, limit).chosen  # raises
            results.append((KindsOfDevices(names, one), own))
        except NothingFitsError as error:
            results.append((KindsOfDevices(names, None, error.conflict), own))
    fitting = [(kinds.best, own) for kinds, own in results if kinds.best is not None]
    if not fitting:
        reasons = [f"{' and '.join(kinds.names)}: {kinds.reason}" for kinds, _ in results]
        raise NothingFitsError(
            given=f"--aim {aim} on {question.case.cluster.name}",
            conflict="no choice of its kinds of devices has a plan\n" + "\n".join(reasons),
            remedy="give devices with more memory, more devices, or a smaller batch or model",
        )
    prices = [price_of(own.case.cluster, one.plan) for one, own in fitting]
    if aim.name not in ("cheapest", "deadline") or None in prices:
        prices = [1.0] * len(fitting)

    def key(number: int) -> tuple[float, ...]:
        one, _ = fitting[number]
        return (*(factor * (prices[number] or 0.0) for factor in aim.key(one.devices, one.seconds)), one.devices)

    best, chosen = fitting[min(range(len(fitting)), key=key)]
    if aim.name == "fastest":  # more devices must save more time than the prediction error
        as_fast = [pair for pair in fitting if pair[0].seconds <= best.seconds * (1 + DISTINCT)]
        best, chosen = min(as_fast, key=lambda pair: (pair[0].devices, pair[0].seconds))
    before = sum(kind.num_devices for kind in chosen.case.kinds[:-1])
    result = _answer_of(chosen, aim, job, device_hours, clock, limit=limit, above=before)
    return replace(result, kinds=tuple(kinds for kinds, _ in results), search_seconds=clock() - began)


def _answer_of(
    question: Question,
    aim: Aim,
    job: str,
    device_hours: float | None,
    clock: Any,
    *,
    limit: Limit | None = None,
    above: int = 0,
) -> Answer:
    """Return the answer on one kind of devices, or on more than `above` devices of several."""
    case, precise = question.case, question.precise
    began = clock()
    search = case.search()
    counts = tuple(number for number in case.space.counts if number > above)
    try:
        few = replace(case, space=replace(case.space, counts=counts)).search() if above else search
        choice = choose(few, aim, question.num_steps, limit)
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
    return Answer(
        question=question,
        choice=choice,
        curve=curve(search, devices),
        changes=sensitivity(case, search, choice.chosen, None if precise is None else (precise[0], precise[1]())),
        goodput=goodput(failures(case, devices, hours)) if hours else None,
        search_seconds=seconds,
        job=job,
        finer=finer(case, aim, choice.chosen),
    )
