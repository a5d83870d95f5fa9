"""Iterable datasets, divided over grains so that the number of ranks does not affect results.

A stream with `shard(num_shards=, index=)` (the convention of Hugging Face's datasets) is opened once per grain: grain g
reads shard g of G, on whichever rank. Every rank reads any other iterable as a whole and keeps its own grains.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import default_collate

from shoal.data.loader import DataRank, Loader, MapLoader, Microbatch, StepData
from shoal.data.order import Ids, Order
from shoal.data.source import Collate, MapSource, Opened, collate_samples, digest_of_samples, raised, tell_epoch
from shoal.errors import DataError
from shoal.numerics.generators import seed_everything
from shoal.plans.grains import Grain, divide, microbatches, random_key

if TYPE_CHECKING:
    from shoal.distributed.mesh import Mesh


class _GrainSamples(NamedTuple):
    """A grain with the ids and values of its samples."""

    grain: Grain
    ids: Ids
    samples: list[Any]


class _Reader:
    """One iterator with the number of samples read, and the state to return to that place."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self._samples: Iterator[Any] | None = None
        self.count = 0

    def read(self, wanted: int) -> list[Any]:
        """Return up to `wanted` further samples. Raises: DataError if the stream raises."""
        if self._samples is None:
            tell_epoch(self._name, self._stream, 0)  # a stream has a single epoch
            self._samples = iter(self._stream)
        samples: list[Any] = []
        try:
            for sample in itertools.islice(self._samples, wanted):
                samples.append(sample)  # one by one, so that an error states the sample's number
        except Exception as error:
            where = f"sample {self.count + len(samples)} of {self._name}"
            raise raised(where, "the stream", error, "mend the stream") from error
        self.count += len(samples)
        return samples

    def state(self) -> dict[str, Any]:
        own = self._stream.state_dict() if hasattr(self._stream, "state_dict") else None
        return {"count": self.count, "own": own}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to the place of a state if the stream supports states, else to the start if needed."""
        if state["own"] is not None and hasattr(self._stream, "load_state_dict"):
            self._stream.load_state_dict(state["own"])
            self._samples, self.count = None, state["count"]
        elif state["count"] != self.count:
            if self.count and iter(self._stream) is self._stream:
                raise DataError(
                    given=f"{self._name}: an iterator that was read to sample {self.count}",
                    conflict=f"it cannot go back to sample {state['count']}",
                    remedy="give an iterable that starts anew at each iter(), or one with load_state_dict",
                )
            self._samples, self.count = None, 0


class StreamLoader(Loader):
    """Loader of streams. Ids are places in the stream: ordinal * G + g for shard g, or the ordinal itself."""

    looks_ahead = False

    def __init__(self, stream: Iterable[Any], order: Order, place: DataRank, collate: Collate | None) -> None:
        super().__init__()
        self._order, self._place = order, place
        self._collate = collate or default_collate
        self._sharded = hasattr(stream, "shard")
        self.divides_anew = not self._sharded
        self._per_microbatch = order.num_grains
        if self._sharded:
            mine = place.share([Grain(i, 0, 1) for i in range(order.num_grains)])
            shards = {g.index: stream.shard(num_shards=order.num_grains, index=g.index) for g in mine}  # type: ignore[attr-defined]
        else:
            shards = {0: stream}
        self._readers = {i: _Reader(s, f"train_data (shard {i})") for i, s in shards.items()}
        self._pending: list[_GrainSamples] | None = None
        self._first: list[_GrainSamples] = []  # grains of the pending step that this rank has read, of any rank
        self.samples: list[Any] | None = None  # all samples of the pending step, if every rank reads them
        self._state = self._read_state()

    def seek(self, step: int, grains_per_microbatch: int, shares: tuple[int, ...] | None = None) -> None:
        """Set the microbatch size and the shares. A stream continues where it is and cannot seek."""
        self._per_microbatch = grains_per_microbatch
        self._place = self._place if shares is None else replace(self._place, shares=shares)
        if self._pending is not None and not self._sharded:
            self._pending = self._place.share(self._first)

    def step(self, step: int) -> StepData | None:
        if self._pending is None:
            grains = self._grains(step)
            if self._sharded:
                pending: list[_GrainSamples] = []
                for grain in (grain for grain in grains if grain.index in self._readers):
                    first = self._readers[grain.index].count
                    samples = self._read(step, grain.index, grain.size)
                    if samples:
                        ids = np.arange(first, first + len(samples), dtype=np.int64) * self._order.num_grains
                        own = Grain(grain.index, grain.start, len(samples))
                        pending.append(_GrainSamples(own, ids + grain.index, samples))
                self._pending = self._first = pending
            else:
                first = self._readers[0].count
                samples = self.samples = self._read(step, 0, sum(g.size for g in grains))
                self._first = [
                    _GrainSamples(
                        g, np.arange(first + g.start, first + g.start + g.size), samples[g.start : g.start + g.size]
                    )
                    for g in divide(len(samples), self._order.global_batch, self._order.num_grains)
                ]
                self._pending = self._place.share(self._first)
        if not self._pending:
            return None
        runs = microbatches(self._pending, self._per_microbatch)
        return StepData(step, 0, len(runs), (self._microbatch(step, run) for run in runs))

    def first_grains(self, step: int, count: int = 2) -> Microbatch | None:
        return self._microbatch(step, self._first[:count]) if self._pending is not None and self._first else None

    def commit(self) -> None:
        self._pending, self.samples, self._state = None, None, self._read_state()

    def _grains(self, step: int) -> list[Grain]:
        """Return the grains of a step of a stream that has not ended."""
        size = self._order.global_batch
        left = self._order.samples_before(step + 1) - self._order.samples_before(step)
        return divide(min(size, left), size, self._order.num_grains)

    def _read(self, step: int, index: int, wanted: int) -> list[Any]:
        """Read a step's samples from one reader, with seeded generators."""
        seed_everything(random_key(self._order.seed, "read", step, *([index] if self._sharded else [])))
        return self._readers[index].read(wanted)

    def _microbatch(self, step: int, parts: list[_GrainSamples]) -> Microbatch:
        rows = [sample for part in parts for sample in part.samples]
        seed_everything(random_key(self._order.seed, "data", step, parts[0].grain.index))  # collate functions may draw
        batch = collate_samples(self._collate, rows, "train_data")

        def read(grains: tuple[Grain, ...], ids: tuple[Ids, ...]) -> Microbatch:
            known = {i: sample for part in parts for i, sample in zip(part.ids.tolist(), part.samples, strict=True)}
            pairs = zip(grains, ids, strict=True)
            again = [_GrainSamples(grain, own, [known[i] for i in own.tolist()]) for grain, own in pairs]
            return self._microbatch(step, again)

        return Microbatch(step, tuple(part.grain for part in parts), tuple(part.ids for part in parts), batch, read)

    def _read_state(self) -> dict[str, Any]:
        return {str(i): reader.state() for i, reader in self._readers.items()}

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        self._pending = None
        merged = {int(i): state for saved in states for i, state in saved.items()}
        for i, reader in self._readers.items():
            if i not in merged:
                continue
            reader.restore(merged[i])
            # Read the earlier samples of a stream without its own state again, step by step.
            step, count = 0, merged[i]["count"]
            while reader.count < count:
                sizes = {grain.index: grain.size for grain in self._grains(step)}
                wanted = sizes.get(i, 0) if self._sharded else sum(sizes.values())
                # The job or the stream may be shorter now.
                if not sizes or (wanted and not self._read(step, i, min(wanted, count - reader.count))):
                    break
                step += 1
        self._state = self._read_state()


