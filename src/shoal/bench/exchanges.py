"""Exchanges: collectives among all ranks, and sends between two, as probes whose work is the whole tensor's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from shoal.bench.probes import Call, Probe
from shoal.mesh import Mesh

_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)


def exchanges(mesh: Mesh, quick: bool) -> Iterator[Probe]:
    """Growing sizes of each kind. Collective: every rank makes and calls the same ones in the same order."""
    kinds: dict[str, Callable[[Mesh, int], Call]] = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "send": _send,
    }
    for kind, make in kinds.items():
        for size in _SIZES[::2] if quick else _SIZES:
            ranks = 2 if kind == "send" else mesh.world_size
            yield Probe(f"exchange.{kind}", float(size), _maker(make, mesh, size), graph=False, ranks=ranks)


def _maker(make: Callable[[Mesh, int], Call], mesh: Mesh, size: int) -> Callable[[], Call]:
    return lambda: make(mesh, size)


def _vector(mesh: Mesh, num_bytes: int) -> torch.Tensor:
    """Float32, of a number of elements that the ranks divide."""
    return torch.ones(max(1, num_bytes // 4 // mesh.world_size) * mesh.world_size, device=mesh.device)


def _all_reduce(mesh: Mesh, num_bytes: int) -> Call:
    tensor = _vector(mesh, num_bytes).zero_()
    return lambda: dist.all_reduce(tensor)


# torch renames these two: the new name where it is there.
_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_gather(mesh: Mesh, num_bytes: int) -> Call:
    whole = _vector(mesh, num_bytes)
    part = whole.chunk(mesh.world_size)[mesh.rank].clone()
    return lambda: _gather(whole, part)


def _reduce_scatter(mesh: Mesh, num_bytes: int) -> Call:
    whole = _vector(mesh, num_bytes).zero_()
    part = whole.chunk(mesh.world_size)[mesh.rank].clone()
    return lambda: _scatter(part, whole)


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
