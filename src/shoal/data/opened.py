"""Data sources of a job or a session, opened once; the order of their samples, and the loader for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.data.loader import DataRank, Loader, MapLoader
from shoal.data.order import Order
from shoal.data.source import Collate, MapSource, Opened, built, source_of
from shoal.data.stream import StreamLoader
from shoal.data.taken_apart import is_loader, refuse_batches, take_apart
from shoal.errors import DataError, JobError
from shoal.job import Epochs, Job, Length

if TYPE_CHECKING:
    from shoal.distributed.mesh import Mesh

# A stream's length is unknown: one pass that no training comes to the end of by counting.
_ENDLESS = 1 << 62


def open_data(
    name: str, data: Any, collate: Collate | None, global_batch: int | None = None, shuffle: bool | None = None
) -> Opened:
    """The data behind a dataset, tensors, a stream, a DataLoader, or a function that returns one of them.

    `global_batch` is what the batch size of a DataLoader has to be; None where that is no matter. `shuffle` as written.
    Raises: DataError where they are empty, of a kind that cannot be read, say what cannot be done, or were not built.
    """
    if isinstance(data, Opened):
        return data
    data = built(name, data)
    if is_loader(data):
        found = take_apart(name, data, collate, global_batch)
    else:
        refuse_batches(name, data)
        found = Opened(source_of(name, data, collate), collate)
    if shuffle is None or isinstance(found.source, MapSource):
        return found
    said = f"{name}: shuffle={shuffle} has no effect: a stream is read in its own order"
    return replace(found, notes=(*found.notes, said))


def open_evaluation(name: str, data: Any, collate: Collate | None) -> Opened:
    """Source of evaluation data, opened as in `open_data`."""
    found = open_data(name, data, collate)
    if not found.workers or not isinstance(found.source, MapSource):
        return found
    said = f"{name}: num_workers={found.workers} has no effect: an evaluation reads in the rank itself"
    return replace(found, notes=(*found.notes, said))


def opened(job: Job) -> Job:
    """The job with its training data opened, and `shuffle` as it and they say. Raises: DataError, as `open_data`."""
    found = open_data("train_data", job.train_data, job.collate, job.global_batch, job.shuffle)
    return replace(job, train_data=found, shuffle=in_new_orders("train_data", found, job.shuffle))


def training_data(job: Job) -> Opened:
    """A job's training data. Raises: DataError, as `open_data`."""
    found: Opened = opened(job).train_data
    return found


def in_new_orders(name: str, found: Opened, shuffle: bool | None) -> bool:
    """Whether each epoch has a new order, as the data and `shuffle` say; new ones where neither says anything.

    Raises: DataError where they differ.
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
    """The order of a training of that length in the job's batches, from its seed."""
    num_samples = len(data.source) if isinstance(data.source, MapSource) else _ENDLESS
    return Order(num_samples, job.global_batch, job.grains, job.seed, shuffle, length)


def loader_of(data: Opened, order: Order, mesh: Mesh, workers: int) -> Loader:
    """This rank's loader; `workers` processes read for it, not a stream. Raises: as the loaders."""
    place, source = DataRank(mesh.data_rank, mesh.num_data_ranks), data.source
    if not isinstance(source, MapSource):
        return StreamLoader(source, order, place, data.collate)
    return MapLoader(source, order, place, workers, mesh.device.type == "cuda", reading=data.reading)


def refuse_epochs(data: Opened, length: Length, given: str, remedy: str) -> None:
    """Raises: JobError for epochs of a stream."""
    if isinstance(length, Epochs) and not isinstance(data.source, MapSource):
        raise JobError(given=given, conflict="a stream has no length, and so no epochs", remedy=remedy)
