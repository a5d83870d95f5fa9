"""Data loaders: the microbatches of this rank for each step, prefetched where that helps, and moved to the device.

A loader is told the step; it has no position of its own that could differ from the trainer's.
"""

from __future__ import annotations

import functools
import itertools
import signal
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shoal.data.order import Order
from shoal.data.quarantine import Fetched, Quarantine, with_replaced
from shoal.data.sample_digest import Ids, grain_words, spread, words_of_steps
from shoal.data.sample_workers import SampleWorkers
from shoal.data.source import MapSource, SampleSource
from shoal.errors import DataError, ShoalError
from shoal.launch.signals import stop_signals
from shoal.numerics.flat import is_strided, strided_parts
from shoal.numerics.isolation import generators_kept
from shoal.plans.grains import Grain, microbatches, random_key, share

# So many steps of a small batch are drawn and digested at once, some tenths of a millisecond of one of them.
_STEPS_AHEAD, _SAMPLES_AHEAD = 16, 4096
# In exact mode up to so many samples are read twice, for about so long.
_REPEATED_SAMPLES, _REPEATED_SECONDS = 256, 0.2


@dataclass  # made in every step
class Microbatch:
    """Neighbouring grains that share one forward; `batch` is the collate function's result.

    `ids` holds one int64 array of sample ids a grain, `replaced` which sample was read in the place of one that could
    not be. `read` makes a microbatch of some of the samples, read again.
    `known_words`: `words`, where they were computed before.
    """

    step: int
    grains: tuple[Grain, ...]
    ids: tuple[Ids, ...]
    batch: Any
    read: Callable[[tuple[Grain, ...], tuple[Ids, ...]], Microbatch]
    known_words: list[float] | None = None
    replaced: Mapping[int, int] = field(default_factory=dict)

    @property
    def read_ids(self) -> tuple[Ids, ...]:
        """The ids of the samples that were read."""
        return with_replaced(self.ids, self.replaced)

    @property
    def num_samples(self) -> int:
        """Samples in all its grains."""
        return sum([g.size for g in self.grains])

    @property
    def words(self) -> list[float]:
        """The digests of its grains, added up."""
        return self.known_words or grain_words(self.step, [grain.index for grain in self.grains], self.read_ids)

    def split(self) -> list[Microbatch]:
        """The same samples, read again, grain by grain."""
        return [self.read((grain,), (ids,)) for grain, ids in zip(self.grains, self.ids, strict=True)]

    def samples(self) -> list[Microbatch]:
        """The samples of a single grain, read again, one by one."""
        (grain,), (ids,) = self.grains, self.ids
        alone = [Grain(grain.index, grain.start + i, 1) for i in range(grain.size)]
        return [self.read((one,), (ids[i : i + 1],)) for i, one in enumerate(alone)]

    def without_batch(self) -> Microbatch:
        """The same, which keeps no tensors; dataclasses.replace would take three times as long."""
        return Microbatch(self.step, self.grains, self.ids, None, self.read, self.known_words, self.replaced)


@dataclass  # made in every step
class StepData:
    """One rank's microbatches of one step: `num_microbatches` of them, which may be none."""

    step: int
    epoch: int
    num_microbatches: int
    microbatches: Iterator[Microbatch]


class Transfer:
    """Moves batches by `move`; on CUDA from pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self._move = move
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batch: Any) -> Callable[[], Any]:
        """Begins to move a batch; the result gives it, ready for use on the current stream."""
        stream = self._stream
        if stream is None:
            return functools.partial(self._move, batch)
        pinned = tree_map(_pin, batch)
        with torch.cuda.stream(stream):
            moved = self._move(pinned)

        def ready() -> Any:
            current = torch.cuda.current_stream()
            current.wait_stream(stream)
            # The allocator may give the memory away once the side stream is done with it; the current one is not yet.
            for leaf in tree_leaves(moved):
                for part in strided_parts(leaf) if isinstance(leaf, Tensor) else ():
                    part.record_stream(current)
            return moved

        return ready


def _pin(value: Any) -> Any:
    # torch pins blocks of numbers; what is sparse or nested is moved from where it lies.
    movable = isinstance(value, Tensor) and value.is_cpu and is_strided(value) and not value.is_pinned()
    return value.pin_memory() if movable else value


@dataclass(frozen=True)
class DataRank:
    """This rank's index among the data ranks, and their number."""

    rank: int
    num_ranks: int


