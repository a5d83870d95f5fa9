"""Data sources: one interface to all kinds of data, and the sources and loaders that a job opens."""

from __future__ import annotations

import hashlib
import itertools
import random
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from shoal.data.order import Ids, Order, Sampler
from shoal.data.quarantine import Fetched, Quarantine, TolerantReader
from shoal.data.samplers import Mixture
from shoal.data.torch_samplers import in_place_of, is_of_torch, is_torchs, order_of_sampler
from shoal.errors import DataError, JobError, ShoalError, text_of
from shoal.jobs.job import Epochs, Job, Length, Mistake
from shoal.jobs.user_errors import place_of, raised_by_library, traceback_of
from shoal.numerics.generators import all_generators, seed_everything
from shoal.numerics.no_trace import NoTrace
from shoal.numerics.operators import is_strided, raw_bytes, strided_parts

Collate = Callable[[list[Any]], Any]
_FEW = 2
_MOST_OBJECTS, _MOST_ITEMS = 1000, 64
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Errors that collating functions of torch, numpy and Python raise for an empty list of samples.
_OF_NONE = (IndexError, ValueError, RuntimeError)
_REFERENCES = 3  # number of samples that others are compared with after a failed collation
SHARED_MEMORY = "make /dev/shm larger (docker run --shm-size 8g, say); data.workers = 0 reads in the rank itself"


class NoSamples:
    """Marker for a batch whose samples the collate function all dropped. Model and loss are not called for it."""


