"""Data parallelism: every rank holds the whole model and computes its own grains.

Fast: gradients of fused microbatches, summed by the native all-reduce while the backward runs. Exact: a gradient a
grain, summed in the fixed tree; bit-identical on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.fixed_tree import TreeSum, evaluate
from shoal.mesh import Mesh
from shoal.microbatch import Microbatch
from shoal.strategies.base import NUM_SUMS, Flags, StepSums, Strategy
from shoal.strategies.buckets import GradientBuckets

Mark = Callable[[str], None]


class DataParallel(Strategy):
    """Fast mode. `mark` is told when the step waits for communication."""

    def __init__(self, parameters: Sequence[Tensor], mesh: Mesh, reduce: torch.dtype, mark: Mark) -> None:
        self._mesh, self._mark = mesh, mark
        self._buckets = GradientBuckets(parameters, reduce, mesh.world_size)
        self._sums: Tensor | None = None
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """No gradients, no sums."""
        self._buckets.begin()
        self._sums, self._work = None, None

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        """Adds a microbatch; the last one's backward overlaps with the sums on their way."""
        self._sums = sums if self._sums is None else self._sums.add_(sums)
        if last:
            self._send(self._sums)
            self._buckets.arm()
        run_backward(total)

    def _send(self, sums: Tensor) -> None:
        # Before the buckets on every rank, so that collectives match.
        self._sums = sums
        if self._mesh.world_size > 1:
            self._work = dist.all_reduce(sums, async_op=True)

    def finish(self, flags: Flags, num_sums: int) -> StepSums:
        """Waits for the sums and the gradients. Collective: all ranks; 8 * num_sums bytes and the gradients' own."""
        self._mark("exposed_communication")
        if self._work is None:
            sums = self._sums if self._sums is not None else torch.zeros(num_sums, dtype=torch.float64)
            self._send(sums.to(self._mesh.device))
        flags = self._buckets.finish(flags)
        if self._work is not None:
            self._work.wait()
        assert self._sums is not None
        return StepSums(self._sums.cpu().numpy(), flags)

    def close(self) -> None:
        """Takes the hooks off."""
        self._buckets.close()


class ExactDataParallel(Strategy):
    """Exact mode: one grain a microbatch; its gradient is a flat vector in the reduce dtype."""

    def __init__(
        self, parameters: Sequence[Tensor], mesh: Mesh, reduce: torch.dtype, num_grains: int, mark: Mark
    ) -> None:
        self._parameters, self._mesh, self._num_grains, self._mark = list(parameters), mesh, num_grains, mark
        length = sum(p.numel() for p in self._parameters)
        self._like = torch.empty(length, dtype=reduce, device=mesh.device)
        self._tree = TreeSum(self._num_grains, self._like)
        self.begin()

    def begin(self) -> None:
        """No gradients, no sums."""
        self._tree.clear()
        self._rows: dict[int, Tensor] = {}
        self._used = torch.zeros(len(self._parameters), dtype=torch.float64)
        self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        """Adds one grain."""
        run_backward(total)
        grain = microbatch.grains[0].index
        flat = self._tree.empty()
        for i, (parameter, part) in enumerate(
            zip(self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True)
        ):
            if parameter.grad is None:
                part.zero_()
                continue
            self._used[i] = 1.0
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            part.view_as(parameter).copy_(gradient)
        self._clear()
        self._tree.add(grain, flat)
        self._rows[grain] = sums

    def finish(self, flags: Flags, num_sums: int) -> StepSums:
        """The sums by the tree. Collective: all ranks; two all-reduces of the grains' sums, then the tree's own."""
        self._mark("exposed_communication")
        table = torch.zeros(self._num_grains, num_sums + 1, dtype=torch.float64)
        for grain, row in self._rows.items():
            table[grain, 0] = self._mesh.rank + 1
            table[grain, 1 : 1 + len(row)] = row.cpu()
        status = torch.cat([torch.tensor([flags.errors, flags.redo], dtype=torch.float64), self._used])
        if self._mesh.world_size > 1:
            # Each row has one writer and is zero elsewhere: this sum only moves values and changes no bit of them.
            dist.all_reduce(table)
            dist.all_reduce(status)
        flags = Flags(int(status[0]), int(status[1]))
        holders = [torch.nonzero(table[:, 0] == rank + 1).flatten().tolist() for rank in range(self._mesh.world_size)]
        present = {(g, g + 1): table[g, 1:] for held in holders for g in held}
        total = evaluate(present, self._num_grains, torch.Tensor.add)
        sums = torch.zeros(max(num_sums, NUM_SUMS), dtype=torch.float64) if total is None else total
        if not flags.errors and not flags.redo:
            self._assign(self._tree.total(holders, self._mesh.rank), status[2:])
        return StepSums(sums.numpy(), flags)

    def _assign(self, flat: Tensor, used: Tensor) -> None:
        parts = flat.split([p.numel() for p in self._parameters])
        for parameter, part, is_used in zip(self._parameters, parts, used.tolist(), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if is_used else None

    def close(self) -> None:
        """Holds no hooks."""


def run_backward(total: Tensor) -> None:
    """total.backward() by the engine's own entry.

    torch.autograd.backward is itself dispatched to an active TorchFunctionMode, which is off while it handles a call;
    recomputation in the backward needs the mode (see randomness.py) in force.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (total,), (torch.ones_like(total),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
