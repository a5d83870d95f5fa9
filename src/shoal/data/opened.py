"""Opened data sources of a job or a session, the order of their samples, and their loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
_MARKS = ("dataset", "batch_size", "batch_sampler", "sampler", "collate_fn", "num_workers", "drop_last")
_WORKER_OPTIONS = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "timeout")
# Assumed number of samples of a stream, whose real length is unknown.
_ENDLESS = 1 << 62


def is_loader(data: Any) -> bool:
    """Return True if `data` is a torch DataLoader or has its attributes, as torchdata's StatefulDataLoader."""
    return isinstance(data, DataLoader) or all(hasattr(data, name) for name in _MARKS)


def refuse_batches(name: str, data: Any) -> None:
    """Reject another library's loader, which yields batches and hides the samples. Raises: DataError."""
    is_sized = hasattr(data, "__iter__") and hasattr(data, "__len__") and not hasattr(data, "__getitem__")
    if not is_sized or isinstance(data, IterableDataset) or not hasattr(data, "dataset"):
        return
    if hasattr(data, "batch_size") or hasattr(data, "sampler"):
        raise DataError(
            given=f"{name} of type {type(data).__name__}",
            conflict="it gives batches, and a step is made of samples, in grains that shoal divides among the ranks",
            remedy="give the dataset itself, or a torch DataLoader of it",
        )


def take_apart(name: str, loader: Any, collate: Collate | None, global_batch: int | None) -> Opened:
    """Extract the data source and the reading options from a DataLoader. `shuffle` is None for a stream.

    `global_batch`: the required batch size; None accepts any.
    Raises: DataError that lists everything in the loader that shoal cannot reproduce, and as `source_of`.
    """
    mistakes = [*_batches(loader, collate, global_batch)]
    dataset, shuffle = loader.dataset, None
    drops = bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
    if hasattr(dataset, "__len__") and not is_stream(dataset):
        order = _order(loader, global_batch)
        if len(order) == 3:
            mistakes.append(order)
        else:
            dataset, shuffle = order
            size, num_samples = _batch_size(loader), len(dataset)
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
        raise DataError(given=f"{name}: a {type(loader).__name__} with {given}", conflict=conflict, remedy=remedy)
    own = collate if loader.collate_fn is default_collate else loader.collate_fn
    return Opened(
        source_of(name, dataset, own),
        own,
        shuffle,
        workers=loader.num_workers,
        reading={key: value for key in _WORKER_OPTIONS if (value := getattr(loader, key, None))},
        notes=tuple(f"{name}: {note}" for note in _without_effect(loader)),
    )


def _known(value: Any, kind: type) -> bool:
    """Check for torch's or torchdata's own class, since a user's subclass may behave differently."""
    return isinstance(value, kind) and _is_torchs(type(value).__module__)


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "torchdata")


def _batch_size(loader: Any) -> Any:
    if loader.batch_size is not None or not _known(loader.batch_sampler, BatchSampler):
        return loader.batch_size
    return loader.batch_sampler.batch_size


def _batches(loader: Any, collate: Collate | None, global_batch: int | None) -> Iterator[_Mistake]:
    if not _is_torchs(getattr(type(loader).__iter__, "__module__", "")):
        kind = type(loader).__name__
        yield f"an __iter__ of {kind}'s own", "what it makes of the batches is not seen", "give its dataset"
    if loader.batch_sampler is None:
        yield (
            "batch_size=None",
            "its items are whole batches, and shoal makes each batch itself, of single samples",
            "give a dataset of single samples",
        )
    elif not _known(loader.batch_sampler, BatchSampler):
        yield (
            f"batch_sampler={type(loader.batch_sampler).__name__}(...)",
            "which samples are in a step follows from the seed, the epoch and the step",
            "leave batch_sampler out, and write shuffle=True or False",
        )
    elif (
        global_batch is not None
        and (size := _batch_size(loader)) != global_batch
        and not isinstance(_sampler(loader), DistributedSampler)
    ):
        yield (
            f"batch_size={size}",
            f"a step consumes global_batch={global_batch} samples, whatever the number of ranks and of microbatches",
            f"write batch_size={global_batch} there, or global_batch={size} in the job",
        )
    own = loader.collate_fn
    if collate is not None and loader.batch_sampler is not None and own not in (collate, default_collate):
        yield (
            f"collate_fn={_named(own)} and collate={_named(collate)}",
            "a batch is made by one function",
            "leave one of them out",
        )