def _objects(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the object and the objects in its attributes, lists and mappings, but not in long ones."""
    if id(value) in seen or len(seen) > _MOST_OBJECTS or isinstance(value, type | ModuleType | FunctionType):
        return
    seen.add(id(value))
    if isinstance(value, list | tuple | Mapping) and len(value) <= _MOST_ITEMS:
        inner = value.values() if isinstance(value, Mapping) else value
    elif isinstance(value, MethodType):
        inner = (value.__self__,)
    else:
        inner = getattr(value, "__dict__", {}).values()
        yield value
    for child in list(inner):
        yield from _objects(child, seen)


class MapSource(ABC):
    """Map-style dataset of known length, with samples fetched by id."""

    draws = True  # whether reading a sample may draw random numbers

    def __init__(self, name: str, length: int, data: Any) -> None:
        self.name, self.data = name, data
        self._length = length
        self.has_epochs = bool(with_epochs(data))
        self._epoch: int | None = None

    def __len__(self) -> int:
        return self._length

    def at_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch`, if it has one and `epoch` is new. Raises: DataError."""
        if self.has_epochs and epoch != self._epoch:
            tell_epoch(self.name, self.data, epoch)
            self._epoch = epoch

    def looks(self) -> NoTrace:
        """Return a context for reads that restore the dataset, objects within it and the generators afterwards."""
        return NoTrace(None, {f"train_data {number}": one for number, one in enumerate(_objects(self.data, set()))})

    def looked_at(self, ids: Ids, quarantine: Quarantine | None = None) -> Any:
        """Return the batch of some samples for a probe. The dataset and the generators are restored afterwards."""
        with self.looks():
            return self.fetch([ids], [0]) if quarantine is None else self.tolerant(quarantine, [ids], [0], 0).batch

    def tolerant(self, quarantine: Quarantine, grains: Sequence[Ids], keys: Sequence[int], step_key: int) -> Fetched:
        """Fetch as `fetch`, with replacements for unreadable samples. The base class needs none. Raises: DataError."""
        return Fetched(self.fetch(grains, keys))

    @abstractmethod
    def fetch(self, grains: Sequence[Ids], keys: Sequence[int]) -> Any:
        """Return the batch of the samples of neighbouring grains, in order.

        `keys` seed torch's, Python's and numpy's generators before each grain is read, so that augmentation depends on
        the grain only. They are unused unless the source `draws`.
        Raises: DataError that names the unreadable sample.
        """


# Samples for steps: by id, or sequentially from a stream.
Source = MapSource | Iterable[Any]


@dataclass(frozen=True)
class Opened:
    """A data source with its reading options.

    `collate`: function for a stream's samples; a map-style source has its own.
    `shuffle`, `workers`, `reading`: options of a DataLoader (`reading`: arguments for worker processes), or None.
    `sampler`: the order that stands for a DataLoader's sampler, or None.
    `notes`: a sentence for each option that has no effect.
    `bad_samples`: maximum number of unreadable samples to skip.
    """

    source: Source
    collate: Collate | None = None
    shuffle: bool | None = None
    workers: int | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bad_samples: int = 0
    sampler: Sampler | None = None


class TensorSource(MapSource):
    """In-memory dataset of tensors with the same first dim. A batch is one index operation on each tensor."""

    draws = False

    def __init__(self, name: str, data: Any) -> None:
        lengths = {len(t) for t in _leaves(data)}
        if len(lengths) != 1:
            raise DataError(
                given=f"{name} of tensors with first dims {sorted(lengths)}",
                conflict="the tensors of a dataset hold one row per sample",
                remedy="give tensors whose first dims are equal",
            )
        super().__init__(name, lengths.pop(), data)
        # Plain tuples avoid a function call per tensor in every step.
        self._is_plain = type(data) is tuple and all(type(t) is torch.Tensor and t.is_cpu for t in data)

    def fetch(self, grains: Sequence[Ids], keys: Sequence[int]) -> Any:
        index = torch.from_numpy(np.concatenate(grains) if len(grains) > 1 else grains[0])
        data = self.data
        if self._is_plain:
            return [tensor.index_select(0, index) for tensor in data]  # faster than tensor[index] on CPU
        if isinstance(data, Mapping):
            return {name: _rows(tensor, index) for name, tensor in data.items()}
        if isinstance(data, tuple):
            return [_rows(tensor, index) for tensor in data]
        return _rows(data, index)


class SampleSource(MapSource):
    """Dataset with `__len__` and `__getitem__` or `__getitems__`, and a collate function."""

    def __init__(self, name: str, data: Any, collate: Collate | None) -> None:
        super().__init__(name, len(data), data)
        self._collate = collate or default_collate
        self._get_many = getattr(data, "__getitems__", None)

    def fetch(self, grains: Sequence[Ids], keys: Sequence[int]) -> Any:
        samples: list[Any] = []
        for ids, key in zip(grains, keys, strict=True):
            seed_everything(key)
            samples += self.read(ids.tolist())
        return collate_samples(self._collate, samples, self.name, [i for ids in grains for i in ids.tolist()])

    def tolerant(self, quarantine: Quarantine, grains: Sequence[Ids], keys: Sequence[int], step_key: int) -> Fetched:
        reader, samples = TolerantReader(self, quarantine, step_key), []
        for ids, key in zip(grains, keys, strict=True):
            seed_everything(key)
            samples += reader.grain(ids.tolist(), key)
        read = [reader.replaced.get(i, i) for ids in grains for i in ids.tolist()]
        return Fetched(collate_samples(self._collate, samples, self.name, read), reader.replaced, reader.bad)

    def check_repeats(self, grains: Sequence[Ids], keys: Sequence[int]) -> None:
        """Read neighbouring grains twice, the second time in reverse order, and compare samples and batches.

        Raises: DataError for the first sample that differs, and for samples that draw in their first reading alone.
        Unreadable samples are ignored here.
        """
        drew = [0]

        def once(grain: int) -> tuple[list[Any], Any]:
            ids = grains[grain].tolist()
            seed_everything(keys[grain])
            before, seed = all_generators(), torch.initial_seed()
            samples = self.read(ids)
            drew[-1] += all_generators() != before and torch.initial_seed() == seed  # else it seeds by itself
            return samples, collate_samples(self._collate, samples, self.name, ids)

        order = range(len(grains))
        try:
            first = [once(grain) for grain in order]
            drew.append(0)
            again = [once(grain) for grain in reversed(order)][::-1]
        except DataError:
            return
        for ids, (samples, batch), (others, other) in zip(grains, first, again, strict=True):
            which = [i for i, a, b in zip(ids.tolist(), samples, others, strict=True) if not _same(a, b)]
            if which or not _same(batch, other):
                attributes = getattr(self.data, "__dict__", {}).items()
                own = [name for name, value in attributes if isinstance(value, _GENERATORS)]
                where = (
                    f"its attribute {own[0]!r}, a generator of its own"
                    if own
                    else "a generator of its own, or the clock"
                )
                what = f"sample {which[0]}" if which else "the batch that collate makes of samples"
                raise DataError(
                    given=f"{what} of {self.name}, read twice and not the same",
                    conflict=f"{type(self.data).__name__} draws from what shoal cannot seed ({where}); in exact mode "
                    "each sample has to be the same, whichever process reads it and whatever that has read before",
                    remedy="draw from torch's, numpy's or Python's global generators, which shoal seeds for each "
                    "grain, or make the generator from the sample's index in __getitem__",
                )
        if drew[0] and not drew[1]:
            raise DataError(
                given=f"samples of {self.name} that draw random numbers in their first reading and no more",
                conflict=f"{type(self.data).__name__} keeps what it has drawn: the values follow from the step and the "
                "process that reads a sample first, and a resumed run draws others",
                remedy="keep the sample and draw in each reading, or make the generator from the sample's index in "
                "__getitem__",
            )

    def read(self, ids: list[int]) -> list[Any]:
        """Return samples in order. Raises: DataError that names the unreadable sample."""
        samples: list[Any] = []
        try:
            if self._get_many is not None:
                return list(self._get_many(ids))
            for i in ids:
                samples.append(self.data[i])  # one by one, so that an error states the sample's number
        except Exception as error:
            if self._get_many is None:
                what = f"sample {ids[len(samples)]}"
            else:
                some = ids if len(ids) <= 8 else f"[{ids[0]}, {ids[1]}, ... {ids[-1]}] ({len(ids)})"
                what = f"samples {some}"
            remedy = "mend the dataset or leave that sample out of it"
            raise raised(f"{what} of {self.name}", "reading it", error, remedy) from error
        return samples


def collate_samples(collate: Collate, samples: list[Any], name: str, ids: Sequence[int] | None = None) -> Any:
    """Collate samples to a batch. A UserDict, such as a tokenizer's BatchEncoding, becomes a dict.

    Returns NoSamples if the collate function drops all samples.
    Raises: DataError if the function raises. The error names samples that do not fit the others, by `ids` if given.
    """
    try:
        batch = collate(samples)
        if isinstance(batch, UserDict):
            return dict(batch)  # torch moves and splits only dicts
        if collate is default_collate:
            return batch
        # A batch without samples has tensors with a first dim, and all of them have no rows.
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        lengths = [tensor.size(0) for tensor in tensors]  # size(0) also works for nested tensors
        return NoSamples() if lengths and not any(lengths) else batch
    except ShoalError:
        raise
    except Exception as error:
        if _leaves_out_all(collate, samples, error):
            return NoSamples()
        given = f"a batch of {len(samples)} samples of {name}"
        if "shared memory" in text_of(error):  # raised by torch when a worker process passes the batch
            raise raised(given, "collating them", error, SHARED_MEMORY) from error
        remedy = "give Job(collate=...), a function from a list of samples to a batch (padding ragged ones, say)"
        odd = _misfits(collate, samples)
        if odd:
            which = ", ".join(str(ids[place] if ids is not None else place) for place in odd)
            given = f"sample{'s' * (len(odd) > 1)} {which} {'of' if ids is not None else 'in a batch of'} {name}"
            remedy = f"mend what does not fit the other samples, or {remedy}"
        raise raised(given, "collating them", error, remedy) from error


def _same(one: Any, other: Any) -> bool:
    """Compare the leaves of two samples or batches.

    Leaves other than tensors, arrays, numbers and strings are ignored.
    """
    leaves, others = tree_leaves(one), tree_leaves(other)
    if len(leaves) != len(others):
        return False
    for a, b in zip(leaves, others, strict=True):
        same = True
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if is_strided(a) and is_strided(b):
                same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))
        elif isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
            same = a.dtype.hasobject or a.tobytes() == b.tobytes()
        elif isinstance(a, int | float | str | bytes) and type(a) is type(b):
            same = a == b or a != a
        if not same:
            return False
    return True


