"""Scaling, sensitivity and failures of a chosen plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.hardware.values import Cluster, Device, Link
from shoal.planner.answer.goodput import Failures
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.workload import Program, Workload
from shoal.planner.search.aims import TIE, Aim, Limit
from shoal.planner.search.choice import counted, gib, simplest
from shoal.planner.search.costs import costs_of
from shoal.planner.search.search import Candidate, Search, Seen
from shoal.planner.search.space import Space

# Devices that are added stop paying where each brings less than half of the throughput that a device brings at best.
PAYS = 0.5
_MOST_TIED = 20  # candidates of a point of the curve among which the simplest is taken
# Where a cluster does not say how fast it writes checkpoints: bytes a second of a host, and seconds of a restart.
STORAGE_BYTES_PER_SECOND, RESTART_SECONDS = 1e9, 120.0


@dataclass(frozen=True)
class Case:
    """Input of a prediction besides the plan: workload, cluster, search space, program and correction."""

    work: Workload
    cluster: Cluster
    space: Space
    program: Program | None = None
    correction: Correction | None = None

    def search(self) -> Search:
        """The search of this case."""
        costs = costs_of(self.work, self.cluster, self.program, self.correction)
        return Search(self.space, costs, self.work.grain_size)


@dataclass(frozen=True)
class Point:
    """Fastest plan on a number of devices, or the missing memory; `efficiency` against the best of the curve."""

    devices: int
    best: Candidate | None
    missing_bytes: float | None = None
    efficiency: float | None = None
    marginal: float | None = None  # throughput that each device added since the point before brings, likewise


@dataclass(frozen=True)
class ScalingCurve:
    """Scaling curve, the number of devices at which more stop paying, and what limits beyond it."""

    points: tuple[Point, ...]
    pays_until: int | None
    limit: str


@dataclass(frozen=True)
class Change:
    """Effect of a change of the case on a step of the chosen plan."""

    what: str
    seconds: float | None
    effect: str


def curve_counts(counts: tuple[int, ...], chosen: int) -> list[int]:
    """Powers of two, the largest and the chosen one, as far as they are legal."""
    wanted = {1 << power for power in range(counts[-1].bit_length())} | {chosen, counts[-1]}
    return sorted(wanted & set(counts))


def curve(search: Search, chosen: int) -> ScalingCurve:
    """The fastest plan on each of some numbers of devices."""
    points = []
    for devices in curve_counts(search.space.counts, chosen):
        seen = Seen()
        places = search.by_devices.get(devices, [])
        found = simplest(search.in_order(Aim(), places=places, seen=seen), Aim(), _MOST_TIED)
        if found is None:
            points.append(Point(devices, None, min(seen.missing_bytes.values(), default=None)))
        else:
            points.append(Point(devices, found[0]))
    rates = [1.0 / (p.devices * p.best.seconds) for p in points if p.best is not None]
    if not rates:
        return ScalingCurve(tuple(points), None, "nothing fits")
    return _judged(points, max(rates))


def _judged(points: list[Point], best_rate: float) -> ScalingCurve:
    """The points with their efficiencies; a point without a plan (no layout is legal, or fits) has none."""
    judged: list[Point] = []
    last: Point | None = None
    pays_until, limit, ended = None, "nothing up to the largest number of devices", False
    for point in points:
        if point.best is None:
            judged.append(point)
            continue
        rate = 1.0 / point.best.seconds
        marginal = None
        if last is not None and last.best is not None:
            added = (point.devices - last.devices) * best_rate
            marginal = (rate - 1.0 / last.best.seconds) / added
        if not ended and marginal is not None and marginal < PAYS and last is not None and last.best is not None:
            ended, limit = True, _limits(last.best, point.best)
        pays_until = pays_until if ended else point.devices
        last = replace(point, efficiency=rate / (point.devices * best_rate), marginal=marginal)
        judged.append(last)
    return ScalingCurve(tuple(judged), pays_until, limit)


def _limits(before: Candidate, after: Candidate) -> str:
    """The term whose device-seconds grow most from one number of devices to the next."""
    growth = {
        name: after.devices * seconds - before.devices * before.prediction.terms.get(name, 0.0)
        for name, seconds in after.prediction.terms.items()
    }
    name = max(growth, key=lambda term: growth[term])
    share = after.prediction.terms[name] / after.seconds
    return f"{name}, {share:.0%} of a step on {counted(after.devices)}"


# -------------------------------------------------------------------------------------------------- sensitivity


def sensitivity(case: Case, chosen: Candidate) -> tuple[Change, ...]:
    """Effects of one more GiB, twice each link, and half or double the batch."""
    changes = [_more_memory(case, chosen)]
    within, between = case.cluster.within, case.cluster.between
    if within is not None and chosen.devices > 1:
        cluster = replace(case.cluster, within=_twice(within))
        changes.append(_predicted(replace(case, cluster=cluster), chosen, f"twice the link in a host ({within.name})"))
    if between is not None and chosen.devices > case.cluster.devices_per_host:
        cluster = replace(case.cluster, between=_twice(between))
        what = f"twice the link between hosts ({between.name})"
        changes.append(_predicted(replace(case, cluster=cluster), chosen, what))
    for factor, what in ((0.5, "half the batch"), (2.0, "twice the batch")):
        batch = int(case.work.global_batch * factor)
        if batch >= case.work.num_grains:
            other = replace(case, work=replace(case.work, global_batch=batch))
            changes.append(_predicted(other, chosen, f"{what} ({batch} samples)", factor))
    return tuple(changes)


def _twice(link: Link) -> Link:
    return replace(link, bytes_per_second=2 * link.bytes_per_second)


def _more_memory(case: Case, chosen: Candidate) -> Change:
    """A better plan on as many devices, if each had a GiB more."""

    def larger(device: Device) -> Device:
        return replace(device, memory_bytes=device.memory_bytes + (1 << 30))

    old = case.cluster
    cluster = replace(
        old,
        device=larger(old.device),
        alternatives={ranks: larger(device) for ranks, device in old.alternatives.items()},
    )
    search = replace(case, cluster=cluster, space=case.space.at(chosen.devices)).search()
    better = Limit(seconds=chosen.seconds * (1 - TIE))
    found = next(search.in_order(Aim(), better), None)
    seconds = found.seconds if found is not None else chosen.seconds
    return Change("1 GiB more on each device", seconds, _effect(chosen.seconds, seconds))


def _predicted(case: Case, chosen: Candidate, what: str, samples: float = 1.0) -> Change:
    found = case.search().predict(chosen.plan)
    if not found.fits:
        return Change(what, None, f"does not fit by {gib(found.missing_bytes)}")
    return Change(what, found.step_seconds, _effect(chosen.seconds, found.step_seconds / samples))


def _effect(before: float, after: float) -> str:
    change = before / after - 1.0
    return "nothing" if abs(change) < TIE / 2 else f"{change:+.0%} samples a second"


# ----------------------------------------------------------------------------------------------------- failures


def checkpoint_bytes(work: Workload) -> float:
    """Parameters in float32 and the optimizer's state."""
    return work.profile.num_parameters * (4.0 + work.profile.state_bytes_per_element)


def failures(case: Case, devices: int, device_hours: float) -> Failures:
    """How a run on so many devices fails, where one device does once in `device_hours` on average."""
    hosts = -(-devices // case.cluster.devices_per_host)
    rate = (case.cluster.storage_bytes_per_second or STORAGE_BYTES_PER_SECOND) * hosts
    seconds = checkpoint_bytes(case.work) / rate
    return Failures(device_hours * 3600.0 / devices, seconds, RESTART_SECONDS + seconds)
