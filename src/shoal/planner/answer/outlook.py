"""Question of `shoal plan`, and its result: the plan, its scaling, sensitivity and goodput, and better grains.

Goodput is the share of a run's time that remains after failures and checkpoints. Sources: J. W. Young, A first order
approximation to the optimum checkpoint interval, CACM 17 (1974); J. T. Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps, FGCS 22 (2006), equations 20 and 37.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import ceil, exp, expm1, isinf, sqrt
from pathlib import Path
from typing import Any

from shoal.errors import PlanError
from shoal.hardware.catalogue import joined
from shoal.hardware.values import Cluster, Device
from shoal.planner.calibrate.comparison import section
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.calibrate.lessons import read as read_correction
from shoal.planner.predict.compute_time import DeviceModel, MatrixRow, unaligned_rows
from shoal.planner.predict.mixed import MixedPredictor, costs_of_kinds, devices_of
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Program, Share, Workload
from shoal.planner.profile.values import ALIGNED, Operation
from shoal.planner.search.search import (
    TIE,
    Aim,
    Candidate,
    Choice,
    Limit,
    Notes,
    Rejected,
    Search,
    Wanted,
    gib,
    simplest,
)
from shoal.planner.search.space import Illegal, Space, counts, recomputes
from shoal.plans.legal import conflicts
from shoal.plans.plan import Plan, described, plan_text
from shoal.report.quantities import seconds, several
from shoal.runs.directory import write_file
from shoal.runs.version import __version__

# Host seconds of a GPU step besides the model's operators: LeNet on H200s, torch 2.11, two hosts, 2026-11-26.
# Queued operations: from torch's profile. CUDA graph replays: 1.0 and 1.75 ms by the clock. Compiled regions: what
# their guards and calls add to queued operations, by the clock.
_QUEUED_SECONDS, _REPLAYED_SECONDS, _REGION_SECONDS = 2.1e-3, 1.3e-3, 0.7e-3
# How a GPU runs a step, by the names of `--step`: the plan's keys in `execution`, and their words in TOML.
MODES: dict[str, tuple[dict[str, Any], str]] = {
    "eager": ({"cuda_graph": False, "compile": "none"}, "eager"),
    "graph": ({"cuda_graph": True, "compile": "none"}, "execution.cuda_graph = true"),
    "compiled": ({"cuda_graph": False, "compile": "default"}, 'execution.compile = "default"'),
    "compiled-graph": ({"cuda_graph": True, "compile": "default"}, "execution.cuda_graph and execution.compile"),
}
TF32 = 'matmuls in TF32 (torch.backends.cuda.matmul.fp32_precision = "tf32"), which changes the run'
# Adding devices stops paying if each adds less than this share of the best throughput per device.
PAYS = 0.5
_MOST_KINDS = 5  # kinds of devices of which every choice is searched
_UNEVEN = 1.5  # rows of the busiest expert rank over the mean, in the answer's table of changes
_MOST_TIED = 20  # candidates for a point of the curve, from which the simplest is chosen
# Smallest number of parameters from which float8 is suggested: below, published runs show no gain.
FLOAT8_PAYS = 1_000_000_000
# Defaults if a cluster does not state its storage: bytes per second and host, and seconds of a restart.
STORAGE_BYTES_PER_SECOND, RESTART_SECONDS = 1e9, 120.0


@dataclass(frozen=True)
class Case:
    """Input of a prediction besides the plan: workload, cluster, search space, program and correction."""

    work: Workload
    cluster: Cluster
    space: Space
    program: Program | None = None
    correction: Correction = field(default_factory=Correction)
    watch: Callable[[], None] | None = field(default=None, compare=False)  # called during a search

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """The kinds of the cluster's devices: itself, if it has one kind."""
        return self.cluster.kinds or (self.cluster,)

    @property
    def own_program(self) -> Program:
        """The program to predict; defaults to shoal's own, in the mode of the base plan."""
        execution = self.space.base.execution
        fuses = execution.compile != "none"
        queued = _QUEUED_SECONDS + (_REGION_SECONDS if fuses else 0.0)
        own = Program(fuses=fuses, host_seconds=_REPLAYED_SECONDS if execution.cuda_graph else queued)
        if self.space.base.precision.products == "float8_rows":  # blocks have no kernel
            own = replace(own, layers="float8", scales_anew=True, wide_weights=True)
        return self.program or own

    @property
    def own_cluster(self) -> Cluster:
        """The cluster to predict: the kernels of a CUDA graph do not wait for their host."""
        if not self.space.base.execution.cuda_graph or self.cluster.device.kind != "gpu":
            return self.cluster
        return self.cluster.with_device(lambda device: replace(device, dispatch_seconds=0.0))

    @property
    def predictor(self) -> Predictor:
        """Predictor for this case's plans, the same as in the search."""
        return Predictor(self.work, self.own_cluster, self.own_program)

    def search(self) -> Search:
        """Return the search of this case."""
        costs = costs_of_kinds(self.work, self.own_cluster, self.own_program, self.correction)
        return Search(self.space, costs, self.work.grain_size, self.watch)


