"""Passes through a plan space: the plans that each is for, and notes on those that it left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shoal.planner.search.aims import TIE, Aim, Ceiling, Key, Limit, tied
from shoal.planner.search.candidates import Candidate, Seen
from shoal.planner.search.order import PlanOrder
from shoal.planner.search.space import Degrees, ModelDegrees

if TYPE_CHECKING:
    from shoal.planner.search.search import Search

_NEVER = float("inf")


class Wanted(NamedTuple):
    """Plans that a pass is for: the first `number` in the order of an aim on these numbers of devices.

    ties: of them only those that are tied with the first. each_place: one of each place, its best.
    """

    aim: Aim = Aim()
    limit: Limit = Limit()
    fewest: int = 1
    most: float = _NEVER
    number: float = 1
    ties: bool = False
    each_place: bool = False
    but: Degrees | None = None  # a place that is left out

    @property
    def takes_all(self) -> bool:
        """Whether it leaves no place out."""
        return self.fewest == 1 and self.most == _NEVER and self.but is None

    def key(self, candidate: Candidate) -> Key:
        """Its place in the order."""
        return self.aim.key(candidate.devices, candidate.seconds)

    def taken(self, order: Iterable[Candidate], ceiling: Ceiling) -> Iterator[Candidate]:
        """The wanted ones of an order. The ceiling comes down as they are found."""
        best: Key | None = None
        for number, candidate in enumerate(order, 1):
            key = self.key(candidate)
            best = key if best is None else best
            if self.ties:
                if not tied(key, best):
                    return
                ceiling.lower((*best[:-1], best[-1] * (1 + TIE)))
            if number >= self.number:
                ceiling.lower(key)
            yield candidate
            if number >= self.number:
                return


class Nearest(NamedTuple):
    """The place of several whose predicted plan is the best, the first where none was predicted."""

    rank: tuple[float, tuple[int, ...]]
    cut: ModelDegrees
    place: Degrees


class Looked(NamedTuple):
    """A place as passes have left it: its best predicted plan, or why it has none."""

    best: Candidate | None = None
    missing: float = 0.0  # bytes that every plan of it lacks
    refused: str = ""  # why a plan of it is illegal
    lacking: float | None = None  # bytes that some plan of it lacks at least


class SearchPasses:
    """Passes of one answer through a search, and what they noted."""

    def __init__(self, search: Search) -> None:
        self._search, self._seen = search, Seen()
        self._order: PlanOrder | None = None

    def take(self, wanted: Wanted) -> list[Candidate]:
        """The wanted plans in order; equal keys by simplicity."""
        ceiling = Ceiling()
        found = self.run(wanted, ceiling)
        self.settle(ceiling.key)
        return found

    def run(self, wanted: Wanted, ceiling: Ceiling) -> list[Candidate]:
        """The wanted plans as far as the ceiling allows; what is noted waits for `settle`."""
        self._order = order = PlanOrder(self._search, wanted.aim, wanted.limit, ceiling)
        found = []
        for candidate in wanted.taken(order.run(self._search.classes_of(wanted)), ceiling):
            found.append(candidate)
            if wanted.each_place:
                order.ended.add(candidate.place)
        return found

    def settle(self, key: Key) -> None:
        """Keeps what the last pass noted up to this key, which is all that it had to look at."""
        if self._order is not None:
            self._order.settle(key, self._seen)
            self._order = None

    # ------------------------------------------------------------------------------------------------ what was noted

    def counts(self) -> tuple[int, int]:
        """Numbers of plans that were predicted, and that bounds alone excluded."""
        return self._seen.num_predicted, self._seen.num_bounded - self._seen.num_predicted

    def least_missing(self) -> float | None:
        """The least that a plan of any place lacks; None where none does."""
        return self._seen.least_missing_bytes

    def nearest_missing(self) -> tuple[float, Degrees] | None:
        """Bytes that the plan lacks that lacks least, and its place; None where none lacks any."""
        return min(((missing, place) for place, missing in self._seen.all_missing_bytes.items()), default=None)

    def refused(self) -> dict[Degrees, str]:
        """Why plans of places are illegal, where some are."""
        return self._seen.refused

    def nearest(self) -> dict[int, Nearest]:
        """Of each number of devices the place with the best plan that was predicted, the first where none was."""
        predicted = self._seen.predicted
        return {
            devices: min(
                Nearest(predicted[place].rank if place in predicted else (_NEVER, ()), place.cut, place)
                for place in places
            )
            for devices, places in self._search.by_devices.items()
        }

    def looked_at(self, places: Sequence[Degrees]) -> dict[Degrees, Looked]:
        """The state of places, of those that are in the space."""
        cuts = set(self._search.space.cuts)
        return {place: self._looked_at(place) for place in places if place.cut in cuts}

    def _looked_at(self, place: Degrees) -> Looked:
        seen = self._seen
        best = seen.predicted.get(place)
        if best is not None:
            return Looked(best=best)
        missing = self._search.missing_at_least(place)
        if missing > 0:
            return Looked(missing=missing)
        return Looked(refused=seen.refused.get(place, ""), lacking=seen.missing_bytes(place))
