"""Scaling, sensitivity, failures and goodput of a chosen plan.

Goodput is the share of a run's time that remains after failures and checkpoints. Sources: J. W. Young, A first order
approximation to the optimum checkpoint interval, CACM 17 (1974); J. T. Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps, FGCS 22 (2006), equations 20 and 37.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import exp, expm1, isinf, sqrt

from shoal.hardware.values import Cluster, Link
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Program, Workload
from shoal.planner.search.aims import TIE, Aim, Limit
from shoal.planner.search.choice import counted, gib, simplest
from shoal.planner.search.costs import costs_of
from shoal.planner.search.search import Candidate, Notes, Search, Wanted
from shoal.planner.search.space import Space
from shoal.plans.legal import conflicts
from shoal.plans.plan import Plan

# Host seconds of a GPU step besides the model's operators: LeNet on H200s, torch 2.11, two hosts, 2026-11-26.
# Queued operations: from torch's profile. CUDA graph replays: 1.0 and 1.75 ms by the clock.
_QUEUED_SECONDS, _REPLAYED_SECONDS = 2.1e-3, 1.3e-3
# The plan's key and value in TOML.
GRAPH = "execution.cuda_graph = true"
# Adding devices stops paying if each adds less than this share of the best throughput per device.
PAYS = 0.5
_MOST_TIED = 20  # candidates for a point of the curve, from which the simplest is chosen
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
    def own_program(self) -> Program:
        """The program to predict; defaults to shoal's own, compiled if the base plan is."""
        fuses = self.space.base.execution.compile != "none"
        return self.program or Program(fuses=fuses, host_seconds=_QUEUED_SECONDS)

    @property
    def predictor(self) -> Predictor:
        """Predictor for this case's plans, the same as in the search."""
        return Predictor(self.work, self.cluster, self.own_program)

    def search(self) -> Search:
        """Return the search of this case."""
        costs = costs_of(self.work, self.cluster, self.own_program, self.correction)
        return Search(self.space, costs, self.work.grain_size, self.watch)


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
                    name: best.devices * taken - before.devices * before.prediction.terms.get(name, 0.0)
                    for name, taken in terms.items()
                }
                name = max(growth, key=lambda term: growth[term])
                limit = f"{name}, {terms[name] / best.seconds:.0%} of a step on {counted(best.devices)}"
        pays_until = pays_until if ended else point.devices
        judged.append(replace(point, efficiency=rate / (point.devices * best_rate), marginal=marginal))
        before = best
    return ScalingCurve(tuple(judged), pays_until, limit)


# -------------------------------------------------------------------------------------------------- sensitivity


def sensitivity(
    case: Case, search: Search, chosen: Candidate, precise: tuple[str, Case] | None = None
) -> tuple[Change, ...]:
    """Return the effects of a set of changes on the chosen plan.

    The changes: another precision, a CUDA graph, recomputation, 1 GiB more, twice a link, half and double the batch.
    `search`: the search of this case. `precise`: a precision as written on the command line, and its case.
    """
    changes = []
    if precise is not None:
        precision, other = precise
        plan = chosen.plan.with_sections(precision=other.space.base.to_mapping()["precision"])
        what = f"--precision {precision}, which changes the run"
        changes.append(_predicted(other, replace(chosen, plan=plan), what))
    graph = as_graph(case, chosen.plan)
    optional = [] if graph is None else [_predicted(graph, chosen, GRAPH)]
    for kind in case.space.recomputes:
        if kind != chosen.plan.memory.recompute:
            plan = chosen.plan.with_sections(memory={"recompute": kind})
            what = f"recompute = {kind}" if kind != "none" else "no recomputation"
            optional.append(_predicted(case, replace(chosen, plan=plan), what, tells_memory=True))
    changes += [change for change in optional if change.effect != "nothing"]
    wanted = Wanted(Aim(), Limit(seconds=chosen.seconds * (1 - TIE)), chosen.devices, chosen.devices)
    faster = search.with_more_memory(1 << 30).take(wanted)
    seconds = faster[0].seconds if faster else chosen.seconds
    changes.append(Change("1 GiB more on each device", seconds, _effect(chosen.seconds, seconds)))
    within, between = case.cluster.within, case.cluster.between
    if within is not None and chosen.devices > 1:
        cluster = replace(case.cluster, within=_twice(within))
        changes.append(_predicted(replace(case, cluster=cluster), chosen, f"twice the link in a host ({within.name})"))
    if between is not None and chosen.devices > case.cluster.devices_per_host:
        cluster = replace(case.cluster, between=_twice(between))
        what = f"twice the link between hosts ({between.name})"
        changes.append(_predicted(replace(case, cluster=cluster), chosen, what))
    for factor, what in ((0.5, "half the batch"), (2.0, "twice the batch")):
        batch = int(case.work.global_batch * factor)  # again one sample per grain, else the same number of grains
        num_grains = batch if case.work.grain_size == 1 else min(batch, case.work.num_grains)
        work = replace(case.work, global_batch=batch, num_grains=num_grains)
        if work.num_grains >= chosen.plan.layout.data * chosen.plan.layout.shard:
            other = replace(case, work=work)
            changes.append(_predicted(other, chosen, f"{what} ({work.global_batch:,} samples)", factor))
    return tuple(changes)


def as_graph(case: Case, plan: Plan) -> Case | None:
    """Return the case in which a plan's kernels do not wait for the host, as in a CUDA graph; None if impossible."""
    captured, device = plan.with_sections(execution={"cuda_graph": True}), case.cluster.device
    if device.kind != "gpu" or plan.execution.cuda_graph or conflicts(captured, case.space.facts):
        return None
    cluster = replace(case.cluster, device=replace(device, dispatch_seconds=0.0))
    return replace(case, cluster=cluster, program=replace(case.own_program, host_seconds=_REPLAYED_SECONDS))


def _twice(link: Link) -> Link:
    return replace(link, bytes_per_second=2 * link.bytes_per_second)


def _predicted(case: Case, chosen: Candidate, what: str, samples: float = 1.0, *, tells_memory: bool = False) -> Change:
    found = case.search().predict(chosen.plan)
    if not found.fits:
        return Change(what, None, f"does not fit by {gib(found.missing_bytes)}")
    effect = _effect(chosen.seconds, found.step_seconds / samples)
    if tells_memory and gib(found.peak_bytes) != gib(chosen.prediction.peak_bytes):
        effect = f"{effect}, {gib(found.peak_bytes)} instead of {gib(chosen.prediction.peak_bytes)}"
    return Change(what, found.step_seconds, effect)


def _effect(before: float, after: float) -> str:
    change = before / after - 1.0
    return "nothing" if abs(change) < TIE / 2 else f"{change:+.0%} samples a second"


# ----------------------------------------------------------------------------------------------------- failures


def failures(case: Case, devices: int, device_hours: float) -> Failures:
    """Return the failure model of a run on `devices` devices that each fail once in `device_hours` on average."""
    hosts = -(-devices // case.cluster.devices_per_host)
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
