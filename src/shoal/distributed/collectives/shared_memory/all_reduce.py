"""Shared-memory all-reduce: the ranks of one host reduce each other's tensors in place.

A rank posts every call: its data are ready, and its header describes it. The rank does its part of the work once all
ranks have posted: at its next call, or in `wait`. There are three methods, by the place and the size of the data:

- in a tensor from `allocate`: each rank reduces its part of all slots and writes it to all slots, without other copies;
- elsewhere and small: copied to a mailbox, and every rank reduces all mailboxes, with one exchange of words;
- elsewhere and large: in pieces through two small staging areas a rank, which stay in the cache.

Values are combined in rank order, so late ranks do not change the bits. All is plain torch on mapped memory. Messages:
none. Bytes that a rank writes, for tensors of N bytes: N in the first method, 2N in the third. It wins if all ranks are
on one host and the tensors are on the CPU.
"""

from __future__ import annotations

import functools
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from shoal.distributed.collectives.base import (
    KINDS,
    Collective,
    Handle,
    Operation,
    Team,
    call_in_words,
    call_numbers,
    check,
    check_parts,
)
from shoal.distributed.collectives.shared_memory.peers import FINISHED, NUM_HEADERS, POSTED, Peers
from shoal.distributed.collectives.shared_memory.region import SharedRegion, exchanged, open_region, place_of_process
from shoal.distributed.collectives.shared_memory.staging import CONTROL_BYTES, MAX_CACHED, ONE_SHOT_BYTES, Workplace
from shoal.errors import LaunchError

_MAILBOX, _STAGED = 0, 1  # where the data are; numbers of allocated regions start at 2
_HEADER = struct.Struct("<8q")
_Work = Callable[[int], None]  # receives the number of the call


@dataclass
class _SharedCall:
    """One collective of this rank: `deliver` writes the data, `work` does this rank's part. It is its own handle."""

    header: bytes
    deliver: _Work
    work: _Work
    settles: bool  # whether it ends only when all ranks have done their parts
    number: int = 0
    queue: CallQueue | None = None

    @property
    def staged(self) -> bool:
        """True if the data go through the staging areas."""
        return bool(_HEADER.unpack(self.header)[4] == _STAGED)

    def wait(self) -> None:
        """Finish this call and all calls before it."""
        assert self.queue is not None, "the call was posted"
        self.queue.complete(self)


class CallQueue:
    """Calls of this rank in their order: each is posted, then worked on once the other ranks have posted it too."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._posted = self._finished = 0  # numbers of this rank's last posted and last finished call
        self._queue: deque[_SharedCall] = deque()  # posted and unfinished
        self._backlog: deque[_SharedCall] = deque()  # not yet posted

    def call(self, call: _SharedCall, asynchronous: bool) -> Handle:
        """Post a call, and finish it unless it is asynchronous."""
        call.queue = self
        self._backlog.append(call)
        self._post()
        if asynchronous:
            self._work_on_ready()
        else:
            self.complete(call)
        return call

    def _post(self) -> None:
        """Post calls while there is room: call n reuses the place of call n - NUM_HEADERS once all have ended it."""
        while self._backlog:
            number = self._posted + 1
            reused = number - NUM_HEADERS
            if reused > 0 and (self._finished < reused or not self._peers.reached(FINISHED, reused)):
                return
            call = self._backlog.popleft()
            call.number = number
            call.deliver(number)
            self._peers.write_header(number, call.header)
            self._posted = number
            self._queue.append(call)
            self._peers.publish(POSTED, number)

    def complete(self, call: _SharedCall) -> None:
        """Finish a call and all calls before it."""
        while not call.number:  # it waits for room
            if self._queue:
                self._work_on_next()
            else:
                oldest = self._posted + 1 - NUM_HEADERS
                self._peers.wait(FINISHED, oldest, lambda: _describe(call.header))
            self._post()
        while self._finished < call.number:
            self._work_on_next()
        self._work_on_ready()  # before this rank waits for the others
        self._post()
        if call.settles:
            self._peers.wait(FINISHED, call.number, lambda: _describe(call.header))

    def _work_on_ready(self) -> None:
        """Do this rank's part of all calls that the others have posted too, without a wait, while data are cached.

        Staged calls are excluded, since each of their pieces waits for the others.
        """
        while self._queue and not self._queue[0].staged and self._peers.reached(POSTED, self._finished + 1):
            self._work_on_next()

    def _work_on_next(self) -> None:
        """Do this rank's part of the oldest unfinished call."""
        peers = self._peers
        call = self._queue[0]
        number = call.number
        peers.wait(POSTED, number, lambda: f"{_describe(call.header)}, call {number} of this group")
        peers.check_headers(number, call.header, _describe)
        call.work(number)
        self._queue.popleft()
        self._finished = number
        peers.publish(FINISHED, number)

    def settle(self) -> None:
        """Finish all calls, before the ranks communicate in another way. Collective: as the calls."""
        while self._queue or self._backlog:
            self.complete((self._backlog or self._queue)[-1])


