"""Choice of the best plan for an objective, the next best layouts, and the reasons against every other layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.errors import PlanError
from shoal.planner.search.aims import SHARES, TOLD_APART, Aim, Limit, written_time
from shoal.planner.search.search import Candidate, Notes, Search, Wanted
from shoal.planner.search.space import Degrees, Illegal, simplicity

GIB = 1 << 30
NUM_ALTERNATIVES = 5
_NEVER = float("inf")


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
    return min(close, key=lambda candidate: simplicity(candidate.plan))


def choose(search: Search, aim: Aim, num_steps: int | None = None) -> Choice:
    """Return the simplest of the plans that tie with the best one, with alternatives and rejections.

    Raises: NothingFitsError if no plan meets the aim.
    """
    notes, limit = Notes(), limit_of(search, aim, num_steps)
    close = search.take(Wanted(aim, limit, number=_NEVER, ties=True), notes)
    if not close:
        raise _nothing(search, notes, aim, limit)
    chosen = simplest(close)
    fewer = _fewer(search, notes, aim, chosen)
    faster, chosen = (chosen, fewer) if fewer is not None else (None, chosen)
    devices = chosen.devices
    others = Wanted(aim, fewest=devices, most=devices, but=chosen.place, number=NUM_ALTERNATIVES, each_place=True)
    alternatives = tuple(search.take(others, notes))
    return Choice(
        aim=aim,
        chosen=chosen,
        faster=faster,
        alternatives=alternatives,
        rejected=tuple(_rejected(search, notes, chosen)),
        illegal=tuple(search.space.illegal()),
        num_tied=len(close) - 1,
        num_places=len(search.places),
        num_predicted=notes.num_predicted,
        num_bounded=notes.num_bounded - notes.num_predicted,
    )


def _fewer(search: Search, notes: Notes, aim: Aim, best: Candidate) -> Candidate | None:
    """Return the simplest plan on the fewest devices that ties with the fastest within `TOLD_APART`, or None.

    More devices must save more time than the prediction error.
    """
    if aim.name != "fastest" or best.devices == 1:
        return None
    within = Limit(seconds=best.seconds * (1 + TOLD_APART))
    # The aim "efficiency" orders by devices, then by seconds.
    first = search.take(Wanted(Aim("efficiency"), within, most=best.devices - 1), notes)
    if not first:
        return None
    devices = first[0].devices
    return simplest(search.take(Wanted(Aim(), within, devices, devices, number=_NEVER, ties=True), notes))


# ------------------------------------------------------------------------------------------------------ reasons


def gib(num_bytes: float) -> str:
    """Format bytes in GiB, MiB or KiB."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def counted(devices: int) -> str:
    """Format a number of devices."""
    return "1 device" if devices == 1 else f"{devices} devices"


def _rejected(search: Search, notes: Notes, chosen: Candidate) -> list[Rejected]:
    """List the other layouts on the chosen number of devices, and the nearest layout on each other number."""
    own = [place for place in search.by_devices.get(chosen.devices, []) if place != chosen.place]
    found = [_reason(search, notes, place, chosen) for place in own]
    for devices, places in sorted(search.by_devices.items()):
        if devices != chosen.devices:
            predicted = [notes.predicted[place] for place in places if place in notes.predicted]
            nearest = (
                min(predicted, key=lambda one: (one.rank, one.place.cut)).place
                if predicted
                else min(places, key=lambda place: place.cut)
            )
            one = _reason(search, notes, nearest, chosen)
            found.append(replace(one, what=f"{counted(devices)}, nearest: {one.what}"))
    return found


def _reason(search: Search, notes: Notes, place: Degrees, chosen: Candidate) -> Rejected:
    best = notes.predicted.get(place)
    if best is not None:
        return Rejected(str(place), place.devices, compared(best, chosen), best.seconds)
    missing = search.bounds.missing_at_least(place)
    if missing > 0:
        return Rejected(str(place), place.devices, f"does not fit by {gib(missing)}")
    if place in notes.refused:
        return Rejected(str(place), place.devices, f"illegal: {notes.refused[place]}")
    bounded, examined = "is bounded to be no better for this aim", notes.missing.get(place)
    if examined is None:
        return Rejected(str(place), place.devices, f"every plan of it {bounded}")
    lacking = gib(search.bounds.crowded_missing(place, examined))
    return Rejected(str(place), place.devices, f"what of it fits {bounded}; the rest lacks {lacking} or more")


def compared(other: Candidate, chosen: Candidate) -> str:
    """Explain why one candidate is not chosen over another, by the term that costs most more."""
    if other.seconds <= chosen.seconds:
        more = other.devices - chosen.devices
        if more > 0:
            return f"{chosen.seconds / other.seconds - 1:.0%} faster, with {more} more device{'s' if more > 1 else ''}"
        return "as fast within what a prediction can tell, and less simple"
    slower = f"{other.seconds / chosen.seconds - 1:.0%} slower"
    dominated = other.devices >= chosen.devices and other.prediction.peak_bytes >= chosen.prediction.peak_bytes
    return f"{'dominated by the chosen one: ' if dominated else ''}{slower}, {_most_of_the_difference(other, chosen)}"


def _most_of_the_difference(other: Candidate, chosen: Candidate) -> str:
    """Name the term that grows most from the chosen step to the other, and its growth."""
    mine = chosen.prediction.terms
    growth = {name: seconds - mine.get(name, 0.0) for name, seconds in other.prediction.terms.items()}
    name = max(growth, key=lambda term: growth[term])
    if name == "bubble":
        return f"{other.prediction.bubble:.0%} bubble"
    return f"{name} takes {growth[name] * 1e3:.3g} ms more"


def _nothing(search: Search, notes: Notes, aim: Aim, limit: Limit) -> NothingFitsError:
    """Return the error that states by how many bytes or seconds the nearest plan misses the aim."""
    counts = sorted(search.space.counts)
    sizes = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    given = f"--aim {aim} on {sizes} device{'s' if counts[-1] > 1 else ''}"
    fastest = search.take(Wanted()) if limit != Limit() else []
    if fastest:
        needs = fastest[0].seconds / limit.seconds * aim.value
        step = f"{fastest[0].seconds:.3g} s a step on {counted(fastest[0].devices)}"
        conflict = f"the fastest plan takes {written_time(needs)} for the whole job ({step})"
        remedy = f"write --aim deadline={written_time(needs)}, or give a larger cluster"
    elif (nearest := search.nearest_missing(notes, search.places)) is not None:
        missing, place = nearest
        margin = search.costs(counts[-1]).memory_margin
        free = f" beside the {margin:.0%} that plans leave free (memory_margin of the cluster)" if margin else ""
        conflict = f"no layout fits: the nearest ({place}) needs {gib(missing)} more on each device{free}"
        remedy = f"give devices with {gib(missing)} more memory, more devices, or a smaller batch or model"
    else:
        reasons = sorted(set(notes.refused.values()))
        conflict = "no layout is legal: " + "; ".join(reasons or ("the space is empty",))
        remedy = "give another --max-devices, or a larger cluster"
    return NothingFitsError(given=given, conflict=conflict, remedy=remedy)
