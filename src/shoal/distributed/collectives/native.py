"""torch.distributed's own collectives: Gloo between CPUs and NCCL between GPUs.

Messages and bytes are those of the library: Gloo's all-reduce is a ring in segments. A few ranks gather a small tensor
and each adds it up, in one exchange instead of two. This is the baseline of every other algorithm.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Handle, Operation, Team
from shoal.plans.accounting.collectives import gathers

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _NativeWork:
    """Running collective of torch, with an optional sum that follows it."""

    def __init__(self, work: dist.Work | None, rows: Tensor | None = None, out: Tensor | None = None) -> None:
        self._work, self._rows, self._out = work, rows, out

    def wait(self) -> None:
        """Wait, and add the gathered rows in rank order, which gives the same bits on all ranks."""
        if self._work is not None:
            self._work.wait()
        if self._rows is not None and self._out is not None:
            torch.sum(self._rows, dim=0, out=self._out)
            self._rows = None


class Native(Collective):
    """torch.distributed's collectives; for tensors on GPUs, streams keep the order."""

    name = "native"

    def __init__(self, team: Team) -> None:
        super().__init__(team.group)
        self._gathered: dict[int, Tensor] = {}

    def release(self, tensor: Tensor) -> None:
        self._gathered.pop(tensor.data_ptr(), None)

    def buffers(self) -> list[Tensor]:
        return list(self._gathered.values())

    def all_reduce(self, tensor: Tensor, op: Operation = "sum", *, asynchronous: bool = False) -> Handle:
        """Reduce in place, by a gather if that is cheaper. A tensor at the same address reuses the gather's memory."""
        rows = self._gathered.get(tensor.data_ptr()) if op == "sum" else None
        if rows is not None and (rows.shape[1] != tensor.numel() or rows.dtype != tensor.dtype):
            rows = None
        is_sum = op == "sum" and tensor.is_floating_point()
        if rows is None and is_sum and gathers(tensor.nbytes, self.world_size, tensor.is_cpu):
            rows = self._gathered[tensor.data_ptr()] = tensor.new_empty(self.world_size, tensor.numel())
        if rows is not None:
            work = dist.all_gather(list(rows.unbind()), tensor.view(-1), group=self.group, async_op=True)
            return self._begun(_NativeWork(work, rows, tensor.view(-1)), asynchronous)
        work = dist.all_reduce(tensor, _REDUCTIONS[op], group=self.group, async_op=True)
        return self._begun(_NativeWork(work), asynchronous)

    def all_gather(self, output: Tensor, tensor: Tensor, *, asynchronous: bool = False) -> Handle:
        rows = list(output.view(self.world_size, -1).unbind())
        work = dist.all_gather(rows, tensor.view(-1), group=self.group, async_op=True)
        return self._begun(_NativeWork(work), asynchronous)

    def broadcast(self, tensor: Tensor, root: int = 0, *, asynchronous: bool = False) -> Handle:
        work = dist.broadcast(tensor, group=self.group, group_src=root, async_op=True)
        return self._begun(_NativeWork(work), asynchronous)

    @staticmethod
    def _begun(work: _NativeWork, asynchronous: bool) -> Handle:
        if not asynchronous:
            work.wait()
        return work
