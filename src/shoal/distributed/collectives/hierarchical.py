"""Hierarchical all-reduce: shared memory inside each host, a ring among the hosts' first ranks, then inside again.

Messages between hosts: those of a ring among the hosts, sent by the first rank of each host; other ranks send none.
Bytes across a host's link: 2 N (H - 1) / H for H hosts, for any number of ranks a host. A flat ring sends as much for
every rank whose neighbour is on another host, and takes 2 (P - 1) steps instead of 2 (H - 1). This algorithm wins with
several ranks on each of several hosts. Large tensors are sent in pieces, each with a ring's messages, two pieces at a
time. Sums over a host are in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Handle, Operation, Team, Threaded
from shoal.distributed.collectives.messages import Ring
from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory
from shoal.distributed.collectives.shared_memory.region import exchanged, place_of_process
from shoal.distributed.mesh import new_group

# While a piece crosses the link, the host sums the next, and two pieces overlap their latencies. Pieces of 4 MB
# took 51 ms instead of 46 for 4 MB over 1 Gbit/s, and 183 instead of 176 for 16 MB (benchmarks/two_hosts.py).
PIECE_BYTES = 1 << 20
_NUM_RINGS = 2


class Hierarchical(Threaded):
    """Collectives in two levels. Collective: all ranks of the run, new groups and an all-gather of a few numbers."""

    name = "hierarchical"

    def __init__(self, team: Team, timeout: timedelta) -> None:
        super().__init__(team.group)
        try:  # a separate network namespace counts as a host, since its traffic crosses a link
            network = Path("/proc/self/ns/net").stat().st_ino
        except OSError:
            network = 0
        place = place_of_process()
        # If memory cannot be shared, every rank counts as a host.
        places = exchanged([*place, network] if place[0] else [0, dist.get_rank(), 0, 0])
        by_host = [places.index(place) for place in places]
        divided = [_divide(part, by_host) for part in team.parts]
        mine = next(hosts for hosts in divided if any(dist.get_rank() in host for host in hosts))
        order = sorted(rank for host in mine for rank in host)
        self.hosts = [[order.index(rank) for rank in host] for host in mine]
        self._place = next(n for n, host in enumerate(self.hosts) if self.rank in host)
        self._local: Collective | None = None
        self._across: list[Collective] = []
        within = [host for hosts in divided for host in hosts]
        local = new_group(within, timeout)
        if len(self.hosts[self._place]) > 1:
            self._local = SharedMemory(Team(local), timeout, by_host.count(by_host[dist.get_rank()]))
        # Every rank is in a part: a rank that leads no host is alone in its part.
        leaders = [[host[0] for host in hosts] for hosts in divided]
        across = [*leaders, *([rank] for host in within for rank in host[1:])]
        for _ in range(_NUM_RINGS):
            ring = Ring(Team(new_group(across, timeout), across), timeout)
            if self.rank == self.hosts[self._place][0] and len(self.hosts) > 1:
                self._across.append(ring)
            else:
                ring.close()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate in this rank's slot of its host's memory. Collective: the ranks of the host."""
        return super().allocate(numel, dtype) if self._local is None else self._local.allocate(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        if self._local is not None:
            self._local.release(tensor)

    def _reduce(self, flat: Tensor, op: Operation) -> None:
        """Sum within the host, across hosts, and broadcast within the host."""
        pieces = flat.split(PIECE_BYTES // flat.itemsize)
        crossing: list[Handle] = []
        for piece in pieces:
            if self._local is not None:
                self._local.all_reduce(piece, op)
            if self._across:
                ring = self._across[len(crossing) % _NUM_RINGS]
                crossing.append(ring.all_reduce(piece, op, asynchronous=True))
        for number, piece in enumerate(pieces):
            if crossing:
                crossing[number].wait()
            if self._local is not None and len(self.hosts) > 1:
                self._local.broadcast(piece, 0)

    def _pass_on(self, flat: Tensor, root: int) -> None:
        """Broadcast within the root's host, from its first rank to those of the other hosts, and within these hosts."""
        of = next(n for n, host in enumerate(self.hosts) if root in host)
        if self._local is not None and self._place == of:
            self._local.broadcast(flat, self.hosts[of].index(root))
        if self._across:
            self._across[0].broadcast(flat, of)
        if self._local is not None and self._place != of:
            self._local.broadcast(flat, 0)

    def close(self) -> None:
        super().close()
        for level in (self._local, *self._across):
            if level is not None:
                level.close()


def _divide(part: Sequence[int], by_host: Sequence[int]) -> list[list[int]]:
    """Group a group's ranks by host, with hosts in the order of their first ranks."""
    hosts: dict[int, list[int]] = {}
    for rank in part:
        hosts.setdefault(by_host[rank], []).append(rank)
    return list(hosts.values())
