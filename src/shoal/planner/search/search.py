"""Objectives of a search, best-first branch and bound over a plan space, and the choice of the best plan.

A node of the queue is a class of layouts, a schedule family, a schedule, a place or a plan, with a lower bound of its
key. The search replaces the node with the least bound by its children. A predicted plan that leaves the queue is the
next best, since no node in the queue can be better. So only plans that no bound excludes are predicted.
Source: Hart, Nilsson and Raphael, A formal basis for the heuristic determination of minimum cost paths (1968).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import count
from math import ceil
from typing import NamedTuple

from shoal.errors import CommandError, PlanError, nearest
from shoal.planner.predict.lower_bounds import Costs
from shoal.planner.predict.mixed import MixedCosts
from shoal.planner.predict.workload import Prediction
from shoal.planner.search.space import (
    Bounds,
    Degrees,
    Illegal,
    LayoutClass,
    MicrobatchSchedule,
    ModelDegrees,
    ScheduleFamily,
    Space,
    illegal,
    simplicity,
)
from shoal.plans.plan import Plan
from shoal.report.quantities import several

# Relative difference below which two plans tie, far less than the prediction error. Ties go to fewer devices, then to
# the simpler layout.
TIE = 0.01
# Relative speedup that justifies more devices. Of 284 pairs of published layouts with a smaller predicted difference,
# half were measured in the other order (docs/planner.md).
DISTINCT = 0.05
_NEVER = float("inf")
AIMS = ("fastest", "cheapest", "deadline", "efficiency", "widest")
SHARES = ("efficiency", "widest")  # relative to the cheapest layout
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

Key = tuple[float, ...]


@dataclass(frozen=True)
class Aim:
    """Objective of a search.

    `value`: deadline of the whole job in seconds, or the least efficiency in (0, 1].
    `name`: "fastest" minimizes the step time, "cheapest" the device-seconds, and so the price, of a step. "deadline" is
    the cheapest plan that ends the job in time. "efficiency" is the fewest devices that keep this share of the cheapest
    layout's throughput per device; "widest" is the most devices that keep it.
    """

    name: str = "fastest"
    value: float = 0.0

    def key(self, devices: int, seconds: float) -> Key:
        """Return the value to minimize. It never shrinks as `seconds` grows."""
        if self.name == "fastest":
            return (seconds,)
        if self.name == "efficiency":
            return (devices, seconds)
        if self.name == "widest":
            return (-devices, seconds)
        return (devices * seconds,)

    def __str__(self) -> str:
        """Format the aim as the command line spells it."""
        unit = "s" if self.name == "deadline" else ""
        return f"{self.name}={self.value:g}{unit}" if self.name in ("deadline", *SHARES) else self.name


@dataclass(frozen=True)
class Limit:
    """Upper limits of a layout: seconds of a step, and device-seconds of a step."""

    seconds: float = _NEVER
    device_seconds: float = _NEVER

    def allows(self, devices: int, seconds: float) -> bool:
        """Return True if a step of `seconds` on `devices` devices is within the limit."""
        return seconds <= self.seconds and devices * seconds <= self.device_seconds


def tied(key: Key, best: Key) -> bool:
    """Return True if two keys are too close to tell apart."""
    return key[:-1] == best[:-1] and key[-1] <= best[-1] * (1 + TIE)


def parse(text: str) -> Aim:
    """Parse `fastest`, `cheapest`, `deadline=2h`, `efficiency=0.8` or `widest=80%`.

    Raises: CommandError if the text is none of these.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if name not in AIMS:
        raise CommandError(
            given=f"--aim {text}",
            conflict="there is no such aim",
            remedy="write fastest, cheapest, deadline=2h, efficiency=0.8 or widest=0.8" + nearest(name, list(AIMS)),
        )
    if name in ("fastest", "cheapest"):
        if equals:
            raise CommandError(given=f"--aim {text}", conflict=f"{name} takes no value", remedy=f"write --aim {name}")
        return Aim(name)
    if name == "deadline":
        match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", value.lower())
        seconds = float(match[1]) * _UNITS.get(match[2], 0.0) if match else 0.0
        if not seconds:
            raise CommandError(
                given=f"--aim {text}",
                conflict="a deadline is the time of the whole job: a number above zero of s, m, h or d",
                remedy="write --aim deadline=2h, say",
            )
        return Aim(name, seconds)
    try:
        share = float(value.removesuffix("%")) / (100.0 if value.endswith("%") else 1.0)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise CommandError(
            given=f"--aim {text}",
            conflict=f"{name} takes a share in (0, 1]" + ("" if value else ", and there is none"),
            remedy=f"write --aim {name}=0.8 or {name}=80%",
        )
    return Aim(name, share)