@dataclass(frozen=True)
class DataIncident:
    """Incident of a loader: samples that cannot be read (`bad`, with what they raised), or else worker processes."""

    what: str
    done: str
    seconds: float | None = None
    bad: Mapping[int, str] = field(default_factory=dict)


class Loader(ABC):
    """Interface of data loaders: one rank's microbatches of each step. This one has no state beyond the step."""

    may_draw = True  # whether reading may draw from this process's global generators
    looks_ahead: bool  # whether a step may be read before the one in hand is committed

    def __init__(self) -> None:
        self.incidents: list[DataIncident] = []  # that nobody was told of yet

    def leave_out(self, bad: Mapping[int, str]) -> None:  # noqa: B027
        """Reads these samples no more. Raises: DataError where they are more than are allowed."""

    def warn_of_incidents(self) -> None:
        """Warns of what befell the reading, where no event log has a line for it."""
        for incident in self.incidents:
            warnings.warn(f"{incident.what}; {incident.done}", RuntimeWarning, stacklevel=2)
        self.incidents.clear()

    @abstractmethod
    def seek(self, step: int, grains_per_microbatch: int) -> None:
        """Makes `step` the next one, in microbatches of so many grains."""

    @abstractmethod
    def step(self, step: int) -> StepData | None:
        """This rank's part of `step`; None where the data have ended. Raises: DataError."""

    @abstractmethod
    def most_microbatches(self, step: int) -> int:
        """How many microbatches the rank with most of them has in `step`."""

    @abstractmethod
    def filler(self, step: int) -> Microbatch:
        """Some microbatch of `step` for a rank that has fewer than others, to compute with weight zero."""

    def fillers(self, step: int) -> Iterator[Microbatch]:
        """All microbatches of `step`, in an order that is the same on all ranks."""
        yield self.filler(step)

    def check_repeats(self, step: int) -> None:  # noqa: B027 - a stream is read once
        """Read two grains of `step` twice, and samples all over the set. Raises: DataError where one differs."""

    @abstractmethod
    def first_grains(self, step: int, count: int = 2) -> Microbatch | None:
        """So many grains of `step` in one microbatch, the first as far as this rank can read them; None without any.

        Of a map-style dataset they are the same on all ranks. Raises: DataError.
        """

    def commit(self) -> None:  # noqa: B027 - what a loader without a state has to do
        """Says that the step asked for last has been trained on; until then asking for it again gives it again."""

    def state(self) -> dict[str, Any]:
        """State from which `restore` continues after the last committed step. JSON values."""
        return {}

    def restore(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Takes up the states of all the ranks that saved them, whatever their number."""

    def close(self) -> None:  # noqa: B027
        """Ends worker processes."""


class _Request(NamedTuple):
    step: int
    grains: tuple[Grain, ...]
    ids: tuple[Ids, ...]


_Digested = tuple[_Request, list[float]]  # a request, and the digests of its grains, added up


class _Fetcher(Dataset[Any]):
    """The dataset of requests that a torch DataLoader serves: one item is one collated microbatch."""

    def __init__(self, source: MapSource, order: Order, quarantine: Quarantine | None) -> None:
        self.source, self.order, self.quarantine = source, order, quarantine

    def fetch(self, request: _Request) -> Fetched:
        """The microbatch of a request. Raises: DataError."""
        keys: list[int] = []
        if self.source.has_epochs:
            last = self.order.num_steps - 1  # a step after it may be read ahead, and belongs to no epoch
            self.source.at_epoch(self.order.epoch(min(request.step, last)))
        if self.source.draws:
            keys = [random_key(self.order.seed, "data", request.step, grain.index) for grain in request.grains]
        if self.quarantine is None:
            return Fetched(self.source.fetch(request.ids, keys))
        return self.source.tolerant(self.quarantine, request.ids, keys)

    def __getitem__(self, request: _Request) -> Any:
        """In a worker process, where an exception would lose its fields on the way: it comes as a value."""
        try:
            return self.fetch(request)
        except ShoalError as error:
            return error


def _started(own: Callable[[int], object] | None, data: Any, worker: int) -> None:
    """Calls a user's worker_init_fn in a worker process, where it finds its dataset as under torch's own loader.

    Requests to stop, which a scheduler sends to every process, are the rank's: it finishes its step with these samples.
    """
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    if own is not None:
        object.__setattr__(get_worker_info(), "dataset", data)
        own(worker)


class MapLoader(Loader):
    """Loader of a map-style dataset: everything but the samples themselves is arithmetic."""

    looks_ahead = True

    def __init__(
        self,
        source: MapSource,
        order: Order,
        place: DataRank,
        workers: int,
        pin_memory: bool,
        *,
        reading: Mapping[str, Any] | None = None,
        bad_samples: int = 0,
    ) -> None:
        """`reading`: further arguments of torch's DataLoader, for its worker processes.

        `bad_samples`: how many that cannot be read are left out.
        """
        super().__init__()
        self.may_draw = source.draws or workers > 0
        self._reading = dict(reading or {})
        self._quarantine = Quarantine(bad_samples) if bad_samples else None
        self._order, self._place = order, place
        self._workers, self._pin_memory = workers, pin_memory
        self._fetcher = _Fetcher(source, order, self._quarantine)
        self._per_microbatch = order.num_grains
        told, limit = self._workers_anew, float(self._reading.pop("timeout", 0.0) or 0.0)
        self._processes = SampleWorkers(self._data_loader, told, limit) if workers else None
        self._next = 0
        self._known: dict[int, list[_Digested]] = {}

    def seek(self, step: int, grains_per_microbatch: int) -> None:
        self.close()
        self._known = {}
        self._per_microbatch, self._next = grains_per_microbatch, step

    def move(self, place: DataRank) -> None:
        """From now on reads what another data rank computes, and a step only once it is asked for."""
        self.close()
        self._known = {}
        self._place, self.looks_ahead = place, False

    def most_microbatches(self, step: int) -> int:
        return max(len(self.requests(step, rank)) for rank in range(self._place.num_ranks))

    def filler(self, step: int) -> Microbatch:
        return next(self.fillers(step))

    def fillers(self, step: int) -> Iterator[Microbatch]:
        for rank in range(self._place.num_ranks):
            for request in self.requests(step, rank):
                yield self._read(step, request.grains, request.ids)

    def check_repeats(self, step: int) -> None:
        source, grains = self._fetcher.source, self._order.grains(step)[:2]
        if isinstance(source, SampleSource):
            keys = [random_key(self._fetcher.order.seed, "data", step, grain.index) for grain in grains]
            with generators_kept():
                source.check_repeats(self._order.ids(step, grains), keys)
                # Some that are spread over the whole set: a transform may draw for some samples alone.
                until = time.monotonic() + _REPEATED_SECONDS
                some = spread(np.arange(min(len(source), _REPEATED_SAMPLES)), len(source))
                for ids in np.array_split(some, -(-len(some) // 8)):
                    if time.monotonic() < until:
                        source.check_repeats([ids], keys)

    def first_grains(self, step: int, count: int = 2) -> Microbatch | None:
        grains = self._order.grains(step)[:count]
        return self._read(step, tuple(grains), tuple(self._order.ids(step, grains))) if grains else None

    def requests(self, step: int, rank: int | None = None) -> list[_Request]:
        """Sample ids that this data rank, or another, fetches for `step`, by microbatch."""
        mine = share(self._order.grains(step), self._place.rank if rank is None else rank, self._place.num_ranks)
        ids, most = self._order.ids(step, mine), self._per_microbatch
        runs = zip(microbatches(mine, most), microbatches(ids, most), strict=True)
        return [_Request(step, tuple(grains), tuple(own)) for grains, own in runs]

    def step(self, step: int) -> StepData:
        if step != self._next:
            self.seek(step, self._per_microbatch)
        self._next = step + 1
        requests = self._own_requests(step)
        microbatches = (self._microbatch(request, self._fetch(request), words) for request, words in requests)
        return StepData(step, self._order.epoch(step), len(requests), microbatches)

    def _own_requests(self, step: int) -> list[_Digested]:
        """This rank's, of several steps at once: after a backward, whose data fill the caches, each call is dear."""
        if step not in self._known:
            count = max(1, min(_STEPS_AHEAD, _SAMPLES_AHEAD // self._order.global_batch))
            ahead = {number: self.requests(number) for number in range(step, step + count)}
            every = [request for requests in ahead.values() for request in requests]
            parts = [(request.step, [grain.index for grain in request.grains], request.ids) for request in every]
            words = iter(words_of_steps(parts))
            known = {number: [(request, next(words)) for request in requests] for number, requests in ahead.items()}
            self._known = known
        return self._known.pop(step)

    def _read(self, step: int, grains: tuple[Grain, ...], ids: tuple[Ids, ...]) -> Microbatch:
        request = _Request(step, grains, ids)
        return self._microbatch(request, self._noted(self._fetcher.fetch(request)))

    def _microbatch(self, request: _Request, fetched: Fetched, words: list[float] | None = None) -> Microbatch:
        read = functools.partial(self._read, request.step)
        known = None if fetched.replaced else words
        return Microbatch(request.step, request.grains, request.ids, fetched.batch, read, known, fetched.replaced)

    def _fetch(self, request: _Request) -> Fetched:
        if self._processes is None:
            return self._noted(self._fetcher.fetch(request))
        found = self._processes.next(request)
        if isinstance(found, ShoalError):
            raise found
        fetched: Fetched = found
        if self._quarantine is not None:
            read = (fetched.replaced.get(i, i) for ids in request.ids for i in ids.tolist())
            if not self._quarantine.known.keys().isdisjoint(read):  # a worker knows no more than when it was started
                fetched = self._fetcher.fetch(request)
        return self._noted(fetched)

    def _noted(self, fetched: Fetched) -> Fetched:
        """What was read, once its bad samples are known here. Raises: DataError where they are too many."""
        if fetched.bad and self._quarantine is not None:
            new = self._quarantine.add(fetched.bad)
            if new:
                many = ", ".join(map(str, list(new)[:8]))
                what = f"samples that cannot be read: {many}; {next(iter(new.values()))}"
                self.incidents.append(DataIncident(what, "others were read in their places", bad=new))
            self._quarantine.check()
        return fetched

    def leave_out(self, bad: Mapping[int, str]) -> None:
        if self._quarantine is not None:
            self._quarantine.add(bad)
            self._quarantine.check()
        elif bad:
            raise DataError(
                given="--bad-samples 0",
                conflict=f"samples that cannot be read have others in their places: {sorted(bad)[:8]}",
                remedy="leave --bad-samples out: a run that goes on keeps its number",
            )

    def _workers_anew(self, what: str, seconds: float) -> None:
        done = "the workers were started again, at the same sample"
        self.incidents.append(DataIncident(what, done, round(seconds, 3)))

    def _data_loader(self, first: _Request) -> DataLoader[Any]:
        ahead = itertools.chain.from_iterable(map(self.requests, itertools.count(first.step)))
        wanted = itertools.dropwhile(lambda r: (r.step, r.grains) != (first.step, first.grains), ahead)
        start = functools.partial(_started, self._reading.get("worker_init_fn"), self._fetcher.source.data)
        return DataLoader(
            self._fetcher,
            sampler=wanted,
            batch_size=None,
            num_workers=self._workers,
            pin_memory=self._pin_memory,
            **{**self._reading, "worker_init_fn": start},
        )

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
