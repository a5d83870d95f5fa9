"""Opened data sources of a job or a session, the order of their samples, and their loaders."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from shoal.data.loader import DataRank, Loader, MapLoader
from shoal.data.order import Order
from shoal.data.source import Collate, MapSource, Opened, built, is_stream, source_of
from shoal.data.stream import StreamLoader
from shoal.errors import DataError, JobError
from shoal.jobs.job import Epochs, Job, Length

if TYPE_CHECKING:
    from shoal.distributed.mesh import Mesh

_Mistake = tuple[str, str, str]
# Attributes of a torch DataLoader, which torchdata's StatefulDataLoader has too.
_MARKS = ("dataset", "batch_size", "batch_sampler", "sampler", "collate_fn", "num_workers", "drop_last")
_WORKER_OPTIONS = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "timeout")
# Assumed number of samples of a stream, whose real length is unknown.
_ENDLESS = 1 << 62


def take_apart(name: str, loader: Any, collate: Collate | None, global_batch: int | None) -> Opened:
    """Extract the data source and the reading options from a DataLoader. `shuffle` is None for a stream.

    `global_batch`: the required batch size; None accepts any.
    Raises: DataError that lists everything in the loader that shoal cannot reproduce, and as `source_of`.
    """
    mistakes: list[_Mistake] = []
    batch_sampler, own = loader.batch_sampler, loader.collate_fn
    sampler = getattr(batch_sampler, "sampler", loader.sampler)
    size = loader.batch_size
    if size is None and _is_torchs(batch_sampler, BatchSampler):
        size = batch_sampler.batch_size
    kind = type(loader).__name__
    if not _is_of_torch(getattr(type(loader).__iter__, "__module__", "")):
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
    elif not _is_torchs(batch_sampler, BatchSampler):
        mistakes.append(
            (
                f"batch_sampler={type(batch_sampler).__name__}(...)",
                "which samples are in a step follows from the seed, the epoch and the step",
                "leave batch_sampler out, and write shuffle=True or False",
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
    dataset, shuffle = loader.dataset, None
    drops = bool(loader.drop_last or getattr(batch_sampler, "drop_last", False))
    if hasattr(dataset, "__len__") and not is_stream(dataset):
        order = _order(sampler, dataset, global_batch)
        if len(order) == 3:
            mistakes.append(order)
        else:
            dataset, shuffle = order
            num_samples = len(dataset)
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
    )


def _is_torchs(value: Any, kind: type) -> bool:
    """Check for torch's or torchdata's own class, since a user's subclass may behave differently."""
    return isinstance(value, kind) and _is_of_torch(type(value).__module__)


def _is_of_torch(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "torchdata")


def _order(sampler: Any, dataset: Any, global_batch: int | None) -> tuple[Any, bool] | _Mistake:
    """Return the sampler's dataset and whether each epoch has a new order, or a mistake."""
    if _is_torchs(sampler, SequentialSampler) or _is_torchs(sampler, RandomSampler):
        if len(sampler.data_source) != len(dataset):
            given = f"a sampler of {len(sampler.data_source)} of its {len(dataset)} samples"
            return given, "an epoch reads the whole dataset", "give the samples themselves: torch.utils.data.Subset"
        if isinstance(sampler, SequentialSampler):
            return dataset, False
        if sampler.replacement or sampler.num_samples != len(dataset):
            given = f"RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples})"
            return given, "an epoch reads every sample once", "write shuffle=True, and say how long in Job(length=...)"
        return dataset, True
    if _is_torchs(sampler, SubsetRandomSampler):
        return Subset(dataset, list(sampler.indices)), True
    if isinstance(sampler, DistributedSampler):
        size = "" if global_batch is None else f"batch_size={global_batch}, "
        return (
            f"sampler=DistributedSampler(num_replicas={sampler.num_replicas}, ...)",
            "shoal itself divides each step among the ranks: every rank gives the whole dataset",
            f"write DataLoader(dataset, {size}shuffle={sampler.shuffle}), and seed={sampler.seed} in the job",
        )
    if _is_torchs(sampler, WeightedRandomSampler):
        return (
            "sampler=WeightedRandomSampler(...)",
            "an epoch reads every sample once, in an order that follows from the seed",
            "weigh the samples in the loss, or give a dataset that repeats them",
        )
    return (
        f"sampler={type(sampler).__name__}(...)",
        "the order of samples follows from the seed, the epoch and the step, whatever was read before",
        "write shuffle=True or False; a fixed order is a dataset: torch.utils.data.Subset(dataset, list(sampler))",
    )