@dataclass(frozen=True)
class Question:
    """Case to search, and the number of steps of the job (None if unknown).

    `why_grains`: reason for the job's number of grains.
    `sample_tokens`: tokens in a sample, padding included; None if samples are not sequences of integers.
    `precise`: another precision as written on the command line, and a function that makes the case for it.
    `traced`: function that makes the workload for another base plan.
    """

    case: Case
    num_steps: int | None
    why_grains: str = "as the job says"
    sample_tokens: int | None = None
    precise: tuple[str, Callable[[], Case]] | None = None
    traced: Callable[[Plan], Workload] | None = None

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

        def priced(device: Device) -> Device:
            sources = {**device.sources, "price_per_hour": "--price"}
            return replace(device, price_per_hour=dollars, sources=sources)

        return replace(self, case=replace(self.case, cluster=self.case.cluster.with_device(priced)))


@dataclass(frozen=True)
class Point:
    """Fastest plan on a number of devices, or the missing memory; `efficiency` is relative to the curve's best."""

    devices: int
    best: Candidate | None
    missing_bytes: float | None = None
    efficiency: float | None = None
    marginal: float | None = None  # throughput per device added since the previous point, relative to the curve's best


@dataclass(frozen=True)
class ScalingCurve:
    """Scaling curve, the number of devices at which more stop paying, and the limit beyond it."""

    points: tuple[Point, ...]
    pays_until: int | None
    limit: str


@dataclass(frozen=True)
class Change:
    """Effect of a change of the case on the chosen plan's step."""

    what: str
    seconds: float | None
    effect: str


def price_of(cluster: Cluster, plan: Plan) -> float | None:
    """Return the US dollars per device-hour of a plan, the mean over its devices, or None if unknown."""
    if not cluster.kinds:
        return cluster.device.price_per_hour
    prices = [kind.device.price_per_hour for kind in cluster.kinds]
    numbers = devices_of(cluster, plan.layout)
    if any(price is None for price, number in zip(prices, numbers, strict=True) if number):
        return None
    return sum((price or 0.0) * number for price, number in zip(prices, numbers, strict=True)) / sum(numbers)


def curve(search: Search, chosen: int) -> ScalingCurve:
    """Return the fastest plans on powers of two, the largest and the chosen number of devices, if legal."""
    points, counts = [], sorted(search.space.counts)
    wanted = {1 << power for power in range(counts[-1].bit_length())} | {chosen, counts[-1]}
    for devices in sorted(wanted & set(counts)):
        notes = Notes()
        close = search.take(Wanted(fewest=devices, most=devices, number=1 + _MOST_TIED, ties=True), notes)
        if close:
            points.append(Point(devices, simplest(close)))
        else:
            nearest = search.nearest_missing(notes, search.by_devices.get(devices, ()))
            points.append(Point(devices, None, None if nearest is None else nearest[0]))
    rates = [1.0 / (p.devices * p.best.seconds) for p in points if p.best is not None]
    if not rates:
        return ScalingCurve(tuple(points), None, "nothing fits")
    # Efficiencies are relative to the best throughput per device; points without a plan have none.
    best_rate, judged, before = max(rates), [], None
    pays_until, limit, ended = None, "nothing up to the largest number of devices", False
    for point in points:
        best = point.best
        if best is None:
            judged.append(point)
            continue
        rate, marginal = 1.0 / best.seconds, None
        if before is not None:
            marginal = (rate - 1.0 / before.seconds) / ((best.devices - before.devices) * best_rate)
            if not ended and marginal < PAYS:
                ended, terms = True, best.prediction.terms
                # The term whose device-seconds grow most limits.
                growth = {
                    name: best.devices * spent - before.devices * before.prediction.terms.get(name, 0.0)
                    for name, spent in terms.items()
                }
                name = max(growth, key=lambda term: growth[term])
                limit = f"{name}, {terms[name] / best.seconds:.0%} of a step on {several(best.devices, 'device')}"
        pays_until = pays_until if ended else point.devices
        judged.append(replace(point, efficiency=rate / (point.devices * best_rate), marginal=marginal))
        before = best
    return ScalingCurve(tuple(judged), pays_until, limit)