def written_time(seconds: float) -> str:
    """Format seconds, rounded up, as a deadline in the largest unit of which there are at least two."""
    unit = next((name for name in ("d", "h", "m") if seconds >= 2 * _UNITS[name]), "s")
    return f"{ceil(10 * seconds / _UNITS[unit]) / 10:.12g}{unit}"


# ------------------------------------------------------------------------------------------------------------ search


@dataclass(frozen=True)
class Candidate:
    """A plan and its prediction. `devices`: number of ranks. `seconds`: predicted seconds of a step."""

    plan: Plan
    prediction: Prediction
    devices: int = field(init=False, repr=False, compare=False)
    seconds: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", self.plan.layout.world_size)
        object.__setattr__(self, "seconds", self.prediction.step_seconds)

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """Sort key among candidates: seconds, then simplicity."""
        return self.seconds, simplicity(self.plan)

    @property
    def place(self) -> Degrees:
        """The degrees of the plan, with data x shard as one number."""
        at = self.plan.layout
        return Degrees(at.data * at.shard, ModelDegrees(at.tensor, at.pipeline, at.context, at.expert))


class Wanted(NamedTuple):
    """Plans that a search looks for: the first `number` in the order of an aim on these numbers of devices.

    `ties`: take only plans that tie with the first one. `each_place`: take only the best plan of each place.
    """

    aim: Aim = Aim()
    limit: Limit = Limit()
    fewest: int = 1
    most: float = _NEVER
    number: float = 1
    ties: bool = False
    each_place: bool = False
    but: Degrees | None = None  # an excluded place


@dataclass
class Notes:
    """Statistics of searches on the plans that they did not choose."""

    predicted: dict[Degrees, Candidate] = field(default_factory=dict)  # best fitting plan of each place
    refused: dict[Degrees, str] = field(default_factory=dict)  # a reason per place with illegal plans
    missing: dict[Degrees, float] = field(default_factory=dict)  # least bytes that an examined plan lacks
    num_predicted: int = 0
    num_bounded: int = 0

    def lacks(self, place: Degrees, missing: float) -> None:
        """Record the bytes that a plan lacks."""
        self.missing[place] = min(missing, self.missing.get(place, missing))


class Node(NamedTuple):
    """Node of the search tree: all plans that agree in the fields that are not None.

    `seconds`: lower bound of their step time, or the predicted step time of a candidate.
    """

    seconds: float
    layouts: LayoutClass
    family: ScheduleFamily | None = None
    way: MicrobatchSchedule | None = None
    place: Degrees | None = None
    plan: Plan | None = None
    candidate: Candidate | None = None

    def children(self, bounds: Bounds, aim: Aim, notes: Notes) -> Iterator[Node]:
        """Yield the parts of this node that may fit, in the order of the aim's keys. `notes` records the others."""
        layouts, least = self.layouts, self.seconds
        if self.family is None:
            for seconds, family in bounds.families(layouts):
                yield Node(max(least, seconds + layouts.beside), layouts, family)
        elif self.way is None:
            for seconds, way in bounds.schedules(layouts, self.family):
                yield Node(max(least, seconds + layouts.beside), layouts, self.family, way)
        elif self.place is None:
            missing = bounds.memory.schedule_lacks(layouts.divided, self.way)
            if missing > 0:
                notes.lacks(layouts.divided, missing)
                return
            least = max(least, bounds.staged(layouts, self.way) + layouts.beside)
            for replicas in layouts.replicas[::-1] if aim.name == "widest" else layouts.replicas:
                place = Degrees(replicas, layouts.cut)
                seconds = least - layouts.beside + bounds.beside(place)
                yield Node(max(least, seconds), layouts, self.family, self.way, place)
        elif self.plan is None:
            if (seconds := bounds.at(self.place, self.way)) > least:
                yield self._replace(seconds=seconds)
                return
            plans = bounds.plans(self.place, self.way)
            notes.num_bounded += len(plans)
            for plan, missing, seconds in plans:
                if missing > 0:
                    notes.lacks(self.place, missing)
                else:
                    yield Node(max(least, seconds), layouts, self.family, self.way, self.place, plan)
        elif refusal := bounds.space.refusal(self.plan) or bounds.space.beyond(self.plan):
            notes.refused[self.place] = min(refusal, notes.refused.get(self.place, refusal))
        else:
            costs = bounds.costs(self.place.devices)
            plan = costs.shared_out(self.plan) if isinstance(costs, MixedCosts) else self.plan
            candidate = Candidate(plan, bounds.predict(plan))
            notes.num_predicted += 1
            if not candidate.prediction.fits:
                notes.lacks(self.place, candidate.prediction.missing_bytes)
                return
            if self.place not in notes.predicted or candidate.rank < notes.predicted[self.place].rank:
                notes.predicted[self.place] = candidate
            yield self._replace(seconds=candidate.seconds, candidate=candidate)

    def key(self, aim: Aim) -> Key:
        """Return a lower bound of the aim's key. No child has a smaller one."""
        if self.place is not None:
            return aim.key(self.place.devices, self.seconds)
        return aim.key((self.layouts.divided if aim.name == "widest" else self.layouts.first).devices, self.seconds)