def compare_streams(mesh: Mesh, loader: Loader) -> None:
    """Compare the stream samples that all ranks have read for their next step.

    A rank that could not read its samples disables the comparison; its own error is reported instead.
    Raises: DataError, on every rank. Collective: all ranks, one JSON gather of a digest if the data are a stream.
    """
    if mesh.world_size > 1 and isinstance(loader, StreamLoader):
        refuse_other_samples("train_data", mesh.gather_json(digest_of_samples(loader.samples)))


def refuse_other_samples(name: str, digests: Sequence[str | None]) -> None:
    """Raise DataError if the ranks' digests of the same stream samples differ; None stands for no samples."""
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if None in digests or not others:
        return
    error = DataError(
        given=f"{name}: a stream that gives rank {', '.join(others[:8])} other samples than rank 0",
        conflict="every rank reads the whole stream and computes its own grains; this one divides itself by rank or "
        "worker, or draws from a generator of its own",
        remedy="give the whole stream, the same on every rank: shoal divides it (leave out RANK, WORLD_SIZE, "
        "get_rank() and split_by_node); draw from torch's, numpy's or Python's global generator, which shoal seeds",
    )
    error.everywhere = True
    raise error


def loader_of(data: Opened, order: Order, mesh: Mesh, workers: int) -> Loader:
    """Create this rank's loader. `workers`: number of reading processes, unused for streams. Raises: as the loaders."""
    place, source = DataRank(mesh.data_rank, mesh.num_data_ranks, mesh.layout.shares), data.source
    if not isinstance(source, MapSource):
        return StreamLoader(source, order, place, data.collate)
    pins = mesh.device.type == "cuda"
    return MapLoader(source, order, place, workers, pins, reading=data.reading, bad_samples=data.bad_samples)