# -------------------------------------------------------------------------------------------------- sensitivity


def sensitivity(
    case: Case, search: Search, chosen: Candidate, precise: tuple[str, Case] | None = None
) -> tuple[Change, ...]:
    """Return the effects of a set of changes on the chosen plan.

    The changes: another precision, a CUDA graph, recomputation, 1 GiB more, twice a link, uneven experts, half and
    double the batch.
    `search`: the search of this case. `precise`: a precision as written on the command line, and its case.
    """

    def effect(seconds: float) -> str:
        change = chosen.seconds / seconds - 1.0
        return "nothing" if abs(change) < TIE / 2 else f"{change:+.0%} samples a second"

    def predicted(
        other: Case, what: str, plan: Plan = chosen.plan, *, samples: float = 1.0, tells_memory: bool = False
    ) -> Change:
        prediction = other.search().bounds.predict(plan)
        if not prediction.fits:
            return Change(what, None, f"does not fit by {gib(prediction.missing_bytes)}")
        text = effect(prediction.step_seconds / samples)
        peak, before = gib(prediction.peak_bytes), gib(chosen.prediction.peak_bytes)
        if tells_memory and peak != before:
            text = f"{text}, {peak} instead of {before}"
        return Change(what, prediction.step_seconds, text)

    changes = []
    if precise is not None:
        precision, other = precise
        plan = chosen.plan.with_sections(precision=other.space.base.to_mapping()["precision"])
        if not conflicts(plan):
            changes.append(predicted(other, f"--precision {precision}, which changes the run", plan))
        is_wide = case.space.base.precision.compute == "float32"
        if is_wide and "tf32" in case.cluster.device.flops and not case.own_program.fast_float32:
            changes.append(predicted(replace(case, program=replace(case.own_program, fast_float32=True)), TF32))
    modes = ((in_mode(case, chosen.plan, name), words) for name, (_, words) in MODES.items())
    optional = [predicted(other, words) for other, words in modes if other is not None]
    for kind in recomputes(case.space.base):
        if kind != chosen.plan.memory.recompute:
            plan = chosen.plan.with_sections(memory={"recompute": kind})
            what = f"recompute = {kind}" if kind != "none" else "no recomputation"
            optional.append(predicted(case, what, plan, tells_memory=True))
    changes += [change for change in optional if change.effect != "nothing"]
    wanted = Wanted(Aim(), Limit(seconds=chosen.seconds * (1 - TIE)), chosen.devices, chosen.devices)
    faster = search.with_more_memory(1 << 30).take(wanted)
    seconds = faster[0].seconds if faster else chosen.seconds
    changes.append(Change("1 GiB more on each device", seconds, effect(seconds)))
    within, between = case.cluster.within, case.cluster.between
    if within is not None and chosen.devices > 1 and not (case.cluster.kinds and between is not None):
        link = replace(within, bytes_per_second=2 * within.bytes_per_second)
        other = replace(case, cluster=replace(case.cluster, within=link))
        changes.append(predicted(other, f"twice the link in a host ({within.name})"))
    if between is not None and chosen.devices > case.cluster.devices_per_host:
        link = replace(between, bytes_per_second=2 * between.bytes_per_second)
        other = replace(case, cluster=replace(case.cluster, between=link))
        changes.append(predicted(other, f"twice the link between hosts ({between.name})"))
    if chosen.plan.layout.expert > 1:
        other = replace(case, work=replace(case.work, imbalance=_UNEVEN * case.work.imbalance))
        changes.append(predicted(other, f"experts of one rank compute {_UNEVEN:g} times the mean of the rows"))
    for factor, what in ((0.5, "half the batch"), (2.0, "twice the batch")):
        batch = int(case.work.global_batch * factor)  # again one sample per grain, else the same number of grains
        num_grains = batch if case.work.grain_size == 1 else min(batch, case.work.num_grains)
        if num_grains >= chosen.plan.layout.data * chosen.plan.layout.shard:
            other = replace(case, work=replace(case.work, global_batch=batch, num_grains=num_grains))
            changes.append(predicted(other, f"{what} ({batch:,} samples)", samples=factor))
    return tuple(changes)