def open_data(
    name: str, data: Any, collate: Collate | None, global_batch: int | None = None, shuffle: bool | None = None
) -> Opened:
    """Open a dataset, tensors, a stream, a DataLoader, or a function that returns one of these.

    Args:
        name: the data's name in messages.
        global_batch: the required batch size of a DataLoader; None accepts any.
        shuffle: the user's setting.

    Raises: DataError if the data are empty, unsupported, contradictory or could not be built.
    """
    if isinstance(data, Opened):
        return data
    data = built(name, data)
    if isinstance(data, DataLoader) or all(hasattr(data, mark) for mark in _MARKS):
        source = take_apart(name, data, collate, global_batch)
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
    if not source.workers or not isinstance(source.source, MapSource):
        return source
    note = f"{name}: num_workers={source.workers} has no effect: an evaluation reads in the rank itself"
    return replace(source, notes=(*source.notes, note))


def opened(job: Job) -> Job:
    """Return the job with opened training data and a resolved `shuffle`. Raises: DataError, as `open_data`."""
    data = begun(open_data("train_data", job.train_data, job.collate, job.global_batch, job.shuffle))
    return replace(job, train_data=data, shuffle=in_new_orders("train_data", data, job.shuffle))


def begun(data: Opened) -> Opened:
    """Set training data to their first epoch, since samples are probed before the first step. Raises: DataError."""
    if isinstance(data.source, MapSource):
        data.source.at_epoch(0)
    return data


def training_data(job: Job) -> Opened:
    """Open a job's training data. Raises: DataError, as `open_data`."""
    data: Opened = opened(job).train_data
    return data


def in_new_orders(name: str, data: Opened, shuffle: bool | None) -> bool:
    """Decide whether epochs have new orders (the default), from data and `shuffle`.

    Raises: DataError if they conflict.
    """
    if None not in (data.shuffle, shuffle) and data.shuffle != shuffle:
        kind = "shuffles" if data.shuffle else "reads in order"
        raise DataError(
            given=f"shuffle={shuffle}, and {name}: a DataLoader that {kind}",
            conflict="samples have one order",
            remedy=f"write DataLoader(..., shuffle={shuffle}), or leave shuffle={shuffle} out beside the DataLoader",
        )
    return (shuffle if shuffle is not None else data.shuffle) is not False


def order_of(data: Opened, job: Job, length: Length, shuffle: bool) -> Order:
    """Return the sample order of a training of that length, in the job's batches and with its seed."""
    num_samples = len(data.source) if isinstance(data.source, MapSource) else _ENDLESS
    return Order(num_samples, job.global_batch, job.num_grains, job.seed, shuffle, length)


def loader_of(data: Opened, order: Order, mesh: Mesh, workers: int) -> Loader:
    """Create this rank's loader. `workers`: number of reading processes, unused for streams. Raises: as the loaders."""
    place, source = DataRank(mesh.data_rank, mesh.num_data_ranks), data.source
    if not isinstance(source, MapSource):
        return StreamLoader(source, order, place, data.collate)
    pins = mesh.device.type == "cuda"
    return MapLoader(source, order, place, workers, pins, reading=data.reading, bad_samples=data.bad_samples)


def refuse_epochs(data: Opened, length: Length, given: str, remedy: str) -> None:
    """Reject a length in epochs for a stream. Raises: JobError."""
    if isinstance(length, Epochs) and not isinstance(data.source, MapSource):
        raise JobError(given=given, conflict="a stream has no length, and so no epochs", remedy=remedy)