def _leaves_out_all(collate: Collate, samples: list[Any], error: Exception) -> bool:
    """Return True if a collate function dropped all samples: it raises the same error for an empty list.

    An error that the function's own code raises counts only if a sample is None.
    """
    if not isinstance(error, _OF_NONE) or not (any(s is None for s in samples) or raised_by_library(error)):
        return False
    try:
        collate([])
    except Exception as other:
        return type(other) is type(error) and text_of(other) == text_of(error) and place_of(other) == place_of(error)
    return False


def _misfits(collate: Collate, samples: list[Any]) -> list[int]:
    """Return the places of samples that do not collate with a sample that fits most others, or []."""

    def fit(*some: Any) -> bool:
        try:
            collate(list(some))
        except Exception:  # a failure is the answer
            return False
        return True

    for reference in samples[:_REFERENCES]:
        odd = [place for place, sample in enumerate(samples) if not fit(reference, sample)]
        if 2 * len(odd) < len(samples):
            return odd
    return []


def with_epochs(data: Any) -> list[Any]:
    """Return the datasets with `set_epoch`: the dataset itself, or datasets in torch's Subset and ConcatDataset."""
    if callable(getattr(data, "set_epoch", None)):
        return [data]
    several = data.datasets if isinstance(data, ConcatDataset | ChainDataset) else ()
    return [one for inner in ([data.dataset] if isinstance(data, Subset) else several) for one in with_epochs(inner)]