def mode(plan: Plan) -> str:
    """Return the name in `MODES` of how a GPU runs a plan's steps."""
    compiles = plan.execution.compile != "none"
    if plan.execution.cuda_graph:
        return "compiled-graph" if compiles else "graph"
    return "compiled" if compiles else "eager"


def in_mode(case: Case, plan: Plan, name: str) -> Case | None:
    """Return the case in which a GPU runs a plan's steps in another mode; None if it is the plan's or illegal."""
    keys, _ = MODES[name]
    other = plan.with_sections(execution=keys)
    if case.cluster.device.kind != "gpu" or mode(plan) == name or conflicts(other, case.space.facts):
        return None
    return replace(case, space=replace(case.space, base=case.space.base.with_sections(execution=keys)))


# ----------------------------------------------------------------------------------------------- unaligned products

_WORTH = 0.03  # smallest share of a step that justifies advice to pad, which changes the model
_NAMED = 0.1  # rows whose products take less than this share of all unaligned ones are not named


def operators(case: Case, plan: Plan) -> tuple[DeviceModel, list[tuple[Operation, Share, int]]]:
    """Return the device model and, for each operator, a rank's share of it and its count in the whole model."""
    predictor = case.predictor
    ranks = predictor.staging.ranks(plan)
    computer, share = ranks.costs.computer, ranks.share
    result: list[tuple[Operation, Share, int]] = []
    for body, count in Counter(unit.body for unit in case.work.profile.units).items():
        of_body = share.of(body, predictor.program.divides_ends)
        result += [(operation, of_body, count) for operation in computer.operations(body)]
    return computer, result


@dataclass(frozen=True)
class UnalignedProducts:
    """Products that unaligned rows slow down in the chosen plan: their rows, slowest first, and seconds per step.

    `product_seconds`: time of these products. `aligned_seconds`: time of the step with padded rows.
    `rate`: their speed relative to aligned products. `source`: origin of the rate.
    """

    rows: tuple[MatrixRow, ...]
    product_seconds: float
    step_seconds: float
    aligned_seconds: float
    rate: float
    source: str

    @property
    def lengths(self) -> str:
        """The rows' numbers of elements."""
        return " and ".join(f"{row.length:,}" for row in self.rows)

    @property
    def padded(self) -> str:
        """The numbers of elements to pad the rows to."""
        return " and ".join(f"{row.padded:,}" for row in self.rows)

    def __str__(self) -> str:
        on_ranks = " on each rank" if any(row.ranks > 1 for row in self.rows) else ""
        return (
            f"Products with rows of {self.lengths} numbers, no multiple of {ALIGNED}{on_ranks}, take "
            f"{seconds(self.product_seconds)} of a step: they run at {self.rate:.2g} of the rate of others "
            f"({self.source}). Padded to {self.padded} a step would take {seconds(self.aligned_seconds)} instead of "
            f"{seconds(self.step_seconds)}; that changes the model."
        )


