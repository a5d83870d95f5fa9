"""Gathers of tensors by sample in a user's loop, which are differentiable, and the ranks' meetings about them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.distributed.failures import as_shoal_error
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError
from shoal.numerics.operators import as_real, in_dtype, raw_bytes
from shoal.training.microbatch.global_loss import peer_failed


class Gathers:
    """Gathers of one loop, pass after pass.

    Each gather, and its backward, begins with a meeting. A pass ends with one, and a rank that has failed says so in
    the next meeting of the others, so that no rank waits in vain. A loop that gathers nothing meets in its first pass.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._is_used: bool | None = None  # unknown in the first pass
        self.begin()

    def begin(self) -> None:
        """Start a pass."""
        self._number, self._is_over, self._tensors = 0, False, list[Tensor]()

    def gather(self, tensor: Any, rows: int, count: int) -> Tensor:
        """Return the rows of all ranks. `rows`: samples of this rank's batch. `count`: number of its batches.

        Raises: JobError, PeerFailedError. Collective: all ranks.
        """
        if count != 1:
            raise JobError(
                given=f"step.gather() with {count} batches a rank",
                conflict="the loop computes one batch after the other, and the later ones have no outputs yet",
                remedy="use more devices, a smaller global_batch or fuse=True; or a Job(outputs=...), which computes "
                "outputs twice",
            )
        if self._is_used is False:
            raise JobError(
                given="a first step.gather() in a later step",
                conflict="the ranks agree in the first step whether they meet within steps",
                remedy="call it in each step from the first on",
            )
        if not isinstance(tensor, Tensor) or not tensor.ndim or tensor.size(0) != rows:
            shown = f"of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise JobError(
                given=f"step.gather() of a tensor {shown} for {rows} samples",
                conflict="the rows of all ranks are joined in the order of samples",
                remedy="give a tensor with the batch's samples as first dim",
            )
        self._number += 1
        if self._mesh.world_size == 1:
            return tensor
        layout = [str(tensor.dtype), list(tensor.shape[1:]), tensor.requires_grad]
        words = self.meet("gather", self._number, rows=rows, layout=layout)
        if any(word["layout"] != words[0]["layout"] for word in words):
            raise JobError(
                given=f"step.gather() of {layout} here, and of {[word['layout'] for word in words]} on the ranks",
                conflict="the rows of all ranks are joined in the order of samples",
                remedy="give the same tensor on all ranks, padded to a fixed length",
            )
        whole: Tensor = _Gather.apply(tensor, self, self._number, [word["rows"] for word in words])  # type: ignore[no-untyped-call]
        if whole.requires_grad:
            self._tensors.append(whole)
        return whole

    def tied(self, total: Tensor) -> Tensor:
        """Return the total of a loss, whose backward passes through all gathers of the pass, as on the other ranks."""
        return _Tied.apply(total, *self._tensors) if self._tensors else total  # type: ignore[no-untyped-call]

    def end(self, *, failed: bool) -> None:
        """End the pass. Collective: all ranks, unless the loop gathers nothing or a meeting has failed."""
        if self._mesh.world_size == 1 or self._is_over or self._is_used is False:
            return
        self._is_over = True
        words = self._mesh.gather_json({"what": "failed" if failed else "end", "number": self._number})
        self._is_used = self._is_used or any(word["number"] for word in words)

    def meet(self, what: str, number: int, **said: Any) -> list[dict[str, Any]]:
        """Return the words of all ranks. Raises: PeerFailedError; JobError if ranks gather unequally."""
        try:
            words = self._mesh.gather_json({"what": what, "number": number, **said})
        except Exception as error:
            raise as_shoal_error(error) from error
        if len({(word["what"], word["number"]) for word in words}) == 1:
            return words
        self._is_over = self._is_used = True
        if any(word["what"] == "failed" for word in words):
            raise peer_failed()
        raise JobError(
            given="ranks that call step.gather() unequally often in a step, or have no batch in it",
            conflict="a gather needs the rows of all ranks",
            remedy="call it equally often for each batch; use no more devices than the last step has grains, or a "
            "length in whole batches",
        )

    def exchange(self, tensor: Tensor, sizes: list[int]) -> Tensor:
        """Return the rows of all ranks, of which a rank has as many as `sizes` say. Collective: all ranks."""
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        sent = raw_bytes(padded).cpu() if self._mesh.through_host else raw_bytes(padded)
        blocks = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(blocks, sent)
        width = math.prod(tensor.shape[1:]) * tensor.itemsize
        whole = torch.cat([block[: size * width] for block, size in zip(blocks, sizes, strict=True)])
        return whole.to(tensor.device).view(tensor.dtype).reshape(sum(sizes), *tensor.shape[1:])

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks. Collective: all ranks."""
        wide = as_real(tensor).contiguous()
        wide = wide.float() if wide.itemsize < torch.float32.itemsize else wide.clone()
        sent = wide.cpu() if self._mesh.through_host else wide
        dist.all_reduce(sent)
        return in_dtype(sent.to(tensor.device), tensor)

    def own(self, sizes: list[int]) -> slice:
        """Return this rank's rows."""
        stop = list(itertools.accumulate(sizes))[self._mesh.rank]
        return slice(stop - sizes[self._mesh.rank], stop)


class _Gather(torch.autograd.Function):
    """Rows of all ranks. The gradient of a row is the sum of its gradients on all ranks, and is divided by nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gathers: Gathers, number: int, sizes: list[int]) -> Tensor:
        """Return the rows of all ranks. Collective: all ranks."""
        ctx.known = gathers, number, sizes
        return gathers.exchange(tensor, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of this rank's rows. Collective: all ranks."""
        gathers, number, sizes = ctx.known
        gathers.meet("backward", number)
        return gathers.total(gradient)[gathers.own(sizes)], None, None, None


class _Tied(torch.autograd.Function):
    """A total that also depends on tensors, with a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *tensors: Tensor) -> Tensor:
        """Return a copy of the total."""
        ctx.save_for_backward(*tensors)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient by the total, and zeros."""
        return gradient, *map(torch.zeros_like, ctx.saved_tensors)