def tell_epoch(name: str, data: Any, epoch: int) -> None:
    """Call `set_epoch` of datasets that have it. Raises: DataError."""
    for one in with_epochs(data):
        try:
            one.set_epoch(epoch)
        except Exception as error:
            raise raised(f"{name} at the begin of epoch {epoch}", "set_epoch", error, "mend set_epoch") from error


def small_batch(source: Source, collate: Collate | None, bad_samples: int = 0, count: int = _FEW) -> Any:
    """Return the first `count` samples as a batch, with replacements for allowed bad ones. A stream is reset.

    Raises: DataError for a stream that cannot restart.
    """
    if isinstance(source, MapSource):
        return source.looked_at(np.arange(min(count, len(source))), Quarantine(bad_samples) if bad_samples else None)
    state = source.state_dict() if hasattr(source, "state_dict") else None
    samples = iter(source)
    if samples is source:
        raise DataError(
            given="train_data that is an iterator",
            conflict="a layout that divides the model, or a model with lazy modules, is built by a look at the first "
            "samples, and an iterator cannot go back",
            remedy="give an iterable that starts anew at each iter()",
        )
    first = list(itertools.islice(samples, count))
    if state is not None and hasattr(source, "load_state_dict"):
        source.load_state_dict(state)
    return collate_samples(collate or default_collate, first, "train_data")


def built(name: str, data: Any) -> Any:
    """Return a job's data, calling them first if they are a function. Raises: DataError if the function raises."""
    is_data = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    if not isinstance(data, type) and (is_data or not callable(data)):  # a class itself also has its instances' methods
        return data
    try:
        return data()
    except ShoalError:
        raise
    except Exception as error:
        given, remedy = (
            f"{name}: a function that builds the dataset",
            f"mend the function (try it alone: job().{name}())",
        )
        raise raised(given, "it", error, remedy) from error


