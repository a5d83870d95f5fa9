"""Benchmarks of communication: collectives among all ranks and sends between two, by the whole tensor's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from shoal.distributed.collectives.base import Team
from shoal.distributed.collectives.choose import open_collective
from shoal.distributed.collectives.shared_memory.process_group import open_group
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, Mesh
from shoal.hardware.fastest_all_reduce import shares_memory
from shoal.hardware.values import SHARED_MEMORY
from shoal.planner.measure.probes import Call, Probe

_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
_MOST_SHARED = 1 << 26  # larger ones are as fast


def exchanges(mesh: Mesh, quick: bool) -> Iterator[Probe]:
    """Growing sizes of each kind. Collective: every rank makes and calls the same ones in the same order."""
    for kind, make in {**_COLLECTIVES, "send": _send}.items():
        for size in _SIZES[::2] if quick else _SIZES:
            ranks = 2 if kind == "send" else mesh.world_size
            yield Probe(f"exchange.{kind}", float(size), partial(make, mesh, size), graph=False, ranks=ranks)


def algorithms(mesh: Mesh, quick: bool) -> Iterator[Probe]:
    """All_reduces of shoal's own between processes that share memory. Collective, as `exchanges`."""
    if mesh.device.type != "cpu" or not shares_memory(mesh.world_size):
        return
    opened = open_collective(SHARED_MEMORY, Team(), mesh.device)

    def maker(size: int) -> Callable[[], Call]:
        def make() -> Call:
            tensor = opened.allocate(max(1, size // 4), torch.float32)
            return lambda: opened.all_reduce(tensor)

        return make

    for size in [size for size in _SIZES if size <= _MOST_SHARED][:: 2 if quick else 1]:
        yield Probe(f"algorithm.{SHARED_MEMORY}", float(size), maker(size), graph=False)


def process_group(mesh: Mesh, quick: bool) -> Iterator[Probe]:
    """Probes of torch's collectives through shared memory, on tensors of torch's own. Collective, as `exchanges`."""
    if mesh.device.type != "cpu" or not shares_memory(mesh.world_size):
        return
    group = open_group([range(mesh.world_size)], COLLECTIVE_TIMEOUT)
    for kind, make in _COLLECTIVES.items():
        for size in [size for size in _SIZES if size <= _MOST_SHARED][:: 2 if quick else 1]:
            yield Probe(f"group.{kind}", float(size), partial(make, mesh, size, group), graph=False)


def _vector(mesh: Mesh, num_bytes: int) -> torch.Tensor:
    """Float32, of a number of elements that the ranks divide."""
    return torch.ones(max(1, num_bytes // 4 // mesh.world_size) * mesh.world_size, device=mesh.device)


def _all_reduce(mesh: Mesh, num_bytes: int, group: dist.ProcessGroup | None = None) -> Call:
    tensor = _vector(mesh, num_bytes).zero_()
    return lambda: dist.all_reduce(tensor, group=group)


# torch renames these two: the new name where it is there.
_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_gather(mesh: Mesh, num_bytes: int, group: dist.ProcessGroup | None = None) -> Call:
    whole = _vector(mesh, num_bytes)
    part = whole.chunk(mesh.world_size)[mesh.rank].clone()
    return lambda: _gather(whole, part, group=group)


def _reduce_scatter(mesh: Mesh, num_bytes: int, group: dist.ProcessGroup | None = None) -> Call:
    whole = _vector(mesh, num_bytes).zero_()
    part = whole.chunk(mesh.world_size)[mesh.rank].clone()
    return lambda: _scatter(part, whole, group=group)


_COLLECTIVES: dict[str, Callable[..., Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _send(mesh: Mesh, num_bytes: int) -> Call:
    """There and back between ranks 0 and 1, while the others wait: two sends a call."""
    tensor = _vector(mesh, num_bytes)

    def call() -> None:
        if mesh.rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif mesh.rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return call
