"""Construction of a training's sample order and of the loader for it, from opened data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.loader import DataRank, Loader, MapLoader
from shoal.data.opened import Opened
from shoal.data.order import Order
from shoal.data.source import MapSource
from shoal.data.stream import StreamLoader
from shoal.errors import JobError
from shoal.job import Epochs, Job, Length

if TYPE_CHECKING:
    from shoal.distributed.mesh import Mesh

# A stream's length is unknown: one pass that no training comes to the end of by counting.
_ENDLESS = 1 << 62


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
