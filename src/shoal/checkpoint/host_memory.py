"""Checkpoint snapshots in memory that all ranks of a host share: each rank copies its part, the first has the whole.

A thread can then write the single copy of state that ranks share while training continues. The memory has no name, so
the kernel frees it with the last process that maps it, however the processes end.
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
    """Shared snapshot memory of a host, reused from one snapshot to the next like SnapshotMemory."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._num_bytes = 0
        self._region: SharedRegion | None = None
        self._written: Index = {}
        self._content: Content = {}

    def copied(self, held: Mapping[str, TensorSlices], written: Index) -> Content | None:
        """Return copies of the tensors of all ranks, valid until the next call; None without shared memory.

        The caller makes sure that no one still reads the previous snapshot.
        Raises: on every rank, if copying failed on any rank.
        Collective: all ranks, JSON gathers.
        """
        self._lay_out(written)
        if self._region is None:
            return None
        together(self._mesh, lambda: self._copy(held))
        return self._content

    def _lay_out(self, written: Index) -> None:
        """Assign each tensor its place, and reallocate the memory if the total size changed."""
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
        with contextlib.suppress(LaunchError):  # every rank raises it together
            self._region = open_region(mesh.gather_json, mesh.rank, mesh.world_size, -(-num_bytes // mesh.world_size))
        mesh.gather_json(None)  # wait: each rank zeroes a part of the memory that others write to

    def _copy(self, held: Mapping[str, TensorSlices]) -> None:
        mesh = self._mesh
        with torch.no_grad():
            for _ in share(held, self._written, mesh.rank, mesh.world_size, self._copied):
                pass

    def _copied(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        content = self._content[name]
        return {path: content[path].copy_(tensor) for path, tensor in tensors.items()}


def _starts(written: Index) -> tuple[dict[tuple[str, str], tuple[int, torch.dtype, tuple[int, ...]]], int]:
    """Return each tensor's offset in bytes, dtype and shape by (file, path), and the total bytes."""
    found, end = {}, 0
    for tensors in written.values():
        for path, entry in tensors.items():
            dtype = getattr(torch, entry["dtype"])
            for name, ranges in entry["files"].items():
                shape = TensorSlice.from_json(entry["shape"], ranges).local_shape
                found[name, path] = end, dtype, shape
                end += -(-math.prod(shape) * dtype.itemsize // LINE_BYTES) * LINE_BYTES
    return found, end
