"""Choice of the best plan for an objective, the next best layouts, and the reasons against each other one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from shoal.errors import PlanError
from shoal.planner.search.aims import SHARES, TOLD_APART, Aim, Key, Limit, tied, written_time
from shoal.planner.search.candidates import Candidate, Seen
from shoal.planner.search.search import Search
from shoal.planner.search.space import Degrees, Illegal, simplicity

GIB = 1 << 30
NUM_ALTERNATIVES = 5
_NEVER = float("inf")


@dataclass(frozen=True)
class Rejected:
    """Layout that was not chosen, and why; `seconds` of its best plan, or a bound of them."""

    what: str
    devices: int
    reason: str
    seconds: float | None = None


@dataclass(frozen=True)
class Choice:
    """Result of a search."""

    aim: Aim
    chosen: Candidate
    faster: Candidate | None  # on more devices, by less than a prediction can tell, where the aim is the fastest
    alternatives: tuple[Candidate, ...]  # the best plans of the next best layouts, in order
    rejected: tuple[Rejected, ...]
    illegal: tuple[Illegal, ...]
    num_tied: int  # plans too close to the best to tell apart, of which the simplest was chosen
    num_places: int  # layouts that were considered
    num_predicted: int  # plans
    num_bounded: int  # plans that bounds excluded


class NothingFitsError(PlanError):
    """No plan of a space meets the objective; the message says by how much the nearest misses it."""


def limit_of(search: Search, aim: Aim, num_steps: int | None) -> Limit:
    """The limit of plans under the aim. Raises: PlanError of a deadline where the job's length is unknown."""
    if aim.name == "deadline":
        if num_steps is None:
            raise PlanError(
                given=f"--aim {aim}",
                conflict="the length of this job in steps is not known, and so not its time",
                remedy="write Job(length=shoal.Steps(N)), or another aim",
            )
        return Limit(seconds=aim.value / num_steps)
    if aim.name in SHARES:
        cheapest = next(search.in_order(Aim("cheapest")), None)
        if cheapest is not None:
            return Limit(device_seconds=cheapest.devices * cheapest.seconds / aim.value)
    return Limit()


def simplest(order: Iterator[Candidate], aim: Aim, most: int | None = None) -> tuple[Candidate, list[Candidate]] | None:
    """The simplest of those that are as good as the first of an order (of `most` at most), and all of these."""
    best = next(order, None)
    if best is None:
        return None
    close = [best, *takewhile(lambda candidate: tied(_key(aim, candidate), _key(aim, best)), islice(order, most))]
    return min(close, key=lambda candidate: simplicity(candidate.plan)), close


def choose(search: Search, aim: Aim, num_steps: int | None = None) -> Choice:
    """The simplest of the plans that are as good as the best. Raises: NothingFitsError."""
    seen = Seen()
    limit = limit_of(search, aim, num_steps)
    found = simplest(search.in_order(aim, limit, seen=seen), aim)
    if found is None:
        raise _nothing(search, aim, seen, limit)
    chosen, close = found
    fewer = _fewer(search, aim, chosen, seen)
    faster, chosen = (chosen, fewer) if fewer is not None else (None, chosen)
    others = [place for place in search.by_devices[chosen.devices] if place != chosen.place]
    alternatives = tuple(islice(search.best_of_each(aim, others, seen), NUM_ALTERNATIVES))
    return Choice(
        aim=aim,
        chosen=chosen,
        faster=faster,
        alternatives=alternatives,
        rejected=tuple(_rejected(search, seen, chosen)),
        illegal=tuple(search.space.illegal()),
        num_tied=len(close) - 1,
        num_places=len(search.places),
        num_predicted=seen.num_predicted,
        num_bounded=seen.num_bounded - seen.num_predicted,
    )


def _fewer(search: Search, aim: Aim, best: Candidate, seen: Seen) -> Candidate | None:
    """A plan on fewer devices that no prediction tells from the fastest: more have to be worth more than its error."""
    if aim.name != "fastest" or best.devices == 1:
        return None
    within = Limit(seconds=best.seconds * (1 + TOLD_APART))
    fewest = Aim("efficiency")  # by devices, then by seconds
    places = [place for place in search.places if place.devices < best.devices]
    first = next(search.in_order(fewest, within, places, seen), None)
    if first is None:
        return None
    found = simplest(search.in_order(Aim(), within, search.by_devices[first.devices], seen), Aim())
    return found[0] if found else first


def _key(aim: Aim, candidate: Candidate) -> Key:
    return aim.key(candidate.devices, candidate.seconds)