class Search:
    """Branch-and-bound search of one space."""

    def __init__(
        self, space: Space, costs: Callable[[int], Costs], grain_size: int, watch: Callable[[], None] | None = None
    ) -> None:
        """Create a search with empty caches.

        `costs`: function from a number of devices to costs. `watch`: called repeatedly during the search.
        """
        self.space, self.costs, self.bounds = space, costs, Bounds(space, costs)
        self._grain_size, self._watch = grain_size, watch

    def with_more_memory(self, num_bytes: int) -> Search:
        """Return a search of devices with more memory."""
        larger = cache(lambda costs: costs.with_more_memory(num_bytes))
        costs = self.costs
        return Search(self.space, lambda devices: larger(costs(devices)), self._grain_size, self._watch)

    @cached_property
    def by_devices(self) -> dict[int, list[Degrees]]:
        """The places by number of devices."""
        by_devices: dict[int, list[Degrees]] = {}
        for place in self.space.places:
            by_devices.setdefault(place.devices, []).append(place)
        return by_devices

    def classes(self, places: Iterable[Degrees]) -> list[Node]:
        """Group places into layout classes, each a node with the bound of its degrees."""
        classes: dict[tuple[Costs, int, ModelDegrees], list[int]] = {}
        for place in places:
            key = self.bounds.costs_at(place), self.space.share(place), place.cut
            classes.setdefault(key, []).append(place.replicas)
        nodes = []
        for (costs, share, cut), replicas in classes.items():
            first, divided = Degrees(min(replicas), cut), Degrees(max(replicas), cut)
            beside = self.bounds.beside(first)
            floor = costs.floor(share * self._grain_size, divided.replicas, cut.tensor, cut.pipeline, cut.context)
            nodes.append(Node(floor + beside, LayoutClass(share, cut, tuple(sorted(replicas)), first, divided, beside)))
        return nodes

    @cached_property
    def _all_classes(self) -> list[Node]:
        return self.classes(self.space.places)

    def take(self, wanted: Wanted, notes: Notes | None = None) -> list[Candidate]:
        """Return the wanted plans in order; equal keys by simplicity."""
        aim, notes, numbers = wanted.aim, notes or Notes(), count()
        if wanted.fewest == 1 and wanted.most == _NEVER and wanted.but is None:
            nodes = self._all_classes
        else:
            counts = (n for n in self.by_devices if wanted.fewest <= n <= wanted.most)
            nodes = self.classes(place for n in counts for place in self.by_devices[n] if place != wanted.but)
        candidates: list[Candidate] = []
        ceiling: Key = (_NEVER,)  # of plans that are still wanted
        ended: set[Degrees] = set()
        # A node waits with its siblings: all of them have larger keys, and most never join the queue.
        queue: list[tuple[Key, tuple[int, ...], int, Node, Iterator[Node]]] = []

        def push(siblings: Iterator[Node]) -> None:
            for node in siblings:
                if wanted.limit.allows((node.place or node.layouts.first).devices, node.seconds):
                    # Among equal keys predicted plans leave last and in order of simplicity, so that all are known.
                    rank = node.candidate.rank[1] if node.candidate is not None else ()
                    heapq.heappush(queue, (node.key(aim), rank, next(numbers), node, siblings))
                    return

        push(iter(sorted(nodes, key=lambda node: node.key(aim))))
        while queue and queue[0][0] <= ceiling and len(candidates) < wanted.number:
            if self._watch is not None:
                self._watch()
            key, _, _, node, siblings = heapq.heappop(queue)
            push(siblings)
            if (
                ended
                and (node.place or node.layouts.divided) in ended
                and (node.place or len(node.layouts.replicas) == 1)
            ):
                continue
            if node.candidate is None:
                push(node.children(self.bounds, aim, notes))
                continue
            if wanted.ties and not candidates:
                ceiling = (*key[:-1], key[-1] * (1 + TIE))
            candidates.append(node.candidate)
            if wanted.each_place:
                ended.add(node.candidate.place)
        return candidates

    def nearest_missing(self, notes: Notes, places: Iterable[Degrees]) -> tuple[float, Degrees] | None:
        """Return the least bytes that any plan of these places lacks, and its place, or None if none lacks any.

        No plan of them fits. `notes`: of a search through all of them.
        """
        least = min(((missing, place) for place, missing in notes.missing.items()), default=None)
        for node in self.classes(places):
            limit = _NEVER if least is None else least[0]
            missing = self.bounds.memory.place_lacks(node.layouts.divided, limit)
            if 0 < missing < limit:
                least = missing, node.layouts.divided
        return least