def unaligned_products(case: Case, chosen: Candidate) -> UnalignedProducts | None:
    """Return the matrix products with rows that do not start at multiples of 16 bytes; None if they cost under 3 %.

    The plan's step is compared with its step on a device on which padding makes no difference.
    """
    device = case.cluster.device
    if device.unaligned >= 1.0 or case.cluster.kinds:  # several kinds have losses of their own
        return None
    computer, every = operators(case, chosen.plan)
    total, of_rows = 0.0, defaultdict[tuple[MatrixRow, ...], float](float)  # device seconds over the whole model
    for operation, share, count in every:
        spent = count * computer.operation(operation, share).device
        total += spent
        if computer.is_unaligned(operation, share):
            of_rows[unaligned_rows(operation, share)] += spent
    if not of_rows:
        return None
    cluster = replace(case.cluster, device=replace(device, unaligned=1.0))
    aligned_seconds = replace(case, cluster=cluster).search().bounds.predict(chosen.plan).step_seconds
    if chosen.seconds - aligned_seconds <= _WORTH * chosen.seconds:
        return None
    shares = {rows: spent / total for rows, spent in of_rows.items()}
    whole, most_first = sum(shares.values()), sorted(shares, key=lambda rows: -shares[rows])
    named = dict.fromkeys(row for rows in most_first if shares[rows] >= _NAMED * whole for row in rows)
    source = device.sources.get("unaligned", "no source is given")
    products = whole * chosen.prediction.terms["compute"]
    return UnalignedProducts(tuple(named), products, chosen.seconds, aligned_seconds, device.unaligned, source)


# ----------------------------------------------------------------------------------------------------- failures