# ------------------------------------------------------------------------------------------------------ reasons


def gib(num_bytes: float) -> str:
    """Bytes as people read them."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def counted(devices: int) -> str:
    """A number of devices in words."""
    return "1 device" if devices == 1 else f"{devices} devices"


def _rejected(search: Search, seen: Seen, chosen: Candidate) -> Iterator[Rejected]:
    """Each place that was not chosen on as many devices, by itself; the others by their number of devices."""
    own = chosen.place
    for place in search.by_devices.get(chosen.devices, []):
        if place != own:
            yield _reason(search, seen, place, chosen)
    for devices, places in sorted(search.by_devices.items()):
        if devices == chosen.devices:
            continue
        nearest = min(places, key=lambda place: seen.predicted[place].rank if place in seen.predicted else (_NEVER, ()))
        found = _reason(search, seen, nearest, chosen)
        yield replace(found, what=f"{counted(devices)}, nearest: {found.what}")


def _reason(search: Search, seen: Seen, place: Degrees, chosen: Candidate) -> Rejected:
    best = seen.predicted.get(place)
    if best is not None:
        return Rejected(str(place), place.devices, compared(best, chosen), best.seconds)
    missing = search.missing_at_least(place)
    if missing > 0:
        return Rejected(str(place), place.devices, f"does not fit by {gib(missing)}")
    if place in seen.refused:
        return Rejected(str(place), place.devices, f"illegal: {seen.refused[place]}")
    bounded = "is bounded to be no better for this aim"
    lacking = seen.missing_bytes(place)
    if lacking is None:
        return Rejected(str(place), place.devices, f"every plan of it {bounded}")
    return Rejected(str(place), place.devices, f"what of it fits {bounded}; the rest lacks {gib(lacking)} or more")


def compared(other: Candidate, chosen: Candidate) -> str:
    """Why one candidate is not chosen over another, in words: what it pays for most that the other does not."""
    if other.seconds <= chosen.seconds:
        more = other.devices - chosen.devices
        if more > 0:
            return f"{chosen.seconds / other.seconds - 1:.0%} faster, with {more} more device{'s' if more > 1 else ''}"
        return "as fast within what a prediction can tell, and less simple"
    slower = f"{other.seconds / chosen.seconds - 1:.0%} slower"
    dominated = other.devices >= chosen.devices and other.prediction.peak_bytes >= chosen.prediction.peak_bytes
    return f"{'dominated by the chosen one: ' if dominated else ''}{slower}, {_most_of_the_difference(other, chosen)}"


def _most_of_the_difference(other: Candidate, chosen: Candidate) -> str:
    """The term that takes most more of a step, and how much more."""
    mine = chosen.prediction.terms
    growth = {name: seconds - mine.get(name, 0.0) for name, seconds in other.prediction.terms.items()}
    name = max(growth, key=lambda term: growth[term])
    if name == "bubble":
        return f"{other.prediction.bubble:.0%} bubble"
    return f"{name} takes {growth[name] * 1e3:.3g} ms more"


def _nothing(search: Search, aim: Aim, seen: Seen, limit: Limit) -> NothingFitsError:
    """By how much the nearest misses it: in bytes, or in time."""
    counts = sorted(search.space.counts)
    sizes = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    given = f"--aim {aim} on {sizes} device{'s' if counts[-1] > 1 else ''}"
    if limit != Limit() and (fastest := next(search.in_order(Aim()), None)) is not None:
        needs = fastest.seconds / limit.seconds * aim.value
        step = f"{fastest.seconds:.3g} s a step on {counted(fastest.devices)}"
        conflict = f"the fastest plan takes {written_time(needs)} for the whole job ({step})"
        remedy = f"write --aim deadline={written_time(needs)}, or give a larger cluster"
    elif not seen.all_missing_bytes:
        conflict = "no layout is legal: " + "; ".join(seen.refused.values() or ("the space is empty",))
        remedy = "give another --max-devices, or a larger cluster"
    else:
        missing, place = min((missing, place) for place, missing in seen.all_missing_bytes.items())
        margin = search.costs(counts[-1]).memory_margin
        free = f" beside the {margin:.0%} that plans leave free (memory_margin of the cluster)" if margin else ""
        conflict = f"no layout fits: the nearest ({place}) needs {gib(missing)} more on each device{free}"
        remedy = f"give devices with {gib(missing)} more memory, more devices, or a smaller batch or model"
    return NothingFitsError(given=given, conflict=conflict, remedy=remedy)
