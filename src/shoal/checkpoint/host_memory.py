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
from shoal.distributed.collectives.shared_memory.region import SharedRegion, open_region
from shoal.distributed.collectives.shared_memory.staging import LINE_BYTES
from shoal.distributed.mesh import Mesh, together
from shoal.errors import LaunchError
from shoal.parallel.model.sharded_model import TensorSlice, TensorSlices

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

    def copied(self, tensors: Mapping[str, TensorSlices], written: Index) -> Content | None:
        """Return copies of the tensors of all ranks, valid until the next call; None without shared memory.

        The caller makes sure that no one still reads the previous snapshot.
        Raises: on every rank, if copying failed on any rank.
        Collective: all ranks, JSON gathers.
        """
        mesh = self._mesh
        if written != self._written:  # assign each tensor its place, and reallocate the memory if its size changed
            starts, end = dict[tuple[str, str], tuple[int, torch.dtype, tuple[int, ...]]](), 0
            for group in written.values():
                for path, entry in group.items():
                    dtype = getattr(torch, entry["dtype"])
                    for name, ranges in entry["files"].items():
                        shape = TensorSlice.from_json(entry["shape"], ranges).local_shape
                        starts[name, path] = end, dtype, shape
                        end += -(-math.prod(shape) * dtype.itemsize // LINE_BYTES) * LINE_BYTES
            self._written, self._content = written, {}
            if end != self._num_bytes:
                self._region, self._num_bytes = None, end
                with contextlib.suppress(LaunchError):  # every rank raises it together
                    self._region = open_region(mesh.gather_json, mesh.rank, mesh.world_size, -(-end // mesh.world_size))
                mesh.gather_json(None)  # wait: each rank zeroes a part of the memory that others write to
            if self._region is not None:
                everything = torch.frombuffer(self._region.memory, dtype=torch.uint8)
                for (name, path), (start, dtype, shape) in starts.items():
                    flat = everything[start : start + math.prod(shape) * dtype.itemsize]
                    self._content.setdefault(name, {})[path] = flat.view(dtype).view(shape)
        if self._region is None:
            return None
        together(mesh, lambda: self._copy(tensors))
        return self._content

    def _copy(self, tensors: Mapping[str, TensorSlices]) -> None:
        """Copy this rank's part into the shared memory."""

        def into_file(name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
            content = self._content[name]
            return {path: content[path].copy_(tensor) for path, tensor in own.items()}

        with torch.no_grad():
            for _ in share(tensors, self._written, self._mesh.rank, self._mesh.world_size, into_file):
                pass
