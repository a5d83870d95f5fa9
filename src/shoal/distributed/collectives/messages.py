"""All-reduces by point-to-point messages of torch.distributed: ring, double binary tree, halving and doubling.

Each sum is computed on one rank, or from the same two numbers on both, so all ranks have the same bits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.base import Operation, Team, Threaded, call_in_words, call_numbers, combine
from shoal.distributed.collectives.shared_memory.peers import has_ended
from shoal.distributed.collectives.shared_memory.region import exchanged, place_of_process
from shoal.distributed.mesh import new_group
from shoal.errors import CollectiveError, PeerError
from shoal.plans.accounting.all_reduce import HEADER_BYTES, doubles, halving, place_in_tree, segments
from shoal.plans.accounting.collectives import cuts

# How long a rank whose message failed searches for the rank that died.
_PATIENCE_SECONDS = 0.5


class Messages:
    """Point-to-point messages in their own group. Collective: all ranks of the run, new groups and an all-gather."""

    def __init__(self, team: Team, timeout: timedelta) -> None:
        self._group = new_group(team.parts, timeout)
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._processes = exchanged([*place_of_process(), os.getpid()], self._group)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Message:
        """Start to send. The tensor must not change until `wait` of the message has returned."""
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=tag) if tensor.numel() else None
        return Message(self, work, to)

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Message:
        """Start to receive as many elements as the tensor has."""
        work = dist.irecv(tensor, group=self._group, group_src=source, tag=tag) if tensor.numel() else None
        return Message(self, work, source)

    def exchange(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send and receive at the same time."""
        with self.failures(f"rank {source}"):
            messages = self.send(out, to), self.receive(into, source)
        for message in messages:
            message.wait()

    def compare(self, header: list[int]) -> None:
        """Raise CollectiveError if the previous rank makes another call, described by `header`."""
        own = torch.tensor([*header, *[0] * (HEADER_BYTES // 8 - len(header))], dtype=torch.int64)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        other = torch.empty_like(own)
        self.exchange(own, after, other, before)
        if not torch.equal(own, other):
            raise CollectiveError(
                given=f"rank {before} calls {call_in_words(other.tolist())}",
                conflict=f"rank {self.rank} calls {call_in_words(own.tolist())}",
                remedy="call the same collective with the same shape and dtype on every rank, in the same order",
            )

    @contextlib.contextmanager
    def failures(self, who: str) -> Iterator[None]:
        """Convert errors in the context to a PeerError that names a dead process of this host, or else `who`."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CollectiveError | PeerError):
                raise
            limit = time.monotonic() + _PATIENCE_SECONDS
            gone = self._gone()
            while not gone and time.monotonic() < limit:  # its sockets close before the process has ended
                time.sleep(0.02)
                gone = self._gone()
            raise PeerError(
                given=", ".join(f"rank {r} (process {self._processes[r][3]})" for r in gone) or who,
                conflict=("it ended" if gone else "it did not answer")
                + f" while rank {self.rank} waited: {next(iter(str(error).splitlines()), '')[-200:]}",
                remedy="look at what that rank said; --resume goes on from the newest checkpoint",
            ) from error

    def _gone(self) -> list[int]:
        """Return the ranks of this host whose process has ended."""
        here = self._processes[self.rank][:3]
        return [
            r
            for r, process in enumerate(self._processes)
            if r != self.rank and process[:3] == here and has_ended(process[3])
        ]

    def close(self) -> None:
        """End the group."""
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # already ended with all other groups
            dist.destroy_process_group(self._group)


class Message:
    """Handle of a message."""

    def __init__(self, messages: Messages, work: dist.Work | None, other: int) -> None:
        self._messages, self._work, self._other = messages, work, other

    def wait(self) -> None:
        """Wait for the message. Raises: PeerError if the other side is gone or silent."""
        if self._work is not None:
            with self._messages.failures(f"rank {self._other}"):
                self._work.wait()


class ByMessages(Threaded):
    """Base class of message-passing algorithms. A broadcast is a binomial tree: a rank sends ceil(log2 P) at most."""

    def __init__(self, team: Team, timeout: timedelta) -> None:
        """Open the groups of the team. Collective: all ranks of the run."""
        super().__init__(team.group)
        self._messages = Messages(team, timeout)

    def close(self) -> None:
        super().close()
        self._messages.close()

    def _compare(self, kind: str, tensor: Tensor, op: Operation, root: int = 0) -> None:
        if self.world_size > 1:
            self._messages.compare([*call_numbers(kind, tensor, op), root])

    def _pass_on(self, flat: Tensor, root: int) -> None:
        """Broadcast: for distances d = 1, 2, 4, ... from the root, ranks below d send to the rank d further."""
        place = (self.rank - root) % self.world_size
        sent = []
        distance = 1
        while distance < self.world_size:
            if place < distance and place + distance < self.world_size:
                sent.append(self._messages.send(flat, (place + distance + root) % self.world_size))
            elif distance <= place < 2 * distance:
                self._messages.receive(flat, (place - distance + root) % self.world_size).wait()
            distance *= 2
        for message in sent:
            message.wait()


class Ring(ByMessages):
    """Ring: each rank sends only to the next rank, in a reduce-scatter once around and an all-gather once around.

    Messages: 2 (P - 1) and a header. Bytes: 2 N (P - 1) / P, the minimum. It wins for large tensors between hosts with
    equal links; its latency grows with P. Sums are in ring order; 16-bit values are rounded at each hop.
    """

    name = "ring"

    def _reduce(self, flat: Tensor, op: Operation) -> None:
        places = cuts(flat.numel(), self.world_size)
        parts = [flat[places[p] : places[p + 1]] for p in range(self.world_size)]
        room = torch.empty_like(max(parts, key=len))
        for step in range(self.world_size - 1):
            out, into = parts[self._before(1 + step)], parts[self._before(2 + step)]
            arrived = room[: len(into)]
            self._shift(out, arrived)
            combine(op, arrived, into, into)
        self._gather(parts)

    def _gather(self, parts: Sequence[Tensor]) -> None:
        for step in range(self.world_size - 1):
            self._shift(parts[self._before(step)], parts[self._before(1 + step)])

    def _shift(self, out: Tensor, into: Tensor) -> None:
        self._messages.exchange(out, (self.rank + 1) % self.world_size, into, self._before(1))

    def _before(self, steps: int) -> int:
        return (self.rank - steps) % self.world_size


class Tree(ByMessages):
    """Double binary tree: one tree for each half of the tensor. Sums go up and the result goes down, in pieces.

    Messages: for each piece, one to the parent and one to each child. Bytes: at most 2 N a rank, and about N for a rank
    that is a leaf in both trees. It wins for small and medium tensors on many ranks: it takes 2 log2 P steps, a ring
    2 (P - 1).
    """

    name = "tree"

    def _reduce(self, flat: Tensor, op: Operation) -> None:
        if self.world_size == 1:
            return
        half = flat.numel() // 2
        pieces = [
            list(part.split(segments(part.numel(), part.itemsize))) if part.numel() else []
            for part in (flat[:half], flat[half:])
        ]
        most = max(map(len, pieces))
        rounds = [(tree, pieces[tree][n]) for n in range(most) for tree in (0, 1) if n < len(pieces[tree])]
        places = [place_in_tree(self.rank, self.world_size, tree) for tree in (0, 1)]
        # Tags by tree and direction, since one rank may be above another in both trees.
        up, down = (1, 3), (2, 4)
        for tree, piece in rounds:
            place = places[tree]
            rooms = [torch.empty_like(piece) for _ in place.children]
            arriving = [
                self._messages.receive(room, child, up[tree]) for room, child in zip(rooms, place.children, strict=True)
            ]
            for message, room in zip(arriving, rooms, strict=True):
                message.wait()
                combine(op, room, piece, piece)
            if place.parent is not None:
                # The parent's answer arrives in the same memory, so the send must complete first.
                self._messages.send(piece, place.parent, up[tree]).wait()
        sent: list[Message] = []
        for tree, piece in rounds:
            place = places[tree]
            if place.parent is not None:
                self._messages.receive(piece, place.parent, down[tree]).wait()
            sent += [self._messages.send(piece, child, down[tree]) for child in place.children]
        for message in sent:
            message.wait()


class RecursiveDoubling(ByMessages):
    """Recursive halving and doubling: partners exchange half of their common part, at half the distance each time.

    Messages: 2 log2 P. Bytes: 2 N (P - 1) / P for a power of two; else the ranks beyond it first fold into others, with
    N more bytes each. Small tensors are exchanged whole: log2 P messages of N. It wins for small tensors on a power of
    two of ranks.
    """

    name = "recursive_doubling"

    def _reduce(self, flat: Tensor, op: Operation) -> None:
        if self.world_size == 1:
            return
        way = halving(flat.numel(), self.rank, self.world_size)
        if way.folds_into is not None:
            self._messages.send(flat, way.folds_into).wait()
            self._messages.receive(flat, way.folds_into).wait()
            return
        room = torch.empty_like(flat)
        if way.folded is not None:
            self._messages.receive(room, way.folded).wait()
            combine(op, room, flat, flat)
        if doubles(flat.numel(), flat.itemsize):
            for step in way.exchanges:
                self._messages.exchange(flat, step.partner, room, step.partner)
                pair = (room, flat) if step.partner < self.rank else (flat, room)
                combine(op, *pair, flat)
        else:
            for step in way.exchanges:
                arrived, own = room[slice(*step.stays)], flat[slice(*step.stays)]
                self._messages.exchange(flat[slice(*step.sends)], step.partner, arrived, step.partner)
                combine(op, arrived, own, own)
            for step in reversed(way.exchanges):
                out, into = flat[slice(*step.stays)], flat[slice(*step.sends)]
                self._messages.exchange(out, step.partner, into, step.partner)
        if way.folded is not None:
            self._messages.send(flat, way.folded).wait()