def failures(case: Case, devices: int, device_hours: float) -> Failures:
    """Return the failure model of a run on `devices` devices that each fail once in `device_hours` on average."""
    hosts = case.cluster.num_hosts if case.cluster.kinds else -(-devices // case.cluster.devices_per_host)
    rate = (case.cluster.storage_bytes_per_second or STORAGE_BYTES_PER_SECOND) * hosts
    profile = case.work.profile  # a checkpoint contains the parameters in float32 and the optimizer's state
    seconds = profile.num_parameters * (4.0 + profile.state_bytes_per_element) / rate
    return Failures(device_hours * 3600.0 / devices, seconds, RESTART_SECONDS + seconds)


@dataclass(frozen=True)
class Failures:
    """Failure model of a run: mean time between failures (MTBF) of all devices, seconds of checkpoint and restart."""

    mtbf_seconds: float
    checkpoint_seconds: float
    restart_seconds: float


@dataclass(frozen=True)
class Goodput:
    """Seconds between checkpoints and of each, and the share of time that training gets."""

    interval_seconds: float
    checkpoint_seconds: float
    share: float
    failures_per_day: float


def daly(failures: Failures) -> float:
    """Return Daly's checkpoint interval in seconds, at most the MTBF.

    It is of higher order than Young's sqrt(2 x checkpoint x MTBF).
    """
    cost, mtbf = failures.checkpoint_seconds, failures.mtbf_seconds
    if cost >= 2.0 * mtbf:
        return mtbf
    ratio = cost / (2.0 * mtbf)
    return sqrt(2.0 * cost * mtbf) * (1.0 + sqrt(ratio) / 3.0 + ratio / 9.0) - cost


def share_left(interval: float, failures: Failures) -> float:
    """Return training time over wall time, with Poisson failures that may also hit checkpoints and restarts."""
    mtbf = failures.mtbf_seconds
    if isinf(mtbf):
        return interval / (interval + failures.checkpoint_seconds)
    lost = (interval + failures.checkpoint_seconds) / mtbf
    if lost + failures.restart_seconds / mtbf > 700.0:  # exp would overflow; no time is left for training
        return 0.0
    return interval / (mtbf * exp(failures.restart_seconds / mtbf) * expm1(lost))


def goodput(failures: Failures) -> Goodput:
    """Return the best checkpoint interval and the share of time that it leaves for training."""
    interval = daly(failures) if failures.checkpoint_seconds > 0.0 else 1.0
    left = 1.0 if isinf(interval) else share_left(interval, failures)
    return Goodput(interval, failures.checkpoint_seconds, left, 86400.0 / failures.mtbf_seconds)


# ------------------------------------------------------------------------------------------------------- grains

# Smallest gain in step time that justifies advice to use more grains, which changes the run.
_GAIN = 1.05


@dataclass(frozen=True)
class Finer:
    """Recommended number of grains and its plan; `before` is the best plan with the job's own number, if any fits."""

    num_grains: int
    candidate: Candidate
    case: Case
    before: Candidate | None

    @property
    def cause(self) -> str:
        """Sentence part that names the job's number of grains as the cause."""
        work = self.case.work
        prevents = "from fitting" if self.before is None else "from a better plan"
        return (
            f"the number of grains keeps the job {prevents}: {work.num_grains} of {work.grain_size} samples, of which "
            f"a microbatch has at least one whole, and which at most {work.num_grains} replicas share"
        )

    @property
    def effect(self) -> str:
        """Sentence part on the effect of the recommended number."""

        def rate(candidate: Candidate) -> str:
            share = candidate.prediction.mfu
            samples = f"{batch / candidate.seconds:,.0f} samples/s"
            return samples if share is None else f"{share:.0%} of the peak ({samples})"

        best, batch = self.candidate, self.case.work.global_batch
        brings = "fit, at" if self.before is None else "bring"
        instead = f" instead of {rate(self.before)}" if self.before is not None else ""
        return (
            f"Job(grains={self.num_grains}): grains of {-(-batch // self.num_grains)} {brings} {rate(best)}{instead}, "
            f"by {described(best.plan)} on {several(best.devices, 'device')}, {gib(best.prediction.peak_bytes)} each; "
            "it changes the run"
        )


def finer(case: Case, aim: Aim, best: Candidate | None) -> Finer | None:
    """Return a better number of grains than the job's, or None if grains are not the cause.

    The minimum microbatch, one grain, can make plans poor or impossible. The same case is searched again with one
    sample per grain. The best plan's microbatches give the grain size, and so the number of grains to recommend.
    `best`: the best plan with the job's own grains; None if none fits.
    """
    work, batch = case.work, case.work.global_batch
    if work.grain_size == 1 or case.space.max_grains == 1:
        return None

    def with_grains(number: int) -> Case:
        facts = replace(case.space.facts, num_grains=number, grain_size=-(-batch // number))
        return replace(case, work=replace(work, num_grains=number), space=replace(case.space, facts=facts))

    single, aim, limit = with_grains(batch), aim if best is None else Aim(), Limit()
    if best is not None:
        if best.plan.batch.grains_per_microbatch > 1 and best.place.replicas < work.num_grains:
            return None  # smaller microbatches and more replicas are both possible already
        counts = tuple(sorted({best.devices, case.space.counts[-1]}))
        single = replace(single, space=replace(single.space, counts=counts))
        limit = Limit(seconds=best.seconds / _GAIN)
    better = next(iter(single.search().take(Wanted(aim, limit))), None)
    if better is None:
        return None
    # The same plan with its microbatches as grains, if they divide the batch and are predicted no slower.
    size = better.plan.batch.grains_per_microbatch
    number = batch // size
    if size > 1 and batch % size == 0 and number >= max(better.place.replicas, work.num_grains + 1):
        one_grain = better.plan.batch.model_copy(update={"grains_per_microbatch": 1})
        plan, coarse = better.plan.model_copy(update={"batch": one_grain}), with_grains(number)
        if not coarse.space.refusal(plan):
            prediction = coarse.search().bounds.predict(plan)
            if prediction.fits and prediction.step_seconds <= better.seconds * _GAIN:
                return Finer(number, Candidate(plan, prediction), case, best)
    return Finer(batch, better, case, best)


# ------------------------------------------------------------------------------------------------ kinds of devices


@dataclass(frozen=True)
class KindsOfDevices:
    """Best plan on some kinds of devices of a cluster, or the reason why there is none. `names`: in rank order.

    `over`: seconds that a step of every plan exceeds, if another choice is better, so that none was searched.
    """

    names: tuple[str, ...]
    best: Candidate | None
    reason: str = ""
    over: float | None = None


def of_some_kinds(question: Question) -> Iterator[Question]:
    """Yield the question for each choice of the cluster's kinds, in the order of their speed, all kinds first.

    Of more than `_MOST_KINDS` kinds, the choices are all kinds and each kind alone.
    """
    case, most = question.case, question.case.space.counts[-1]
    predictor = MixedPredictor(case.work, case.own_cluster, case.own_program)
    order = sorted(range(len(case.cluster.kinds)), key=predictor.grain_seconds)
    kinds = [case.cluster.kinds[place] for place in order]
    if len(kinds) <= _MOST_KINDS:
        chosen = [some for number in range(len(kinds), 0, -1) for some in combinations(kinds, number)]
    else:
        chosen = [tuple(kinds), *((kind,) for kind in kinds)]
    for some in chosen:
        whole = some[0] if len(some) == 1 else joined(
            some, "+".join(kind.name for kind in some),
            case.cluster.within if case.cluster.num_hosts == 1 else None
        )  # fmt: skip
        if len(some) == len(kinds):
            whole = replace(whole, name=case.cluster.name, notes=case.cluster.notes)
        space = replace(case.space, counts=counts(whole, most), kinds=tuple(kind.num_devices for kind in whole.kinds))

        def within(other: Case, whole: Cluster = whole, space: Space = space) -> Case:
            own = replace(space, base=other.space.base)
            return replace(other, cluster=whole, space=own, correction=read_correction(whole.name))

        precise = question.precise
        if precise is not None:
            precise = precise[0], lambda make=precise[1], within=within: within(make())
        yield replace(question, case=within(case), precise=precise)


@dataclass(frozen=True, repr=False)
class SearchResult:
    """Result of a search with its outlook.

    `goodput`: set if the devices' failure rate is known. `finer`: set if more grains allow a better plan. `kinds`: the
    best plan on each choice of the cluster's kinds of devices, if there are several.
    """

    question: Question
    choice: Choice
    curve: ScalingCurve
    changes: tuple[Change, ...]
    goodput: Goodput | None
    search_seconds: float
    job: str
    finer: Finer | None = None
    kinds: tuple[KindsOfDevices, ...] = ()

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
    def modes(self) -> dict[str, float]:
        """Predicted seconds of a step of the chosen plan in other modes, by the names in `MODES`."""
        known = {words: name for name, (_, words) in MODES.items()}
        return {known[c.what]: c.seconds for c in self.changes if c.what in known and c.seconds is not None}

    @property
    def price(self) -> float | None:
        """US dollars per device-hour, the mean over the chosen plan's devices, or None if unknown."""
        return price_of(self.question.case.cluster, self.chosen.plan)

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks of the chosen plan on one host."""
        return min(self.chosen.devices, self.question.case.cluster.devices_per_host)

    @property
    def peak(self) -> tuple[str, float]:
        """The dtype of the products and the devices' mean dense peak for it in FLOP/s, the reference of `mfu`."""
        case, plan = self.question.case, self.chosen.plan
        predictor = case.predictor
        dtype = predictor.reference(plan)
        if case.cluster.kinds:
            mixed = MixedPredictor(case.work, case.own_cluster, case.own_program)
            return dtype, mixed.peak(plan)
        return dtype, predictor.staging.ranks(plan).device.flops[dtype]

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
        case, chosen, prediction = self.question.case, self.chosen, self.chosen.prediction
        about: dict[str, Any] = {
            "cluster": case.cluster.name,
            "devices": chosen.devices,
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
        if case.cluster.kinds:
            numbers = devices_of(case.cluster, chosen.plan.layout)
            about["kinds"] = {
                kind.name: number for kind, number in zip(case.cluster.kinds, numbers, strict=True) if number
            }
        if prediction.mfu is not None:
            about["peak_dtype"], about["peak_flops"] = self.peak
        if case.cluster.device.kind == "gpu":
            about |= {"mode": mode(chosen.plan), "modes": self.modes}
            words = {TF32: "tf32", **{f"--precision {name}, which changes the run": name for name in ("bf16", "fp16")}}
            others = ((words[c.what], c.seconds) for c in self.changes if c.what in words)
            about["precisions"] = {name: step for name, step in others if step is not None}
        about |= {"price_per_hour": self.price} if self.price is not None else {}
        about |= {"sample_tokens": self.question.sample_tokens} if self.question.sample_tokens is not None else {}
        document = chosen.plan.to_mapping()
        # The modules at which the prediction cuts the model, for the run to reuse; the plan's own split if unusable.
        split, pipeline = prediction.split, chosen.plan.pipeline
        known = all(name in case.space.facts.cuts for name in split)
        usable = known and len(split) == chosen.plan.layout.pipeline * pipeline.stages_per_rank - 1
        document["pipeline"]["split"] = list(split if usable else case.space.base.pipeline.split)
        document["prediction"] = section(prediction, about)
        return Plan.from_mapping(document, source="plan")
