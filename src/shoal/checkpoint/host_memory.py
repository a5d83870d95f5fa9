"""Snapshots of what all ranks of a host hold, in memory that they map: each copies its share, the first rank has all.

So one copy of the training state that ranks share is written by a thread beside the training, as a copy each is. The
memory has no name: the kernel frees it with the last process that maps it, however those end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.checkpoint.pieces import Index, share
from shoal.distributed.agreement import together
from shoal.distributed.collectives.shared_memory.region import SharedRegion, open_region
from shoal.distributed.collectives.shared_memory.staging import LINE_BYTES
from shoal.distributed.mesh import Mesh
from shoal.errors import LaunchError
from shoal.parallel.model.sharded_model import TensorSlices
from shoal.parallel.model.tensor_slice import TensorSlice

# CPU tensors by file and path.
Content = dict[str, dict[str, Tensor]]


class HostMemory:
    """Memory for snapshots that all ranks of a host map, kept from one to the next as SnapshotMemory is."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._num_bytes = 0
        self._region: SharedRegion | None = None
        self._written: Index = {}
        self._content: Content = {}

    def copied(self, held: Mapping[str, TensorSlices], written: Index) -> Content | None:
        """Copies of what all ranks hold, on each of them, which stay until the next; None where it cannot be opened.

        Nobody may read the snapshot before any more. Collective: all ranks, JSON gathers. Raises: on every rank, where
        a copy did on any.
        """
        self._lay_out(written)
        if self._region is None:
            return None
        together(self._mesh, lambda: self._copy(held))
        return self._content

    def _lay_out(self, written: Index) -> None:
        """Gives each tensor its place, and opens the memory anew where they take more or less of it."""
        if written == self._written:
            return
        starts, end = _starts(written)
        self._written, self._content = written, {}
        if end != self._num_bytes:
            self._region, self._num_bytes = None, end
            self._open(end)
        if self._region is not None:
            everything = torch.frombuffer(self._region.memory, dtype=torch.uint8)
            for (name, path), (start, dtype, shape) in starts.items():
                flat = everything[start : start + math.prod(shape) * dtype.itemsize]
                self._content.setdefault(name, {})[path] = flat.view(dtype).view(shape)

    def _open(self, num_bytes: int) -> None:
        mesh = self._mesh
        with contextlib.suppress(LaunchError):  # which every rank has then
            self._region = open_region(mesh.gather_json, mesh.rank, mesh.world_size, -(-num_bytes // mesh.world_size))
        mesh.gather_json(None)  # each has set a part of it to zero, which others write to

    def _copy(self, held: Mapping[str, TensorSlices]) -> None:
        mesh = self._mesh
        with torch.no_grad():
            for _ in share(held, self._written, mesh.rank, mesh.world_size, self._copied):
                pass

    def _copied(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        content = self._content[name]
        return {path: content[path].copy_(tensor) for path, tensor in tensors.items()}


def _starts(written: Index) -> tuple[dict[tuple[str, str], tuple[int, torch.dtype, tuple[int, ...]]], int]:
    """The byte at which each tensor of a file begins, its dtype and shape; and where the last one ends."""
    found, end = {}, 0
    for tensors in written.values():
        for path, entry in tensors.items():
            dtype = getattr(torch, entry["dtype"])
            for name, ranges in entry["files"].items():
                shape = TensorSlice.from_json(entry["shape"], ranges).local_shape
                found[name, path] = end, dtype, shape
                end += -(-math.prod(shape) * dtype.itemsize // LINE_BYTES) * LINE_BYTES
    return found, end
