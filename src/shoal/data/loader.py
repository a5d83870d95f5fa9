"""Data loaders: a rank's microbatches of each step, prefetched if possible, and moved to the device.

The trainer passes the step number to the loader. The loader keeps no position of its own, so the two cannot disagree.
"""

from __future__ import annotations

import functools
import itertools
import signal
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shoal.data.order import Ids, Order, grain_words, spread, words_of_steps
from shoal.data.quarantine import Fetched, Quarantine, with_replaced
from shoal.data.sample_workers import SampleWorkers
from shoal.data.source import MapSource, SampleSource
from shoal.errors import DataError, JobError, ShoalError
from shoal.launch.signals import handle_stop_signals
from shoal.numerics.generators import generators_kept
from shoal.numerics.operators import is_strided, strided_parts
from shoal.plans.grains import Grain, microbatches, random_key, share

T = TypeVar("T")

# Limits of steps and samples whose ids are drawn and digested at once, which saves tenths of a millisecond per step.
_STEPS_AHEAD, _SAMPLES_AHEAD = 16, 4096
# In exact mode, up to this many samples are read twice, for up to about this many seconds.
_REPEATED_SAMPLES, _REPEATED_SECONDS = 256, 0.2


@dataclass  # made in every step
class Microbatch:
    """Neighbouring grains that share one forward. `batch`: result of the collate function.

    `ids`: one int64 array of sample ids for each grain.
    `replaced`: unreadable sample id -> id of the sample read in its place.
    `read`: function that reads some of the samples again as a microbatch.
    `known_words`: value of `words`, if already computed.
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
        """The ids of the samples that were actually read."""
        return with_replaced(self.ids, self.replaced)

    @property
    def num_samples(self) -> int:
        """Number of samples in all grains."""
        return sum([g.size for g in self.grains])

    @property
    def words(self) -> list[float]:
        """The sum of the grains' digests."""
        return self.known_words or grain_words(self.step, [grain.index for grain in self.grains], self.read_ids)

    def split(self) -> list[Microbatch]:
        """Read the same samples again, as one microbatch per grain."""
        return [self.read((grain,), (ids,)) for grain, ids in zip(self.grains, self.ids, strict=True)]

    def samples(self) -> list[Microbatch]:
        """Read the samples of a single grain again, as one microbatch per sample."""
        (grain,), (ids,) = self.grains, self.ids
        alone = [Grain(grain.index, grain.start + i, 1) for i in range(grain.size)]
        return [self.read((one,), (ids[i : i + 1],)) for i, one in enumerate(alone)]

    def without_batch(self) -> Microbatch:
        """Return a copy without tensors, in a third of the time of dataclasses.replace."""
        return Microbatch(self.step, self.grains, self.ids, None, self.read, self.known_words, self.replaced)


@dataclass  # made in every step
class StepData:
    """One rank's microbatches of one step. `num_microbatches` may be 0."""

    step: int
    epoch: int
    num_microbatches: int
    microbatches: Iterator[Microbatch]


class Transfer:
    """Transfer of batches by `move`: on CUDA from pinned memory, on a separate stream."""

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self._move = move
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batch: Any) -> Callable[[], Any]:
        """Start moving a batch. The returned function returns the batch, ready for the current stream."""
        stream = self._stream
        if stream is None:
            return functools.partial(self._move, batch)

        def pin(value: Any) -> Any:
            # torch pins only strided tensors; sparse and nested ones are moved without pinning.
            movable = isinstance(value, Tensor) and value.is_cpu and is_strided(value) and not value.is_pinned()
            return value.pin_memory() if movable else value

        pinned = tree_map(pin, batch)
        with torch.cuda.stream(stream):
            moved = self._move(pinned)

        def ready() -> Any:
            current = torch.cuda.current_stream()
            current.wait_stream(stream)
            # Else the allocator reuses the memory when the side stream is done, while the current stream still uses it.
            for leaf in tree_leaves(moved):
                for part in strided_parts(leaf) if isinstance(leaf, Tensor) else ():
                    part.record_stream(current)
            return moved

        return ready


