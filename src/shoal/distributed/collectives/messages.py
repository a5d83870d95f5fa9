"""Point-to-point messages between the ranks of a group, by torch.distributed, and the errors of failed ones."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.base import Operation, Team, Threaded, call_in_words, call_numbers
from shoal.distributed.collectives.shared_memory.peers import has_ended
from shoal.distributed.collectives.shared_memory.region import exchanged, place_of_process
from shoal.distributed.mesh import new_group
from shoal.errors import CollectiveError, PeerError
from shoal.plans.accounting.all_reduce import HEADER_BYTES

# How long a rank whose message failed looks for the one that died.
_PATIENCE_SECONDS = 0.5


class Messages:
    """Point-to-point messages in a group of its own. Collective: all ranks of the run, new groups and an all-gather."""

    def __init__(self, team: Team, timeout: timedelta) -> None:
        self._group = new_group(team.parts, timeout)
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._processes = exchanged([*place_of_process(), os.getpid()], self._group)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Message:
        """Starts to send; the tensor is left alone until the message has been waited for."""
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=tag) if tensor.numel() else None
        return Message(self, work, to)

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Message:
        """Starts to receive as many elements as the tensor has."""
        work = dist.irecv(tensor, group=self._group, group_src=source, tag=tag) if tensor.numel() else None
        return Message(self, work, source)

    def exchange(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        """Sends and receives at once."""
        with self.failures(f"rank {source}"):
            messages = self.send(out, to), self.receive(into, source)
        for message in messages:
            message.wait()

    def compare(self, header: list[int]) -> None:
        """Raises: CollectiveError where the rank before this one calls something else, said by `header`."""
        own = torch.tensor([*header, *[0] * (HEADER_BYTES // 8 - len(header))], dtype=torch.int64)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        told = torch.empty_like(own)
        self.exchange(own, after, told, before)
        if not torch.equal(own, told):
            raise CollectiveError(
                given=f"rank {before} calls {call_in_words(told.tolist())}",
                conflict=f"rank {self.rank} calls {call_in_words(own.tolist())}",
                remedy="call the same collective with the same shape and dtype on every rank, in the same order",
            )

    @contextlib.contextmanager
    def failures(self, who: str) -> Iterator[None]:
        """Names the culprit of what fails inside: a process of this host that is gone, or else `who`."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CollectiveError | PeerError):
                raise
            limit = time.monotonic() + _PATIENCE_SECONDS
            gone = self._gone()
            while not gone and time.monotonic() < limit:  # its sockets close before it has ended
                time.sleep(0.02)
                gone = self._gone()
            raise PeerError(
                given=", ".join(f"rank {r} (process {self._processes[r][3]})" for r in gone) or who,
                conflict=("it ended" if gone else "it did not answer")
                + f" while rank {self.rank} waited: {next(iter(str(error).splitlines()), '')[-200:]}",
                remedy="look at what that rank said; --resume goes on from the newest checkpoint",
            ) from error

    def _gone(self) -> list[int]:
        """Ranks of this host whose process has ended."""
        here = self._processes[self.rank][:3]
        return [
            r
            for r, process in enumerate(self._processes)
            if r != self.rank and process[:3] == here and has_ended(process[3])
        ]

    def close(self) -> None:
        """Ends the group."""
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # ended already, with all others
            dist.destroy_process_group(self._group)


class Message:
    """Handle of a message."""

    def __init__(self, messages: Messages, work: dist.Work | None, other: int) -> None:
        self._messages, self._work, self._other = messages, work, other

    def wait(self) -> None:
        """Raises: PeerError where the other side is gone or silent."""
        if self._work is not None:
            with self._messages.failures(f"rank {self._other}"):
                self._work.wait()


class ByMessages(Threaded):
    """Base class of message-passing algorithms. A broadcast takes ceil(log2 P) messages at most, as a binomial tree."""

    def __init__(self, team: Team, timeout: timedelta) -> None:
        """Collective: all ranks of the run."""
        super().__init__(team.group)
        self._messages = Messages(team, timeout)

    def close(self) -> None:
        super().close()
        self._messages.close()

    def _compare(self, kind: str, tensor: Tensor, op: Operation, root: int = 0) -> None:
        if self.world_size > 1:
            self._messages.compare([*call_numbers(kind, tensor, op), root])

    def _pass_on(self, flat: Tensor, root: int) -> None:
        """A broadcast: at distance d = 1, 2, 4, ... from the root those below d have it and send it d on."""
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