class SharedMemory(Collective):
    """Collectives through memory that all ranks of the group map. Collective: an all-gather of a few numbers, twice."""

    name = "shared_memory"

    def __init__(self, team: Team, timeout: timedelta, num_here: int = 0, *, one_sum: bool = False) -> None:
        """Map the memory of the group.

        Args:
            team: the ranks, all on this host.
            timeout: how long a rank waits for others in one collective.
            num_here: as for `Peers`.
            one_sum: whether only the first rank's memory, which `sum_of` returns, gets the sum of allocated tensors.

        Raises:
            LaunchError: on every rank, if the ranks are on several hosts or cannot map each other's memory.
        """
        super().__init__(team.group)
        self._one_sum = one_sum
        self._exchange = functools.partial(exchanged, group=self.group)
        processes = self._exchange([*place_of_process(), os.getpid()])
        places = [row[:3] for row in processes]
        others = apart(places)
        if others:
            here = "rank 0's host or container" if places[0][0] else "a Linux host with futexes and memfd_create"
            raise LaunchError(
                given=f'all_reduce = "shared_memory" among {len(places)} ranks',
                conflict=f"rank {', '.join(map(str, others))} is not on {here}, where memory could be shared",
                remedy='use "hierarchical" across hosts, or "native"',
            )
        self._control = open_region(self._exchange, self.rank, self.world_size, CONTROL_BYTES)
        self._peers = Peers(self._control, self.rank, [row[3] for row in processes], timeout, num_here)
        self._regions: dict[int, tuple[int, SharedRegion]] = {}
        self._known: dict[tuple[int, int, torch.dtype, str], tuple[bytes, _Work, _Work]] = {}
        self._num_regions = _STAGED + 1
        self.calls = CallQueue(self._peers)
        self._work = Workplace(self._control, self._peers, self.rank, self.world_size)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in this rank's slot of new memory. `all_reduce` of the tensor, or of a part, copies nothing.

        If one rank calls with a part of it, all ranks must use the same part. An `output` must be elsewhere, or be this
        rank's part of its own slot. Collective: two all-gathers of a few numbers, also between unfinished calls.
        """
        region = open_region(self._exchange, self.rank, self.world_size, numel * dtype.itemsize)
        tensor = region.own(self.rank, numel, dtype)
        self._regions[tensor.untyped_storage().data_ptr()] = self._num_regions, region
        self._num_regions += 1
        return tensor

    def sum_of(self, tensor: Tensor) -> Tensor:
        if not self._one_sum:
            return tensor
        _, region = self._regions[tensor.untyped_storage().data_ptr()]
        return region.own(0, tensor.numel(), tensor.dtype)

    def slots_like(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's memory of an allocation, given this rank's `tensor`."""
        _, region = self._regions[tensor.untyped_storage().data_ptr()]
        return [region.tensor(r, 0, tensor.numel(), tensor.dtype) for r in range(self.world_size)]

    def release(self, tensor: Tensor) -> None:
        """Release the memory, which is freed together with the tensor. Not collective."""
        self._regions.pop(tensor.untyped_storage().data_ptr(), None)
        self._known.clear()
        self._work.forget()

    def all_reduce(self, tensor: Tensor, op: Operation = "sum", *, asynchronous: bool = False) -> Handle:
        # Every step repeats these calls, so their checks and headers are cached.
        key = tensor.data_ptr(), tensor.numel(), tensor.dtype, op
        known = self._known.get(key)
        if known is not None and tensor.is_contiguous():
            return self.calls.call(_SharedCall(*known, True), asynchronous)
        check("all_reduce", [tensor], op)
        place = self._place(tensor)
        if place is None and _is_small(tensor):
            call = _mailed(self._work, "all_reduce", tensor, [tensor], op=op)
        elif place is not None:
            where, region, offset = place
            header, like = _header("all_reduce", tensor, op, where, offset), tensor.detach()
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            everywhere = not self._one_sum
            self._known[key] = (
                header,
                _nothing,
                lambda _: self._work.reduce_slots(region, offset, like, op, everywhere=everywhere),
            )
            call = _SharedCall(*self._known[key], True)
        else:
            header = _header("all_reduce", tensor, op, _STAGED, 0)
            call = _SharedCall(header, _nothing, lambda _: self._work.reduce_staged(tensor, op), False)
        return self.calls.call(call, asynchronous)

    def reduce_scatter(
        self, output: Tensor, parts: Sequence[Tensor], op: Operation = "sum", *, asynchronous: bool = False
    ) -> Handle:
        """Set `output` to the sum of all ranks' `parts[rank]`; the parts, one for each rank, have its length."""
        check("reduce_scatter", [output, *parts], op)
        out, own, numel = output.view(-1), [part.view(-1) for part in parts], output.numel()
        small = numel * self.world_size * output.itemsize <= ONE_SHOT_BYTES
        header = _header("reduce_scatter", output, op, _MAILBOX if small else _STAGED, 0, times=len(own))
        if not small:
            call = _SharedCall(header, _nothing, lambda _: self._work.scatter_staged(out, own, op), False)
            return self.calls.call(call, asynchronous)

        def boxes(number: int) -> list[list[Tensor]]:
            mailboxes = self._work.mailboxes(number, numel * len(own), output.dtype)
            return [list(box.view(len(own), numel).unbind()) for box in mailboxes]

        def deliver(number: int) -> None:
            for place, part in zip(boxes(number)[self.rank], own, strict=True):
                place.copy_(part)

        def work(number: int) -> None:
            self._work.reduce([box[self.rank] for box in boxes(number)], out, op)

        return self.calls.call(_SharedCall(header, deliver, work, False), asynchronous)

    def all_gather(self, output: Tensor, tensor: Tensor, *, asynchronous: bool = False) -> Handle:
        """Gather: ranks read each other's allocated memory directly, and use staging areas for other tensors."""
        check("all_gather", [output, tensor])
        check_parts("all_gather", output, tensor, self.world_size)
        place = self._place(tensor)
        parts = output.view(self.world_size, tensor.numel()).unbind()
        if place is None:
            return self.gather_parts(parts, tensor, asynchronous=asynchronous)
        where, region, offset = place
        header = _header("all_gather", tensor, "sum", where, offset)
        slots = [region.tensor(r, offset, tensor.numel(), tensor.dtype) for r in range(self.world_size)]
        return self.calls.call(_SharedCall(header, _nothing, lambda _: _gather(slots, parts), True), asynchronous)

    def gather_parts(self, parts: Sequence[Tensor], tensor: Tensor, *, asynchronous: bool = False) -> Handle:
        """Gather into tensors that need not be adjacent; this rank's part may be its own input."""
        if _is_small(tensor):
            return self.calls.call(_mailed(self._work, "all_gather", tensor, parts), asynchronous)
        header = _header("all_gather", tensor, "sum", _STAGED, 0)
        flat = [part.view(-1) for part in parts]
        return self.calls.call(
            _SharedCall(header, _nothing, lambda _: self._work.gather_staged(flat, tensor), False), asynchronous
        )

    def broadcast(self, tensor: Tensor, root: int = 0, *, asynchronous: bool = False) -> Handle:
        """Broadcast: ranks read allocated memory of the root directly, and use its staging area for other tensors."""
        check("broadcast", [tensor])
        place = self._place(tensor)
        if place is None and _is_small(tensor):
            call = _mailed(self._work, "broadcast", tensor, [tensor], root=root)
        elif place is not None:
            where, region, offset = place
            header = _header("broadcast", tensor, "sum", where, offset, root)
            source = region.tensor(root, offset, tensor.numel(), tensor.dtype)
            work = _nothing if root == self.rank else lambda _: _gather([source], [tensor])
            call = _SharedCall(header, _nothing, work, True)
        else:
            header = _header("broadcast", tensor, "sum", _STAGED, 0, root)
            call = _SharedCall(header, _nothing, lambda _: self._work.broadcast_staged(tensor, root), False)
        return self.calls.call(call, asynchronous)

    def barrier(self) -> None:
        """Wait until every rank has called this, with one exchange of words."""
        self.calls.call(_SharedCall(_HEADER.pack(KINDS.index("barrier"), *[0] * 7), _nothing, _nothing, False), False)

    def close(self) -> None:
        self._peers.close()
        self._regions.clear()
        self._known.clear()
        self._work.forget()

    def _place(self, tensor: Tensor) -> tuple[int, SharedRegion, int] | None:
        """Return the number, region and byte offset of an allocated tensor; None for other tensors."""
        allocation = self._regions.get(tensor.untyped_storage().data_ptr())
        offset = allocation[1].offset_in(self.rank, tensor) if allocation else None
        return (*allocation, offset) if allocation is not None and offset is not None else None


