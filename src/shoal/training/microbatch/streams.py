"""Comparison of the stream samples that ranks read, which are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.data.loader import Loader
from shoal.data.source import digest_of_samples
from shoal.data.stream import StreamLoader
from shoal.distributed.mesh import Mesh
from shoal.errors import DataError


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