def source_of(name: str, data: Any, collate: Collate | None) -> Source:
    """Return the source for built data. A stream (an iterable without a length) is returned unchanged.

    Raises: DataError if the data are empty or of an unsupported kind.
    """
    if is_stream(data):
        stream: Iterable[Any] = data
        return stream
    source: MapSource
    if type(data) is TensorDataset:
        data = tuple(data.tensors)
    leaves = _leaves(data)
    arrays = [isinstance(leaf, torch.Tensor | np.ndarray) for leaf in leaves]
    if any(arrays):
        if not all(arrays) or any(leaf.ndim == 0 for leaf in leaves):
            raise DataError(
                given=f"{name} of {', '.join(type(leaf).__name__ for leaf in leaves)}",
                conflict="tensors that belong together hold one row per sample each",
                remedy="give tensors only, each with at least one dim; or a dataset with __getitem__",
            )
        rows = TensorSource(name, data)
        source = rows if collate is None else SampleSource(name, _Rows(data, len(rows)), collate)
    else:
        inner: dict[Any, Any] = {}
        if isinstance(data, Mapping):
            inner = dict(data)
        elif type(data) in (list, tuple):
            inner = dict(enumerate(data[:8]))
        is_by_name = isinstance(data, Mapping) and bool(inner) and 0 not in data
        if is_by_name or any(isinstance(own, Dataset | DataLoader) for own in inner.values()):
            kinds = ", ".join(f"{key!r}: {type(own).__name__}" for key, own in list(inner.items())[:4])
            raise DataError(
                given=f"{name} of a {type(data).__name__} with {kinds}",
                conflict="a step is made of samples of one data set, by their numbers from 0",
                remedy="give one data set: torch.utils.data.ConcatDataset([...]) of them to train on the samples of "
                "all, or one whose __getitem__(i) returns a dict with a sample of each; eval_data takes a dict of sets",
            )
        if not (hasattr(data, "__len__") and (hasattr(data, "__getitem__") or hasattr(data, "__getitems__"))):
            raise DataError(
                given=f"{name} of type {type(data).__name__}",
                conflict="it has neither a length with __getitem__ nor __iter__",
                remedy="give a dataset, tensors with one row per sample, an iterable, or a function that returns one",
            )
        source = SampleSource(name, data, collate)
    if len(source) == 0:
        raise DataError(
            given=f"{name} with 0 samples", conflict="a step needs samples", remedy=f"check what {name} reads"
        )
    return source


class _Rows:
    """Tensors as a dataset of single samples, for a collate function."""

    def __init__(self, data: Any, length: int) -> None:
        self._data, self._length = data, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Any:
        if isinstance(self._data, Mapping):
            return {name: tensor[i] for name, tensor in self._data.items()}
        return tuple(tensor[i] for tensor in self._data) if isinstance(self._data, tuple) else self._data[i]


def is_stream(data: Any) -> bool:
    """Return True if the data are an iterable without a length and random access."""
    if isinstance(data, IterableDataset):
        return True
    return hasattr(data, "__iter__") and not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _leaves(data: Any) -> list[Any]:
    if isinstance(data, Mapping):
        return list(data.values())
    return list(data) if isinstance(data, tuple) else [data]


def _rows(tensor: Any, index: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(tensor[index.numpy()]))
    rows: torch.Tensor = tensor.index_select(0, index.to(tensor.device))
    return rows


def raised(given: str, what: str, error: Exception, remedy: str) -> DataError:
    """Create the error for an exception from a job's data, with its place in the job's code and the traceback."""
    first = text_of(error).strip().split("\n")[0][:300]
    text = f"{what} raised {type(error).__name__}: {first}{place_of(error)}"
    data_error = DataError(given=given, conflict=text, remedy=remedy)
    data_error.traceback_text = traceback_of(error)
    return data_error


