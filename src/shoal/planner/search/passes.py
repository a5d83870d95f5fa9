"""Passes through a plan space: the plans that each pass looks for, and notes on the plans that it excludes."""

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
    """Plans that a pass looks for: the first `number` in the order of an aim on these numbers of devices.

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

    @property
    def takes_all(self) -> bool:
        """Whether the pass may take plans from every place."""
        return self.fewest == 1 and self.most == _NEVER and self.but is None

    def key(self, candidate: Candidate) -> Key:
        """Return the key of a candidate in the order of the aim."""
        return self.aim.key(candidate.devices, candidate.seconds)

    def taken(self, order: Iterable[Candidate], ceiling: Ceiling) -> Iterator[Candidate]:
        """Yield the wanted candidates of an order, and lower the ceiling accordingly."""
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
    """Place with the best predicted plan of several places, or the first place if none was predicted."""

    rank: tuple[float, tuple[int, ...]]
    cut: ModelDegrees
    place: Degrees


class Looked(NamedTuple):
    """Result of passes for a place: its best predicted plan, or the reason why it has none."""

    best: Candidate | None = None
    missing: float = 0.0  # lower bound of the bytes that every plan of the place lacks
    refused: str = ""  # reason why a plan of the place is illegal
    lacking: float | None = None  # least bytes that an examined plan of the place lacks


class SearchPasses:
    """Passes through a search for one answer, and their notes."""

    def __init__(self, search: Search) -> None:
        self._search, self._seen = search, Seen()
        self._order: PlanOrder | None = None

    def take(self, wanted: Wanted) -> list[Candidate]:
        """Return the wanted plans in order; equal keys by simplicity."""
        ceiling = Ceiling()
        found = self.run(wanted, ceiling)
        self.settle(ceiling.key)
        return found

    def run(self, wanted: Wanted, ceiling: Ceiling) -> list[Candidate]:
        """Return the wanted plans up to the ceiling. The notes of the pass wait for `settle`."""
        self._order = order = PlanOrder(self._search, wanted.aim, wanted.limit, ceiling)
        found = []
        for candidate in wanted.taken(order.run(self._search.classes_of(wanted)), ceiling):
            found.append(candidate)
            if wanted.each_place:
                order.ended.add(candidate.place)
        return found

    def settle(self, key: Key) -> None:
        """Store the notes of the last pass up to this key, which is all that the pass had to examine."""
        if self._order is not None:
            self._order.settle(key, self._seen)
            self._order = None

    # ----------------------------------------------------------------------------------------------------- the notes

    def counts(self) -> tuple[int, int]:
        """Return the numbers of predicted plans and of plans that only bounds excluded."""
        return self._seen.num_predicted, self._seen.num_bounded - self._seen.num_predicted

    def least_missing(self) -> float | None:
        """Return the least bytes that a plan of any place lacks, or None if none lacks any."""
        return self._seen.least_missing_bytes

    def nearest_missing(self) -> tuple[float, Degrees] | None:
        """Return the least bytes that any plan lacks, and its place, or None if none lacks any."""
        return min(((missing, place) for place, missing in self._seen.all_missing_bytes.items()), default=None)

    def refused(self) -> dict[Degrees, str]:
        """Return a reason for each place with illegal plans."""
        return self._seen.refused

    def nearest(self) -> dict[int, Nearest]:
        """Return for each number of devices the place with the best predicted plan, or the first place."""
        predicted = self._seen.predicted
        return {
            devices: min(
                Nearest(predicted[place].rank if place in predicted else (_NEVER, ()), place.cut, place)
                for place in places
            )
            for devices, places in self._search.by_devices.items()
        }

    def looked_at(self, places: Sequence[Degrees]) -> dict[Degrees, Looked]:
        """Return the results for those places that are in the space."""
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