# ------------------------------------------------------------------------------------------------------------ choice

GIB = 1 << 30
NUM_ALTERNATIVES = 5


@dataclass(frozen=True)
class Rejected:
    """Layout that was not chosen, and why. `seconds`: step time of its best plan, if one was predicted."""

    what: str
    devices: int
    reason: str
    seconds: float | None = None


@dataclass(frozen=True)
class Choice:
    """Result of a search."""

    aim: Aim
    chosen: Candidate
    faster: Candidate | None  # aim fastest: a plan on more devices, faster by less than the prediction error
    alternatives: tuple[Candidate, ...]  # best plan of each of the next best layouts, in order
    rejected: tuple[Rejected, ...]
    illegal: tuple[Illegal, ...]
    num_tied: int  # further plans that tie with the best; the simplest was chosen
    num_places: int  # layouts that were considered
    num_predicted: int  # plans
    num_bounded: int  # plans that bounds excluded


class NothingFitsError(PlanError):
    """No plan of a space meets the objective. The message states by how much the nearest plan misses it."""


def limit_of(search: Search, aim: Aim, num_steps: int | None) -> Limit:
    """Return the limit that the aim sets for plans.

    Raises: PlanError if a deadline is given and the length of the job is unknown.
    """
    if aim.name == "deadline":
        if num_steps is None:
            raise PlanError(
                given=f"--aim {aim}",
                conflict="the length of this job in steps is not known, and so not its time",
                remedy="write Job(length=shoal.Steps(N)), or another aim",
            )
        return Limit(seconds=aim.value / num_steps)
    if aim.name in SHARES:
        cheapest = search.take(Wanted(Aim("cheapest")))
        if cheapest:
            return Limit(device_seconds=cheapest[0].devices * cheapest[0].seconds / aim.value)
    return Limit()


def simplest(close: Sequence[Candidate]) -> Candidate:
    """Return the simplest candidate."""
    return min(close, key=lambda candidate: candidate.rank[1])


def choose(search: Search, aim: Aim, num_steps: int | None = None, limit: Limit | None = None) -> Choice:
    """Return the simplest of the plans that tie with the best one, with alternatives and rejections.

    `limit`: of the plans; None for the limit that the aim sets in this search.
    Raises: NothingFitsError if no plan meets the aim.
    """
    notes, limit = Notes(), limit_of(search, aim, num_steps) if limit is None else limit
    close = search.take(Wanted(aim, limit, number=_NEVER, ties=True), notes)
    if not close:
        raise _nothing(search, notes, aim, limit)
    chosen, faster = simplest(close), None
    if aim.name == "fastest" and chosen.devices > 1:
        # More devices must save more time than the prediction error, unless fewer devices are also less efficient: then
        # the table would show a plan that is both faster and cheaper. The aim "efficiency" orders by devices, then by
        # seconds.
        within = Limit(chosen.seconds * (1 + DISTINCT), chosen.devices * chosen.seconds)
        if fewer := search.take(Wanted(Aim("efficiency"), within, most=chosen.devices - 1), notes):
            devices = fewer[0].devices
            tied_on_fewer = search.take(Wanted(Aim(), within, devices, devices, number=_NEVER, ties=True), notes)
            faster, chosen = chosen, simplest(tied_on_fewer)
    devices = chosen.devices
    others = Wanted(aim, fewest=devices, most=devices, but=chosen.place, number=NUM_ALTERNATIVES, each_place=True)
    return Choice(
        aim=aim,
        chosen=chosen,
        faster=faster,
        alternatives=tuple(search.take(others, notes)),
        rejected=tuple(_rejected(search, notes, chosen)),
        illegal=tuple(illegal(search.space)),
        num_tied=len(close) - 1,
        num_places=len(search.space.places),
        num_predicted=notes.num_predicted,
        num_bounded=notes.num_bounded - notes.num_predicted,
    )


# ------------------------------------------------------------------------------------------------------ reasons