def digest_of_samples(batch: Any) -> str | None:
    """Return the SHA-256 of the tensors, arrays, numbers and strings in a batch or in samples; None for None."""
    if batch is None:
        return None
    digest = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            for part in strided_parts(leaf.detach()):
                digest.update(f"{part.dtype} {list(part.shape)}".encode())
                digest.update(raw_bytes(part.cpu()).numpy().tobytes())
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            digest.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        else:
            plain = isinstance(leaf, int | float | str | bytes | np.generic)
            digest.update(repr(leaf).encode() if plain else type(leaf).__name__.encode())
    return digest.hexdigest()


# Attributes of a torch DataLoader, which torchdata's StatefulDataLoader has too.
_MARKS = ("dataset", "batch_size", "batch_sampler", "sampler", "collate_fn", "num_workers", "drop_last")
_WORKER_OPTIONS = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "timeout")
# Assumed number of samples of a stream, whose real length is unknown.
_ENDLESS = 1 << 62


def take_apart(
    name: str, loader: Any, collate: Collate | None, global_batch: int | None, job_sampler: Sampler | None = None
) -> Opened:
    """Extract the data source and the reading options from a DataLoader. `shuffle` is None for a stream.

    `global_batch`: the required batch size; None accepts any.
    Raises: DataError that lists everything in the loader that shoal cannot reproduce, and as `source_of`.
    """
    mistakes: list[Mistake] = []
    if job_sampler is not None and job_sampler.unequal:
        global_batch = None
    batch_sampler, own = loader.batch_sampler, loader.collate_fn
    sampler = getattr(batch_sampler, "sampler", loader.sampler)
    size = loader.batch_size
    if size is None and is_torchs(batch_sampler, BatchSampler):
        size = batch_sampler.batch_size
    kind = type(loader).__name__
    if not is_of_torch(getattr(type(loader).__iter__, "__module__", "")):
        mistakes.append(
            (f"an __iter__ of {kind}'s own", "what it makes of the batches is not seen", "give its dataset")
        )
    if batch_sampler is None:
        mistakes.append(
            (
                "batch_size=None",
                "its items are whole batches, and shoal makes each batch itself, of single samples",
                "give a dataset of single samples",
            )
        )
    elif not is_torchs(batch_sampler, BatchSampler):
        mistakes.append(
            (
                f"batch_sampler={type(batch_sampler).__name__}(...)",
                "which samples are in a step follows from the seed, the epoch and the step",
                in_place_of(batch_sampler),
            )
        )
    elif global_batch is not None and size != global_batch and not isinstance(sampler, DistributedSampler):
        mistakes.append(
            (
                f"batch_size={size}",
                f"a step consumes global_batch={global_batch} samples, whatever the number of ranks and of "
                "microbatches",
                f"write batch_size={global_batch} there, or global_batch={size} in the job",
            )
        )
    if collate is not None and batch_sampler is not None and own not in (collate, default_collate):
        names = [getattr(function, "__name__", type(function).__name__) for function in (own, collate)]
        given = f"collate_fn={names[0]} and collate={names[1]}"
        mistakes.append((given, "a batch is made by one function", "leave one of them out"))
    dataset, shuffle, own_order = loader.dataset, None, None
    drops = bool(loader.drop_last or getattr(batch_sampler, "drop_last", False))
    if hasattr(dataset, "__len__") and not is_stream(dataset):
        order = order_of_sampler(sampler, dataset, global_batch)
        if len(order) == 3:
            mistakes.append(order)
        else:
            dataset, way = order
            own_order = way if isinstance(way, Sampler) else None
            shuffle = way if isinstance(way, bool) else None
            drawn = job_sampler or own_order
            num_samples = len(dataset) if drawn is None else drawn.draws(len(dataset))
            if drops and size and num_samples % size:
                whole = num_samples - num_samples % size
                mistakes.append(
                    (
                        f"drop_last=True and {num_samples} samples in batches of {size}",
                        "every sample is read: a short last batch is weighed by what it has",
                        f"leave drop_last out, or give {whole} samples: torch.utils.data.Subset",
                    )
                )
    elif drops:
        mistakes.append(("drop_last=True", "a stream's last step may be short, and is weighed so", "leave it out"))
    if mistakes:
        given, conflict, remedy = ("\n".join(m[i] for m in mistakes) for i in range(3))
        raise DataError(given=f"{name}: a {kind} with {given}", conflict=conflict, remedy=remedy)
    notes = []
    if getattr(loader, "generator", None) is not None:
        notes.append("its generator is not used: the order follows from the job's seed")
    if loader.num_workers and is_stream(loader.dataset):
        notes.append(f"num_workers={loader.num_workers} has no effect: a stream is read in the rank itself")
        if getattr(loader, "worker_init_fn", None) is not None:
            notes.append("its worker_init_fn is not called: there are no worker processes")
    if getattr(loader, "in_order", True) is False:
        notes.append("in_order=False has no effect: batches come in the order of the steps")
    own = collate if own is default_collate else own
    return Opened(
        source_of(name, dataset, own),
        own,
        shuffle,
        workers=loader.num_workers,
        reading={key: value for key in _WORKER_OPTIONS if (value := getattr(loader, key, None))},
        notes=tuple(f"{name}: {note}" for note in notes),
        sampler=own_order,
    )