@dataclass(frozen=True)
class DataRank:
    """This rank's index among the data ranks, the number of data ranks, and their shares as a plan has them."""

    rank: int
    num_ranks: int
    shares: tuple[int, ...] = ()

    def share(self, grains: list[T], rank: int | None = None) -> list[T]:
        """Return the part of a step's grains that a data rank (default: this one) computes."""
        return share(grains, self.rank if rank is None else rank, self.num_ranks, self.shares)


@dataclass(frozen=True)
class DataIncident:
    """Incident of a loader: unreadable samples (`bad`, with error texts by id), or failed worker processes."""

    what: str
    done: str
    seconds: float | None = None
    bad: Mapping[int, str] = field(default_factory=dict)


class Loader(ABC):
    """Interface of data loaders: one rank's microbatches of each step. The base class has no state."""

    may_draw = True  # whether reading may draw from this process's global generators
    looks_ahead: bool  # whether a step may be read before the current one is committed
    divides_anew = True  # whether `seek` can change the ranks' shares

    def __init__(self) -> None:
        self.incidents: list[DataIncident] = []  # not reported yet

    def leave_out(self, bad: Mapping[int, str]) -> None:  # noqa: B027
        """Skip these samples from now on. Raises: DataError if they are more than allowed."""

    def warn_of_incidents(self) -> None:
        """Warn of incidents, for callers without an event log."""
        for incident in self.incidents:
            warnings.warn(f"{incident.what}; {incident.done}", RuntimeWarning, stacklevel=2)
        self.incidents.clear()

    @abstractmethod
    def seek(self, step: int, grains_per_microbatch: int, shares: tuple[int, ...] | None = None) -> None:
        """Make `step` the next one, in microbatches of `grains_per_microbatch` grains.

        `shares`: the ranks' shares of a step's grains from then on; None leaves them as they are.
        """

    @abstractmethod
    def step(self, step: int) -> StepData | None:
        """Return this rank's part of `step`, or None if the data have ended. Raises: DataError."""

    def most_microbatches(self, step: int) -> int:
        """Return the largest number of microbatches that a rank has in `step`. Raises: JobError for a stream."""
        raise no_lockstep()

    def fillers(self, step: int) -> Iterator[Microbatch]:
        """Return all microbatches of `step`, each read on access, in the same order on all ranks.

        A rank that has fewer microbatches than others computes one of them with weight zero.
        Raises: JobError for a stream.
        """
        raise no_lockstep()

    def check_repeats(self, step: int) -> None:  # noqa: B027 - a stream is read once
        """Read two grains of `step`, and samples across the dataset, twice. Raises: DataError if a sample differs."""

    @abstractmethod
    def first_grains(self, step: int, count: int = 2) -> Microbatch | None:
        """Return the first `count` grains of `step` that this rank can read, in one microbatch; None if there are none.

        For a map-style dataset, the grains are the same on all ranks. Raises: DataError.
        """

    def commit(self) -> None:  # noqa: B027 - what a loader without a state has to do
        """Record that the last requested step was trained. Until then, a new request returns the same step."""

    def state(self) -> dict[str, Any]:
        """Return the JSON state from which `restore` continues after the last committed step."""
        return {}

    def restore(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Restore the states that all ranks saved, for any number of ranks."""

    def close(self) -> None:  # noqa: B027
        """End the worker processes."""


def no_lockstep() -> JobError:
    """Create the error for a stream in a layout whose ranks compute equal numbers of microbatches."""
    return JobError(
        given="a stream as train_data, with shard.level = 'gradients' or 'parameters', or layout.expert above 1",
        conflict="ranks compute as many microbatches as each other there, and of a stream none knows the others' share",
        remedy='use a map-style dataset, or shard.level = "optimizer" and layout.expert = 1',
    )


class _Request(NamedTuple):
    step: int
    grains: tuple[Grain, ...]
    ids: tuple[Ids, ...]


_Digested = tuple[_Request, list[float]]  # a request, and the sum of its grains' digests


class _Fetcher(Dataset[Any]):
    """Dataset of requests for a torch DataLoader. Each item is one collated microbatch."""

    def __init__(self, source: MapSource, order: Order, quarantine: Quarantine | None) -> None:
        self.source, self.order, self.quarantine = source, order, quarantine

    def fetch(self, request: _Request) -> Fetched:
        """Return the microbatch of a request. Raises: DataError."""
        keys: list[int] = []
        if self.source.has_epochs:
            last = self.order.num_steps - 1  # steps beyond the last may be read ahead
            self.source.at_epoch(self.order.epoch(min(request.step, last)))
        if self.source.draws:
            keys = [random_key(self.order.seed, "data", request.step, grain.index) for grain in request.grains]
        if self.quarantine is None:
            return Fetched(self.source.fetch(request.ids, keys))
        return self.source.tolerant(
            self.quarantine, request.ids, keys, random_key(self.order.seed, "data", request.step)
        )

    def __getitem__(self, request: _Request) -> Any:
        """Fetch in a worker process. Errors are returned as values, since raised ones would lose their fields."""
        try:
            return self.fetch(request)
        except ShoalError as error:
            return error


def _started(own: Callable[[int], object] | None, data: Any, worker: int) -> None:
    """Initialize a worker process and call the user's worker_init_fn, which finds its dataset as under torch.

    Stop signals, which a scheduler sends to every process, are ignored: the rank still finishes its step.
    """
    handle_stop_signals(signal.SIG_IGN)
    if own is not None:
        object.__setattr__(get_worker_info(), "dataset", data)
        own(worker)


class _RequestReader:
    """Reader of requests, in this process and in worker processes, with the quarantine of unreadable samples.

    `following`: returns the requests from a given one on, for the workers. `incidents`: list that receives incidents.
    """

    def __init__(
        self,
        fetcher: _Fetcher,
        workers: int,
        loader_options: Mapping[str, Any],
        following: Callable[[_Request], Iterable[_Request]],
        incidents: list[DataIncident],
    ) -> None:
        self._fetcher, self._quarantine, self._incidents = fetcher, fetcher.quarantine, incidents
        options = dict(loader_options)
        limit = float(options.pop("timeout", 0.0) or 0.0)
        options["worker_init_fn"] = functools.partial(_started, options.get("worker_init_fn"), fetcher.source.data)

        def load(first: _Request) -> DataLoader[Any]:
            return DataLoader(fetcher, sampler=following(first), batch_size=None, num_workers=workers, **options)

        def report(what: str, seconds: float) -> None:
            done = "the workers were started again, at the same sample"
            incidents.append(DataIncident(what, done, round(seconds, 3)))

        self._processes = SampleWorkers(load, report, limit) if workers else None

    def read(self, request: _Request, *, here: bool = False) -> Fetched:
        """Return the batch of a request. `here`: the request is not the next one of the workers, if there are any.

        Raises: DataError, also if too many samples are unreadable.
        """
        fetched: Fetched | ShoalError
        if self._processes is None or here:
            fetched = self._fetcher.fetch(request)
        else:
            fetched = self._processes.next(request)
            if isinstance(fetched, ShoalError):
                raise fetched
            if self._quarantine is not None:
                ids = (fetched.replaced.get(i, i) for ids in request.ids for i in ids.tolist())
                if not self._quarantine.known.keys().isdisjoint(ids):  # not known when the worker started
                    fetched = self._fetcher.fetch(request)
        if fetched.bad and self._quarantine is not None:
            new = self._quarantine.add(fetched.bad)
            if new:
                many = ", ".join(map(str, list(new)[:8]))
                what = f"samples that cannot be read: {many}; {next(iter(new.values()))}"
                self._incidents.append(DataIncident(what, "others were read in their places", bad=new))
            self._quarantine.check()
        return fetched

    def close(self) -> None:
        """End the worker processes."""
        if self._processes is not None:
            self._processes.close()


class MapLoader(Loader):
    """Loader of a map-style dataset. Which samples a rank reads is pure arithmetic."""

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
        """Create the loader.

        Args:
            reading: further arguments of torch's DataLoader, for its worker processes.
            bad_samples: maximum number of unreadable samples to skip.
        """
        super().__init__()
        self.may_draw = source.draws or workers > 0
        self._order, self._place, self._source = order, place, source
        self._quarantine = Quarantine(bad_samples) if bad_samples else None
        self._per_microbatch = order.num_grains
        self._next = 0
        self._known: dict[int, list[_Digested]] = {}

        def following(first: _Request) -> Iterable[_Request]:
            ahead = itertools.chain.from_iterable(map(self.requests, itertools.count(first.step)))
            return itertools.dropwhile(lambda r: (r.step, r.grains) != (first.step, first.grains), ahead)

        fetcher, options = _Fetcher(source, order, self._quarantine), {"pin_memory": pin_memory, **(reading or {})}
        self._reader = _RequestReader(fetcher, workers, options, following, self.incidents)

    def seek(self, step: int, grains_per_microbatch: int, shares: tuple[int, ...] | None = None) -> None:
        self.close()
        self._place = self._place if shares is None else replace(self._place, shares=shares)
        self._known = {}
        self._per_microbatch, self._next = grains_per_microbatch, step

    def move(self, place: DataRank) -> None:
        """Read the data of another data rank from now on, and read a step only when it is requested."""
        self.close()
        self._known = {}
        self._place, self.looks_ahead = place, False

    def most_microbatches(self, step: int) -> int:
        return max(len(self.requests(step, rank)) for rank in range(self._place.num_ranks))

    def fillers(self, step: int) -> Iterator[Microbatch]:
        for rank in range(self._place.num_ranks):
            for request in self.requests(step, rank):
                yield self._read(step, request.grains, request.ids)

    def check_repeats(self, step: int) -> None:
        source, grains = self._source, self._order.grains(step)[:2]
        if isinstance(source, SampleSource):
            keys = [random_key(self._order.seed, "data", step, grain.index) for grain in grains]
            with generators_kept():
                source.check_repeats(self._order.ids(step, grains), keys)
                # Also samples across the whole set, since a transform may draw for some samples only.
                until = time.monotonic() + _REPEATED_SECONDS
                some = spread(np.arange(min(len(source), _REPEATED_SAMPLES)), len(source))
                for ids in np.array_split(some, -(-len(some) // 8)):
                    if time.monotonic() < until:
                        source.check_repeats([ids], keys)

    def first_grains(self, step: int, count: int = 2) -> Microbatch | None:
        grains = self._order.grains(step)[:count]
        return self._read(step, tuple(grains), tuple(self._order.ids(step, grains))) if grains else None

    def requests(self, step: int, rank: int | None = None) -> list[_Request]:
        """Return the sample ids that a data rank (default: this one) fetches for `step`, by microbatch."""
        mine = self._place.share(self._order.grains(step), rank)
        ids, most = self._order.ids(step, mine), self._per_microbatch
        runs = zip(microbatches(mine, most), microbatches(ids, most), strict=True)
        return [_Request(step, tuple(grains), tuple(own)) for grains, own in runs]

    def step(self, step: int) -> StepData:
        if step != self._next:
            self.seek(step, self._per_microbatch)
        self._next = step + 1
        if step not in self._known:  # several steps are computed at once, since each call is slow after a backward
            count = max(1, min(_STEPS_AHEAD, _SAMPLES_AHEAD // self._order.global_batch))
            ahead = {number: self.requests(number) for number in range(step, step + count)}
            every = [request for requests in ahead.values() for request in requests]
            parts = [(request.step, [grain.index for grain in request.grains], request.ids) for request in every]
            digests = iter(words_of_steps(parts))
            self._known = {number: [(request, next(digests)) for request in own] for number, own in ahead.items()}
        requests = self._known.pop(step)
        microbatches = (self._microbatch(request, words) for request, words in requests)
        return StepData(step, self._order.epoch(step), len(requests), microbatches)

    def _read(self, step: int, grains: tuple[Grain, ...], ids: tuple[Ids, ...]) -> Microbatch:
        return self._microbatch(_Request(step, grains, ids), here=True)

    def _microbatch(self, request: _Request, words: list[float] | None = None, *, here: bool = False) -> Microbatch:
        fetched, read = self._reader.read(request, here=here), functools.partial(self._read, request.step)
        known = None if fetched.replaced else words
        return Microbatch(request.step, request.grains, request.ids, fetched.batch, read, known, fetched.replaced)

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

    def close(self) -> None:
        self._reader.close()
