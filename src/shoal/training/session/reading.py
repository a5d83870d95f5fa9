"""Construction of a Session's loader from the data of `session.steps`."""

from __future__ import annotations

from typing import Any

from shoal.data.loader import Loader
from shoal.data.opened import in_new_orders, loader_of, open_data, order_of, refuse_epochs
from shoal.data.order import Order
from shoal.data.source import Opened
from shoal.distributed.agreement import together
from shoal.errors import JobError
from shoal.job import Epochs, Length
from shoal.plans.unheeded import warn_of
from shoal.training.session.ways import Base


def open_loader(base: Base, dataset: Any, length: Any, epochs: Any) -> tuple[Loader, Order]:
    """The loader of a dataset, a DataLoader or a stream, and the order of its steps. Collective: all ranks.

    Raises: on every rank, DataError where it cannot be read, JobError for what is no length.
    """
    training, mesh = base.training, base.mesh
    asked = training.collate, training.global_batch, training.shuffle
    data = together(mesh, lambda: open_data("dataset", dataset, *asked))
    if mesh.rank == 0:
        warn_of(data.notes, above=1)
    goal = _length(length, epochs, data)
    shuffle = together(mesh, lambda: in_new_orders("dataset", data, training.shuffle))
    order = order_of(data, base.job, goal, shuffle)
    workers = base.plan.data.workers if data.workers is None or base.says_workers else data.workers
    return together(mesh, lambda: loader_of(data, order, mesh, workers)), order


def _length(length: Any, epochs: Any, data: Opened) -> Length:
    """Raises: JobError for what is no length, for two of them, and for epochs of a stream."""
    given = ", ".join(([] if length is None else [repr(length)]) + ([] if epochs is None else [f"epochs={epochs!r}"]))
    if length is not None and epochs is not None:
        raise _no_length(given, "a training has one length")
    goal = length if length is not None else Epochs(1 if epochs is None else epochs)
    count = getattr(goal, "count", None)
    if isinstance(count, bool) or not isinstance(count, int | float) or not count > 0:
        raise _no_length(given, "a length says what it counts, and is positive")
    found: Length = goal
    given = f"session.steps({', '.join(['stream', given] if given else ['stream'])})"
    refuse_epochs(data, found, given, "write session.steps(stream, shoal.Steps(1000)) or shoal.Samples(10**6)")
    return found


def _no_length(given: str, conflict: str) -> JobError:
    return JobError(
        given=f"session.steps(dataset, {given})",
        conflict=conflict,
        remedy="write session.steps(dataset, epochs=3), shoal.Steps(1000) or shoal.Samples(10**6)",
    )
