"""torch.distributed process group of one host, with collectives through shared memory.

It serves callers of torch's collectives with tensors of their own: fully_shard and the layers of a tensor axis. Tensors
are copied in and out. Gloo is the fallback for other dtypes and reductions, non-contiguous tensors, all_to_all, and
messages between two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.distributed.collectives.base import DTYPES, OPERATIONS, Handle, Operation, Team, check_parts
from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory, apart
from shoal.distributed.collectives.shared_memory.region import places
from shoal.distributed.mesh import new_group
from shoal.distributed.traffic_meter import Listener

NAME = "shoal"


class SharedGroup(dist.ProcessGroup):
    """Process group with torch's method names; all calls go over Gloo until `open`.

    An asynchronous call progresses when this rank waits for it, for another call in this group, or for Gloo.

    Collectives through shared memory do not pass torch's dispatcher, which counts traffic, so they call `listeners`.
    Raises: as `SharedMemory` does, in the call or in its wait.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # the constructor that supports overrides
        gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        gloo._set_sequence_number_for_group()
        # A separate group: torch's `super()` methods of a Python group keep the interpreter's lock, for which Gloo's
        # threads wait while this thread waits for them. Both groups share one backend, and so one name.
        self._behind = dist.ProcessGroup(store, rank, world_size)
        for group in (self, self._behind):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._shared: SharedMemory | None = None
        self.listeners: list[Listener] = []

    def open(self, timeout: timedelta, num_here: int) -> None:
        """Map memory; `num_here` ranks of the run are on this host. Collective: a few all-gathers.

        Raises: LaunchError, on every rank, if the memory cannot be mapped.
        """
        self._shared = SharedMemory(Team(self), timeout, num_here)

    def shutdown(self) -> None:
        """Unmap the memory and shut down the group."""
        shared, self._shared = self._shared, None  # it refers to this group: this breaks the cycle
        if shared is not None:
            shared.close()
        self.listeners.clear()
        super().shutdown()

    # Calls that shared memory does not support go to Gloo. The parameters have torch's names.

    def _gloo(self) -> dist.ProcessGroup:
        """Return the Gloo group, after all calls in shared memory for which other ranks may wait."""
        if self._shared is not None:
            self._shared.calls.settle()
        return self._behind

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Reduce in place, one tensor after the other."""
        return self._reduced(tensors, opts) or self._gloo().allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Reduce in place, counted as one message, as in torch."""
        return self._reduced(tensors, opts) or self._gloo().allreduce_coalesced(tensors, opts)

    def _reduced(self, tensors: list[Tensor], opts: Any) -> dist.Work | None:
        op = _operation(opts)
        if self._shared is None or op is None or not _fit(tensors):
            return None
        self._tell("all_reduce", tensors)
        return _GroupWork([self._shared.all_reduce(t, op, asynchronous=opts.asyncOp) for t in _bare(tensors)])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Broadcast from one rank of the group."""
        if self._shared is None or not _fit(tensors):
            return self._gloo().broadcast(tensors, opts)
        self._tell("broadcast", tensors)
        return _GroupWork([self._shared.broadcast(t, opts.rootRank, asynchronous=opts.asyncOp) for t in _bare(tensors)])

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Gather into one tensor for each rank."""
        parts = output_tensors[0]
        if self._shared is None or not _fit([*input_tensors, *parts]) or not _alike([*input_tensors, *parts]):
            return self._gloo().allgather(output_tensors, input_tensors, opts)
        self._tell("all_gather", parts, input_tensors)
        (own,) = _bare(input_tensors)
        return _GroupWork([self._shared.gather_parts(_bare(parts), own, asynchronous=opts.asyncOp)])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:  # type: ignore[override]
        """Gather into one tensor."""
        return self._gathered([output], [input], opts) or self._gloo().all_gather_single(output, input, opts)

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Any:
        """Gather several tensors, counted as one message."""
        return self._gathered(outputs, inputs, opts) or self._gloo().all_gather_single_coalesced(outputs, inputs, opts)

    def _gathered(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work | None:
        if self._shared is None or not _fit([*outputs, *inputs]):
            return None
        self._tell("all_gather", outputs, inputs)
        pairs = zip(_bare(outputs), _bare(inputs), strict=True)
        return _GroupWork([self._shared.all_gather(whole, own, asynchronous=opts.asyncOp) for whole, own in pairs])

    def reduce_scatter(  # type: ignore[override]
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> Any:
        """Reduce-scatter from one tensor for each rank."""
        op, parts = _operation(opts), input_tensors[0]
        all_of_them = [*output_tensors, *parts]
        if self._shared is None or op is None or not _fit(all_of_them) or not _alike(all_of_them):
            return self._gloo().reduce_scatter(output_tensors, input_tensors, opts)
        self._tell("reduce_scatter", output_tensors, parts)
        (own,) = _bare(output_tensors)
        return _GroupWork([self._shared.reduce_scatter(own, _bare(parts), op, asynchronous=opts.asyncOp)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        """Reduce-scatter from one tensor."""
        return self._scattered([output], [input], opts) or self._gloo().reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Any:
        """Reduce-scatter several tensors, counted as one message."""
        work = self._scattered(outputs, inputs, opts)
        return work or self._gloo().reduce_scatter_single_coalesced(outputs, inputs, opts)

    def _scattered(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work | None:
        op = _operation(opts)
        if self._shared is None or op is None or not _fit([*outputs, *inputs]):
            return None
        self._tell("reduce_scatter", outputs, inputs)
        pairs = zip(_bare(outputs), _bare(inputs), strict=True)
        handles = []
        for part, whole in pairs:
            check_parts("reduce_scatter", whole, part, self._shared.world_size)
            parts = whole.view(self._shared.world_size, -1).unbind()
            handles.append(self._shared.reduce_scatter(part, parts, op, asynchronous=opts.asyncOp))
        return _GroupWork(handles)

    def barrier(self, opts: Any) -> Any:  # type: ignore[override]
        """Wait for all ranks, with one exchange of words."""
        if self._shared is None:
            return self._gloo().barrier(opts)
        self._tell("barrier", ())
        self._shared.barrier()
        return _GroupWork(())

    def all_to_all_single(self, *args: Any) -> Any:
        """Call Gloo."""
        return self._gloo().all_to_all_single(*args)

    def send(self, *args: Any) -> Any:
        """Call Gloo."""
        return self._gloo().send(*args)

    def recv(self, *args: Any) -> Any:
        """Call Gloo."""
        return self._gloo().recv(*args)

    def _tell(self, kind: str, first: Iterable[Tensor], second: Iterable[Tensor] = ()) -> None:
        for listener in self.listeners:
            listener(kind, self.group_name, list(first), list(second))


class _GroupWork(dist.Work):
    """torch's handle of running collectives; a wait for completed ones costs nothing."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        super().__init__()
        self._handles = handles

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all collectives, with the group's own time limit."""
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.wait()
        return True


def _operation(opts: Any) -> Operation | None:
    """Return shoal's name of the reduction. torch's equal reductions have different hashes."""
    return next((name for name in OPERATIONS if opts.reduceOp == getattr(dist.ReduceOp, name.upper())), None)


def _fit(tensors: Iterable[Tensor]) -> bool:
    """Return True if shared memory supports the tensors. The ranks agree if they pass the same kinds of tensors."""
    return all(t.dtype in DTYPES and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def _bare(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Detach the tensors, so that autograd does not record copies."""
    return [tensor.detach() for tensor in tensors]


def _alike(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(t.numel() == first.numel() and t.dtype == first.dtype for t in tensors)


def open_group(parts: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Open a new group of this rank's part: through shared memory if the part is on one host, else over Gloo.

    Raises: LaunchError, on every rank of a part on one host, if the ranks cannot map each other's memory.
    Collective: all ranks of the run, with the same `parts`.
    """
    dist.Backend.register_backend(NAME, SharedGroup, devices=["cpu"])
    group = new_group(parts, timeout, NAME)
    by_rank = places()
    if isinstance(group, SharedGroup) and group.size() > 1:
        own = [by_rank[rank] for rank in dist.get_process_group_ranks(group)]
        if not apart(own):
            group.open(timeout, by_rank.count(by_rank[dist.get_rank()]))
    return group