def open_data(
    name: str,
    data: Any,
    collate: Collate | None,
    global_batch: int | None = None,
    shuffle: bool | None = None,
    *,
    sampler: Sampler | None = None,
) -> Opened:
    """Open a dataset, tensors, a stream, a DataLoader, or a function that returns one of these.

    Args:
        name: the data's name in messages.
        global_batch: the required batch size of a DataLoader; None accepts any.
        shuffle: the user's setting.
        sampler: the job's.

    Raises: DataError if the data are empty, unsupported, contradictory or could not be built.
    """
    if isinstance(data, Opened):
        return data
    data = built(name, data)
    if isinstance(data, DataLoader) or all(hasattr(data, mark) for mark in _MARKS):
        source = take_apart(name, data, collate, global_batch, sampler)
    else:
        # Another library's loader yields batches and hides the samples.
        is_sized = hasattr(data, "__iter__") and hasattr(data, "__len__") and not hasattr(data, "__getitem__")
        has_marks = hasattr(data, "dataset") and (hasattr(data, "batch_size") or hasattr(data, "sampler"))
        if is_sized and has_marks and not isinstance(data, IterableDataset):
            raise DataError(
                given=f"{name} of type {type(data).__name__}",
                conflict="it gives batches, and a step is made of samples, in grains that shoal divides among the "
                "ranks",
                remedy="give the dataset itself, or a torch DataLoader of it",
            )
        source = Opened(source_of(name, data, collate), collate)
    if shuffle is None or isinstance(source.source, MapSource):
        return source
    note = f"{name}: shuffle={shuffle} has no effect: a stream is read in its own order"
    return replace(source, notes=(*source.notes, note))


def open_evaluations(job: Job) -> dict[str, Opened]:
    """Open a job's evaluation sets by name. Raises: DataError, as `open_data`."""
    return {name: open_evaluation(said_of(name), data, job.collate) for name, data in job.evaluation_sets.items()}


def said_of(evaluation_set: str) -> str:
    """Return the name of an evaluation set for messages."""
    return f"eval_data[{evaluation_set!r}]" if evaluation_set else "eval_data"


def open_evaluation(name: str, data: Any, collate: Collate | None) -> Opened:
    """Open evaluation data, as `open_data`."""
    source = open_data(name, data, collate)
    if source.sampler is not None:
        raise DataError(
            given=f"{name}: a DataLoader with a sampler that draws with replacement or by weight",
            conflict="an evaluation reads every sample once",
            remedy="leave the sampler out, or weigh the samples in the metric's sums",
        )
    if not source.workers or not isinstance(source.source, MapSource):
        return source
    note = f"{name}: num_workers={source.workers} has no effect: an evaluation reads in the rank itself"
    return replace(source, notes=(*source.notes, note))