def gib(num_bytes: float) -> str:
    """Format bytes in GiB, MiB or KiB."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def _rejected(search: Search, notes: Notes, chosen: Candidate) -> list[Rejected]:
    """List the other layouts on the chosen number of devices, and the nearest layout on each other number."""
    own = [place for place in search.by_devices.get(chosen.devices, []) if place != chosen.place]
    rejected = [_reason(search, notes, place, chosen) for place in own]
    for devices, places in sorted(search.by_devices.items()):
        if devices != chosen.devices:
            predicted = [notes.predicted[place] for place in places if place in notes.predicted]
            if predicted:
                nearest_place = min(predicted, key=lambda one: (one.rank, one.place.cut)).place
            else:
                nearest_place = min(places, key=lambda place: place.cut)
            one = _reason(search, notes, nearest_place, chosen)
            rejected.append(replace(one, what=f"{several(devices, 'device')}, nearest: {one.what}"))
    return rejected


def _reason(search: Search, notes: Notes, place: Degrees, chosen: Candidate) -> Rejected:
    """Return a layout with the reason why it was not chosen."""
    best = notes.predicted.get(place)
    if best is not None:
        return Rejected(str(place), place.devices, compared(best, chosen), best.seconds)
    bounded, examined = "is bounded to be no better for this aim", notes.missing.get(place)
    if (missing := search.bounds.memory.place_lacks(place)) > 0:
        reason = f"does not fit by {gib(missing)}"
    elif place in notes.refused:
        reason = f"illegal: {notes.refused[place]}"
    elif examined is None:
        reason = f"every plan of it {bounded}"
    else:
        lacking = gib(search.bounds.memory.crowded_lack(place, examined))
        reason = f"what of it fits {bounded}; the rest lacks {lacking} or more"
    return Rejected(str(place), place.devices, reason)


def compared(other: Candidate, chosen: Candidate) -> str:
    """Explain why one candidate is not chosen over another, by the term that costs most more."""
    if other.seconds <= chosen.seconds:
        more = other.devices - chosen.devices
        if more > 0:
            return f"{chosen.seconds / other.seconds - 1:.0%} faster, with {several(more, 'more device')}"
        return "as fast within what a prediction can tell, and less simple"
    slower = f"{other.seconds / chosen.seconds - 1:.0%} slower"
    if other.devices >= chosen.devices and other.prediction.peak_bytes >= chosen.prediction.peak_bytes:
        slower = f"dominated by the chosen one: {slower}"
    terms = chosen.prediction.terms
    growth = {name: seconds - terms.get(name, 0.0) for name, seconds in other.prediction.terms.items()}
    name = max(growth, key=lambda term: growth[term])
    if name == "bubble":
        return f"{slower}, {other.prediction.bubble:.0%} bubble"
    return f"{slower}, {name} takes {growth[name] * 1e3:.3g} ms more"


def _nothing(search: Search, notes: Notes, aim: Aim, limit: Limit) -> NothingFitsError:
    """Return the error that states by how many bytes or seconds the nearest plan misses the aim."""
    counts = sorted(search.space.counts)
    sizes = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    given = f"--aim {aim} on {sizes} device{'s' if counts[-1] > 1 else ''}"
    fastest = search.take(Wanted()) if limit != Limit() else []
    if fastest and aim.name != "deadline":
        cheapest = search.take(Wanted(Aim("cheapest")))[0]
        conflict = f"the cheapest plan takes {cheapest.devices * cheapest.seconds:.3g} device-seconds a step, "
        conflict += f"and the aim allows {limit.device_seconds:.3g}"
        remedy = "write a smaller share, or another aim"
    elif fastest:
        needs = fastest[0].seconds / limit.seconds * aim.value
        step = f"{fastest[0].seconds:.3g} s a step on {several(fastest[0].devices, 'device')}"
        conflict = f"the fastest plan takes {written_time(needs)} for the whole job ({step})"
        remedy = f"write --aim deadline={written_time(needs)}, or give a larger cluster"
    elif (least := search.nearest_missing(notes, search.space.places)) is not None:
        missing, place = least
        margin = search.costs(counts[-1]).memory_margin
        free = f" beside the {margin:.0%} that plans leave free (memory_margin of the cluster)" if margin else ""
        conflict = f"no layout fits: the nearest ({place}) needs {gib(missing)} more on each device{free}"
        remedy = f"give devices with {gib(missing)} more memory, more devices, or a smaller batch or model"
    else:
        reasons = sorted(set(notes.refused.values()))
        conflict = "no layout is legal: " + "; ".join(reasons or ("the space is empty",))
        remedy = "give another --max-devices, or a larger cluster"
    return NothingFitsError(given=given, conflict=conflict, remedy=remedy)