def _sampler(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _order(loader: Any, global_batch: int | None) -> tuple[Any, bool] | _Mistake:
    """Return the sampler's dataset and whether each epoch has a new order, or a mistake."""
    sampler, dataset = _sampler(loader), loader.dataset
    if _known(sampler, SequentialSampler) or _known(sampler, RandomSampler):
        if len(sampler.data_source) != len(dataset):
            given = f"a sampler of {len(sampler.data_source)} of its {len(dataset)} samples"
            return given, "an epoch reads the whole dataset", "give the samples themselves: torch.utils.data.Subset"
        if isinstance(sampler, SequentialSampler):
            return dataset, False
        if sampler.replacement or sampler.num_samples != len(dataset):
            given = f"RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples})"
            return given, "an epoch reads every sample once", "write shuffle=True, and say how long in Job(length=...)"
        return dataset, True
    if _known(sampler, SubsetRandomSampler):
        return Subset(dataset, list(sampler.indices)), True
    if isinstance(sampler, DistributedSampler):
        size = "" if global_batch is None else f"batch_size={global_batch}, "
        return (
            f"sampler=DistributedSampler(num_replicas={sampler.num_replicas}, ...)",
            "shoal itself divides each step among the ranks: every rank gives the whole dataset",
            f"write DataLoader(dataset, {size}shuffle={sampler.shuffle}), and seed={sampler.seed} in the job",
        )
    if _known(sampler, WeightedRandomSampler):
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


def _without_effect(loader: Any) -> Iterable[str]:
    if getattr(loader, "generator", None) is not None:
        yield "its generator is not used: the order follows from the job's seed"
    if loader.num_workers and is_stream(loader.dataset):
        yield f"num_workers={loader.num_workers} has no effect: a stream is read in the rank itself"
        if getattr(loader, "worker_init_fn", None) is not None:
            yield "its worker_init_fn is not called: there are no worker processes"
    if getattr(loader, "in_order", True) is False:
        yield "in_order=False has no effect: batches come in the order of the steps"


def _named(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


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
    if is_loader(data):
        source = take_apart(name, data, collate, global_batch)
    else:
        refuse_batches(name, data)
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
    found = open_data(name, data, collate)
    if not found.workers or not isinstance(found.source, MapSource):
        return found
    said = f"{name}: num_workers={found.workers} has no effect: an evaluation reads in the rank itself"
    return replace(found, notes=(*found.notes, said))


def opened(job: Job) -> Job:
    """Return the job with opened training data and a resolved `shuffle`. Raises: DataError, as `open_data`."""
    found = begun(open_data("train_data", job.train_data, job.collate, job.global_batch, job.shuffle))
    return replace(job, train_data=found, shuffle=in_new_orders("train_data", found, job.shuffle))


def begun(data: Opened) -> Opened:
    """Set training data to their first epoch, since samples are probed before the first step. Raises: DataError."""
    if isinstance(data.source, MapSource):
        data.source.at_epoch(0)
    return data


def training_data(job: Job) -> Opened:
    """Open a job's training data. Raises: DataError, as `open_data`."""
    found: Opened = opened(job).train_data
    return found


def in_new_orders(name: str, found: Opened, shuffle: bool | None) -> bool:
    """Decide whether epochs have new orders (the default), from data and `shuffle`.

    Raises: DataError if they conflict.
    """
    if None not in (found.shuffle, shuffle) and found.shuffle != shuffle:
        kind = "shuffles" if found.shuffle else "reads in order"
        raise DataError(
            given=f"shuffle={shuffle}, and {name}: a DataLoader that {kind}",
            conflict="samples have one order",
            remedy=f"write DataLoader(..., shuffle={shuffle}), or leave shuffle={shuffle} out beside the DataLoader",
        )
    said = shuffle if shuffle is not None else found.shuffle
    return said is not False


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