def opened(job: Job) -> Job:
    """Return the job with opened training data and a resolved `shuffle`. Raises: DataError, as `open_data`."""
    data = begun(
        open_data("train_data", job.train_data, job.collate, job.global_batch, job.shuffle, sampler=job.sampler)
    )
    return in_its_order("train_data", data, replace(job, train_data=data))


def begun(data: Opened) -> Opened:
    """Set training data to their first epoch, since samples are probed before the first step. Raises: DataError."""
    if isinstance(data.source, MapSource):
        data.source.at_epoch(0)
    return data


def training_data(job: Job) -> Opened:
    """Open a job's training data. Raises: DataError, as `open_data`."""
    data: Opened = opened(job).train_data
    return data


def one_grain(job: Job) -> Any:
    """Return a batch of the first grain's samples to measure sequence lengths, or None for a stream.

    Other samples replace unreadable samples here: the run itself decides later whether to skip them.
    """
    source = training_data(job).source
    if not isinstance(source, MapSource):
        return None
    return source.looked_at(np.arange(min(len(source), job.grain_size)), Quarantine(len(source)))


def in_its_order(name: str, data: Opened, job: Job) -> Job:
    """Return the job with the order of its samples: a `sampler`, or `shuffle`, whose default is True.

    Raises: DataError if data and job conflict; JobError if the sampler does not fit the data.
    """
    sampler = job.sampler or data.sampler
    if sampler is None:
        if None not in (data.shuffle, job.shuffle) and data.shuffle != job.shuffle:
            kind = "shuffles" if data.shuffle else "reads in order"
            raise DataError(
                given=f"shuffle={job.shuffle}, and {name}: a DataLoader that {kind}",
                conflict="both set the order of the samples",
                remedy=f"write DataLoader(..., shuffle={job.shuffle}), or leave shuffle={job.shuffle} out beside the "
                "DataLoader",
            )
        return replace(job, shuffle=(job.shuffle if job.shuffle is not None else data.shuffle) is not False)
    kind = type(sampler).__name__
    if not isinstance(data.source, MapSource):
        raise JobError(
            given=f"sampler=shoal.{kind}(...), and {name}: a stream",
            conflict="a stream is read in its own order",
            remedy="leave the sampler out, or give a map-style dataset",
        )
    if job.shuffle is not None or (job.sampler is not None and (data.shuffle or data.sampler not in (None, sampler))):
        given = f"sampler=shoal.{kind}(...)" if job.shuffle is None else f"shuffle={job.shuffle}"
        raise DataError(
            given=f"{given}, and {name}: a DataLoader with shuffle=True or a sampler",
            conflict="both set the order of the samples",
            remedy=f"leave {given} out, or write DataLoader(...) without a sampler and without shuffle",
        )
    read = getattr(data.source.data, "datasets", ())
    if isinstance(sampler, Mixture) and list(map(id, read)) != list(map(id, sampler.datasets.values())):
        raise JobError(
            given=f"{name}, and sampler=shoal.Mixture(...)",
            conflict="a mixture reads its own datasets",
            remedy=f"give the mixture itself as {name}; a further dataset belongs in it with a name and a weight",
        )
    sampler.check(len(data.source))
    return replace(job, sampler=sampler)


def order_of(data: Opened, job: Job, length: Length) -> Order:
    """Return the sample order of a training of that length, in the job's batches, with its seed, in its order."""
    num_samples = len(data.source) if isinstance(data.source, MapSource) else _ENDLESS
    if job.sampler is not None:
        num_samples = job.sampler.draws(num_samples)
    shuffle, sampler = job.shuffle is not False, job.sampler
    return Order(num_samples, job.global_batch, job.num_grains, job.seed, shuffle, length, sampler)


def refuse_epochs(data: Opened, length: Length, given: str, remedy: str) -> None:
    """Reject a length in epochs for a stream. Raises: JobError."""
    if isinstance(length, Epochs) and not isinstance(data.source, MapSource):
        raise JobError(given=given, conflict="a stream has no length, and so no epochs", remedy=remedy)
