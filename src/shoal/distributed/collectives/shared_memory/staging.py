"""Data movement of shared-memory collectives: mailboxes for small tensors, slots, and staging areas for all others.

Staged calls go piece by piece through each rank's two areas in turn. A rank reports the end of each phase of a piece.
Between the last read of an area and the next write to it there is one wait for that phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Operation, reduce_in_order
from shoal.distributed.collectives.shared_memory.peers import NUM_HEADERS, PAGE_BYTES, PHASE, Peers
from shoal.distributed.collectives.shared_memory.region import SharedRegion

ONE_SHOT_BYTES = 64 << 10
STAGE_BYTES = 1 << 20
# Reduced at once: two ranks' pieces fit in a core's L2 cache, and an operator's launch is a small share of the time.
CHUNK_BYTES = 256 << 10
# A rank's part begins at a cache line, so that no two ranks write to the same line.
LINE_BYTES = 64
# Not a power of two, with which all mailboxes would share a few cache sets.
_BOX_BYTES = ONE_SHOT_BYTES + 33 * LINE_BYTES
_STAGES = PAGE_BYTES + NUM_HEADERS * _BOX_BYTES
_RESULTS = _STAGES + 2 * STAGE_BYTES
CONTROL_BYTES = _RESULTS + 2 * STAGE_BYTES
MAX_CACHED = 4096


def cut(numel: int, itemsize: int, world_size: int) -> list[int]:
    """Return the bounds of the ranks' parts of `numel` elements: at cache lines, and as even as possible."""
    line = max(1, LINE_BYTES // itemsize)
    per = math.ceil(math.ceil(numel / world_size) / line) * line
    return [min(numel, part * per) for part in range(world_size + 1)]


class Workplace:
    """Memory and counters of a rank: the control region, the others' counters, and cached views."""

    def __init__(self, control: SharedRegion, peers: Peers, rank: int, world_size: int) -> None:
        self._control, self._peers, self.rank, self._world_size = control, peers, rank, world_size
        self._phase, self._turn = 0, 0
        self._wide = torch.empty(CHUNK_BYTES // 2, dtype=torch.float32) if world_size > 2 else None
        self._views: dict[tuple[object, ...], list[Tensor]] = {}
        self._chunks: dict[tuple[object, ...], list[list[Tensor]]] = {}

    def forget(self) -> None:
        """Drop all views, so that released memory is freed."""
        self._views.clear()
        self._chunks.clear()

    # ------------------------------------------------------------------------------------------------- mailboxes

    def mailboxes(self, number: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return every rank's mailbox of a call."""
        slot = number % NUM_HEADERS
        return self._at(PAGE_BYTES + slot * _BOX_BYTES, numel, dtype)

    def reduce(self, values: list[Tensor], out: Tensor, op: Operation) -> None:
        """Reduce the values in rank order into `out`, which is none of them or the first."""
        step = CHUNK_BYTES // out.itemsize
        if out.numel() <= step:
            reduce_in_order(op, values, out, self._wide)
            return
        for start in range(0, out.numel(), step):
            parts = [v[start : start + step] for v in values]
            reduce_in_order(op, parts, out[start : start + step], self._wide)

    # ----------------------------------------------------------------------------------------------------- slots

    def reduce_slots(
        self, region: SharedRegion, offset: int, like: Tensor, op: Operation, *, everywhere: bool = True
    ) -> None:
        """Combine this rank's part of all slots and write it to all slots, or to the first only."""
        key = (region.base, offset, like.numel(), like.dtype)
        chunks = self._chunks.get(key)
        if chunks is None:
            if len(self._chunks) >= MAX_CACHED:
                self._chunks.clear()
            cuts = cut(like.numel(), like.itemsize, self._world_size)
            begin, end = cuts[self.rank], cuts[self.rank + 1]
            whole = [region.tensor(r, offset, like.numel(), like.dtype)[begin:end] for r in range(self._world_size)]
            parts = [w.split(CHUNK_BYTES // like.itemsize) for w in whole] if end > begin else []
            chunks = self._chunks[key] = [list(chunk) for chunk in zip(*parts, strict=True)]
        for slots in chunks:
            first = slots[0]
            reduce_in_order(op, slots, first, self._wide)
            for slot in slots[1:] if everywhere else ():
                slot.copy_(first)

    # ------------------------------------------------------------------------------------------------- staged

    def _areas(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return every rank's area for the next piece, never the area of the previous piece, even of another call."""
        self._turn ^= 1
        return self._at(_STAGES + self._turn * STAGE_BYTES, numel, dtype)

    def _at(self, offset: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        key = (offset, numel, dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= MAX_CACHED:
                self._views.clear()
            views = [self._control.tensor(r, offset, numel, dtype) for r in range(self._world_size)]
            self._views[key] = views
        return views

    def _through(self, what: str) -> Callable[[], None]:
        """Publish that this rank has ended a phase. Return a function that waits until all ranks have."""
        self._phase += 1
        phase = self._phase
        self._peers.publish(PHASE, phase)
        return lambda: self._peers.wait(PHASE, phase, lambda: f"a piece of {what}")

    def reduce_staged(self, tensor: Tensor, op: Operation) -> None:
        """Reduce in place: write the others' parts, combine the own part and write it, read all parts.

        The next piece is written before the wait for the current sums.
        """
        pieces = list(tensor.view(-1).split(STAGE_BYTES // tensor.itemsize))
        following = self._put_parts(pieces[0])
        arrived = self._through("all_reduce")
        for number, piece in enumerate(pieces):
            arrived()
            areas, results = following
            cuts = cut(piece.numel(), piece.itemsize, self._world_size)
            begin, end = cuts[self.rank], cuts[self.rank + 1]
            values = [area[begin:end] for area in areas]
            values[self.rank], out = piece[begin:end], results[self.rank][begin:end]
            self.reduce(values, out, op)
            reduced = self._through("all_reduce")
            if number + 1 < len(pieces):
                following = self._put_parts(pieces[number + 1])
                arrived = self._through("all_reduce")
            piece[begin:end].copy_(out)
            reduced()
            for r, (a, b) in enumerate(pairwise(cuts)):
                if r != self.rank and b > a:
                    piece[a:b].copy_(results[r][a:b])

    def _put_parts(self, piece: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Write the other ranks' parts of a piece; return every rank's area for it, and for its result."""
        areas = self._areas(piece.numel(), piece.dtype)
        area = areas[self.rank]
        cuts = cut(piece.numel(), piece.itemsize, self._world_size)
        begin, end = cuts[self.rank], cuts[self.rank + 1]
        if begin:
            area[:begin].copy_(piece[:begin])
        if end < piece.numel():
            area[end:].copy_(piece[end:])
        return areas, self._at(_RESULTS + self._turn * STAGE_BYTES, piece.numel(), piece.dtype)

    def scatter_staged(self, output: Tensor, parts: Sequence[Tensor], op: Operation) -> None:
        """Reduce-scatter, in steps so small that all ranks' parts of one step fit in an area."""
        step = max(1, STAGE_BYTES // output.itemsize // self._world_size)
        for start in range(0, output.numel(), step):
            out = output[start : start + step]
            areas = self._areas(out.numel() * self._world_size, out.dtype)
            pieces = [part[start : start + step] for part in parts]
            for r, place in enumerate(areas[self.rank].split(out.numel())):
                if r != self.rank:
                    place.copy_(pieces[r])
            self._through("reduce_scatter")()
            values = [area.split(out.numel())[self.rank] for area in areas]
            values[self.rank] = pieces[self.rank]
            self.reduce(values, out, op)

    def gather_staged(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Gather: this rank's output is not copied if it is the input itself."""
        own = outputs[self.rank]
        is_there = own.data_ptr() == tensor.data_ptr()
        for start, piece in _pieces(tensor):
            areas = self._areas(piece.numel(), piece.dtype)
            areas[self.rank].copy_(piece)
            self._through("all_gather")()
            for r, area in enumerate(areas):
                if r != self.rank:
                    outputs[r][start : start + piece.numel()].copy_(area)
            if not is_there:
                own[start : start + piece.numel()].copy_(piece)

    def broadcast_staged(self, tensor: Tensor, root: int) -> None:
        """Broadcast from rank `root`."""
        for _, piece in _pieces(tensor):
            area = self._areas(piece.numel(), piece.dtype)[root]
            if self.rank == root:
                area.copy_(piece)
            self._through("broadcast")()
            if self.rank != root:
                piece.copy_(area)


def _pieces(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, piece) of a tensor in pieces of an area's size."""
    start = 0
    for piece in tensor.view(-1).split(STAGE_BYTES // tensor.itemsize):
        yield start, piece
        start += piece.numel()
