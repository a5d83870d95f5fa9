"""Data sources of a job or a session, opened once, with the settings that a loader brought along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.data.source import Collate, MapSource, Source, built, source_of
from shoal.data.taken_apart import is_loader, refuse_batches, take_apart
from shoal.errors import DataError
from shoal.job import Job


@dataclass(frozen=True)
class Opened:
    """A data source with its order. `collate` is for a stream's samples; a map-style source has its own."""

    source: Source
    collate: Collate | None = None
    shuffle: bool | None = None
    workers: int | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
        parts = take_apart(name, data, collate, global_batch)
        collate = parts.collate or collate
        source = source_of(name, parts.dataset, collate)
        found = Opened(source, collate, parts.shuffle, parts.workers, parts.reading, parts.notes)
    else:
        refuse_batches(name, data)
        found = Opened(source_of(name, data, collate), collate)
    if shuffle is None or isinstance(found.source, MapSource):
        return found
    said = f"{name}: shuffle={shuffle} has no effect: a stream is read in its own order"
    return replace(found, notes=(*found.notes, said))


def open_evaluation(name: str, data: Any, collate: Collate | None) -> Opened:
    """As `open_data`, for what an evaluation reads."""
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