def _mailed(
    space: Workplace, kind: str, tensor: Tensor, outputs: Sequence[Tensor], *, op: Operation = "sum", root: int = 0
) -> _SharedCall:
    """Return a call whose data fit in mailboxes; `outputs`: one for each rank in an all-gather, else one."""
    numel, dtype = tensor.numel(), tensor.dtype

    def deliver(number: int) -> None:
        if kind != "broadcast" or root == space.rank:
            space.mailboxes(number, numel, dtype)[space.rank].copy_(tensor.view(-1))

    def work(number: int) -> None:
        boxes = space.mailboxes(number, numel, dtype)
        if kind == "all_gather":
            _gather(boxes, outputs)
        elif kind == "broadcast":
            outputs[0].view(-1).copy_(boxes[root])
        else:
            space.reduce(boxes, outputs[0].view(-1), op)

    return _SharedCall(_header(kind, tensor, op, _MAILBOX, 0, root), deliver, work, settles=False)


def _header(kind: str, tensor: Tensor, op: Operation, where: int, *more: int, times: int = 1) -> bytes:
    """Encode a call on `times` tensors like `tensor`. `more`: the data's byte offset, and a broadcast's root."""
    return _HEADER.pack(*call_numbers(kind, tensor, op, times), where, *more, *[0] * (3 - len(more)))


def _is_small(tensor: Tensor) -> bool:
    """Return True if the tensor fits in a mailbox."""
    return tensor.numel() * tensor.itemsize <= ONE_SHOT_BYTES


def _nothing(number: int) -> None:
    """Do nothing, as the `deliver` or `work` of a call."""


def _gather(values: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for value, part in zip(values, parts, strict=True):
        part.view(-1).copy_(value)


def _describe(header: bytes) -> str:
    """Return a description of a call."""
    *call, where, offset, root, _ = _HEADER.unpack(header)
    place = {_MAILBOX: "", _STAGED: ""}.get(where, f" at byte {offset} of allocation {where - _STAGED}")
    return call_in_words(call) + place + (f" from rank {root}" if call[0] == KINDS.index("broadcast") else "")


def apart(places: list[list[int]]) -> list[int]:
    """Return the ranks of a group that cannot share memory with its first rank, given each rank's place."""
    return [r for r, place in enumerate(places) if place != places[0] or not place[0]]
