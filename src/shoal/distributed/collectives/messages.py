"""Point-to-point messages between the ranks of a group, by torch.distributed, and the errors of failed ones."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.base import DTYPES, OPERATIONS, Handle, Operation, Team, Threaded, check, check_parts
from shoal.distributed.collectives.shared_memory.peers import has_ended
from shoal.distributed.collectives.shared_memory.region import exchanged, place_of_process
from shoal.errors import CollectiveError, PeerError
from shoal.plans.accounting.all_reduce import HEADER_BYTES

# How long a rank whose message failed looks for the one that died.
_PATIENCE_SECONDS = 0.5
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


class Messages:
    """Point-to-point messages in a group of its own. Collective: all ranks of the run, new groups and an all-gather."""

    def __init__(self, team: Team, timeout: timedelta) -> None:
        self._group = team.new_group(team.parts, timeout)
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
                given=f"rank {before} calls {_describe(told.tolist())}",
                conflict=f"rank {self.rank} calls {_describe(own.tolist())}",
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
    """Base class of message-passing algorithms: collectives that an algorithm lacks are built from its others.

    A reduce-scatter is its all-reduce, of which each rank keeps its part; an all-gather a broadcast from each rank; a
    broadcast goes down a binomial tree, ceil(log2 P) messages at most.
    """

    def __init__(self, team: Team, timeout: timedelta) -> None:
        """Collective: all ranks of the run."""
        super().__init__(team.group)
        self._messages = Messages(team, timeout)

    def all_reduce(self, tensor: Tensor, op: Operation = "sum", *, asynchronous: bool = False) -> Handle:
        """In place; see the module for messages and bytes."""
        check("all_reduce", [tensor], op)

        def work() -> None:
            self._compare("all_reduce", tensor, op)
            self._reduce(tensor.view(-1), op)

        return self._start(work, asynchronous)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Operation = "sum", *, asynchronous: bool = False
    ) -> Handle:
        """`tensor` is left as it is."""
        check("reduce_scatter", [output, tensor], op)
        check_parts("reduce_scatter", tensor, output, self.world_size)

        def work() -> None:
            self._compare("reduce_scatter", tensor, op)
            self._scatter(output.view(-1), tensor.view(-1), op)

        return self._start(work, asynchronous)

    def all_gather(self, output: Tensor, tensor: Tensor, *, asynchronous: bool = False) -> Handle:
        """Moves bytes, adds nothing."""
        check("all_gather", [output, tensor])
        check_parts("all_gather", output, tensor, self.world_size)

        def work() -> None:
            self._compare("all_gather", tensor, "sum")
            parts = list(output.view(self.world_size, -1))
            parts[self.rank].copy_(tensor.view(-1))
            self._gather(parts)

        return self._start(work, asynchronous)

    def broadcast(self, tensor: Tensor, root: int = 0, *, asynchronous: bool = False) -> Handle:
        """Moves bytes, adds nothing."""
        check("broadcast", [tensor])

        def work() -> None:
            self._compare("broadcast", tensor, "sum", root)
            self._pass_on(tensor.view(-1), root)

        return self._start(work, asynchronous)

    def barrier(self) -> None:
        """An all-reduce of one number."""
        number = torch.zeros(1, dtype=torch.int32)

        def work() -> None:
            self._compare("barrier", number, "sum")
            self._reduce(number, "sum")

        self._start(work, asynchronous=False)

    def close(self) -> None:
        """Ends the thread and the group."""
        super().close()
        self._messages.close()

    def _compare(self, kind: str, tensor: Tensor, op: Operation, root: int = 0) -> None:
        if self.world_size > 1:
            numbers = _KINDS.index(kind), OPERATIONS.index(op), DTYPES.index(tensor.dtype), tensor.numel(), root
            self._messages.compare(list(numbers))

    def _reduce(self, flat: Tensor, op: Operation) -> None:
        """The all-reduce of a flat tensor, in place."""
        raise NotImplementedError

    def _scatter(self, output: Tensor, flat: Tensor, op: Operation) -> None:
        whole = flat.clone()
        self._reduce(whole, op)
        output.copy_(whole[self.rank * output.numel() : (self.rank + 1) * output.numel()])

    def _gather(self, parts: Sequence[Tensor]) -> None:
        for root, part in enumerate(parts):
            self._pass_on(part, root)

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


def _describe(header: list[int]) -> str:
    kind, op, dtype, numel = header[:4]
    if not 0 <= kind < len(_KINDS) or not 0 <= dtype < len(DTYPES):
        return "nothing known"
    name = f"{_KINDS[kind]} ({OPERATIONS[op]})" if "reduce" in _KINDS[kind] else _KINDS[kind]
    return f"{name} of {numel} elements of {str(DTYPES[dtype]).removeprefix('torch.')}"
