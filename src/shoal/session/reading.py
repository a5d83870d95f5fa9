"""Reading: from what `session.steps` is given to the loader of its batches."""

from __future__ import annotations

import warnings
from typing import Any

from shoal.agreement import together
from shoal.data.loader import Loader, MapLoader, Place
from shoal.data.opened import Opened, in_new_orders, open_data
from shoal.data.order import Order
from shoal.data.source import MapSource
from shoal.data.stream import StreamLoader
from shoal.errors import JobError, SettingWarning
from shoal.job import Epochs, Length
from shoal.session.ways import Base

# A stream's length is unknown: one pass that no training comes to the end of by counting.
_ENDLESS = 1 << 62


def open_loader(base: Base, dataset: Any, length: Any, epochs: Any) -> tuple[Loader, Order]:
    """The loader of a dataset, a DataLoader or a stream, and the order of its steps. Collective: all ranks.

    Raises: on every rank, DataError where it cannot be read, JobError for what is no length.
    """
    training, mesh = base.training, base.mesh
    data = together(mesh, lambda: open_data("dataset", dataset, training.collate, training.global_batch))
    for note in data.notes if mesh.rank == 0 else ():
        warnings.warn(note, SettingWarning, stacklevel=3)
    goal = _length(length, epochs, isinstance(data.source, MapSource))
    shuffle = together(mesh, lambda: in_new_orders("dataset", data, training.shuffle))
    count = len(data.source) if isinstance(data.source, MapSource) else _ENDLESS
    order = Order(count, base.job.global_batch, base.job.grains, base.job.seed, shuffle, goal)
    return together(mesh, lambda: _loader(base, data, order)), order


def _loader(base: Base, data: Opened, order: Order) -> Loader:
    place = Place(base.mesh.data_rank, base.mesh.num_data_ranks)
    if not isinstance(data.source, MapSource):
        return StreamLoader(data.source, order, place, data.collate)
    workers = base.plan.data.workers if data.workers is None or base.says_workers else data.workers
    on_gpu = base.mesh.device.type == "cuda"
    return MapLoader(data.source, order, place, workers, on_gpu, reading=data.reading)


def _length(length: Any, epochs: Any, has_end: bool) -> Length:
    """Raises: JobError for what is no length, for two of them, and for epochs of a stream."""
    given = ", ".join(([] if length is None else [repr(length)]) + ([] if epochs is None else [f"epochs={epochs!r}"]))
    if length is not None and epochs is not None:
        raise _no_length(given, "a training has one length")
    goal = length if length is not None else Epochs(1 if epochs is None else epochs)
    count = getattr(goal, "count", None)
    if isinstance(count, bool) or not isinstance(count, int | float) or not count > 0:
        raise _no_length(given, "a length says what it counts, and is positive")
    if isinstance(goal, Epochs) and not has_end:
        raise JobError(
            given=f"session.steps({', '.join(['stream', given] if given else ['stream'])})",
            conflict="a stream has no length, and so no epochs",
            remedy="write session.steps(stream, shoal.Steps(1000)) or shoal.Samples(10**6)",
        )
    found: Length = goal
    return found


def _no_length(given: str, conflict: str) -> JobError:
    return JobError(
        given=f"session.steps(dataset, {given})",
        conflict=conflict,
        remedy="write session.steps(dataset, epochs=3), shoal.Steps(1000) or shoal.Samples(10**6)",
    )
