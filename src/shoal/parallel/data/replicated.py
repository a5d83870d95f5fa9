"""Data parallelism: every rank has the whole model and computes its own grains.

Fast mode: gradients of fused microbatches, summed by the plan's all-reduce while the backward runs. Exact mode: one
gradient per grain, summed in the fixed tree, bit-identical on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.data.loader import Microbatch
from shoal.distributed.collectives.base import Collective, Team
from shoal.distributed.collectives.choose import open_collective
from shoal.distributed.collectives.fixed_tree import TreeSum, evaluate
from shoal.numerics import device_reads
from shoal.numerics.flat import as_real, in_dtype, views_of
from shoal.numerics.gradient_norm import norm_tensor
from shoal.parallel.backward import run_backward
from shoal.parallel.base import (
    NUM_SUMS,
    WEIGHT,
    AccumulatingStrategy,
    Flags,
    Mark,
    QueuedSums,
    StepSums,
    Strategy,
)
from shoal.parallel.data.buckets import GradientBuckets
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.parallel.shard.update_division import UpdateDivision
from shoal.plans.plan import Plan


class DataParallel(AccumulatingStrategy):
    """Data parallelism in fast mode. Collective: all ranks, to open the all-reduce algorithm."""

    begins_with_factor = True

    def __init__(
        self,
        model: ShardedModel,
        parameters: Sequence[Tensor],
        reduce: torch.dtype,
        mark: Mark,
        update_division: UpdateDivision | None = None,
        *,
        plan: Plan | None = None,
        collective: Collective | None = None,
    ) -> None:
        """Build the gradient buckets. `collective`: an open collective; by default the plan's algorithm is opened."""
        super().__init__(model, mark, update_division)
        plan, mesh = plan or Plan(), model.mesh
        if mesh.num_data_ranks > 1 and collective is None:
            parts = mesh.layout.groups("data", "shard") if mesh.replicas is not None else ()
            team = Team(mesh.replicas, [list(ranks) for ranks in parts])
            collective = open_collective(plan.collectives.all_reduce, team, mesh.device)
            if plan.collectives.compression != "none":
                from shoal.distributed.collectives.compression.compressed_sum import Compression

                self.compression = Compression(collective, plan.collectives.compression, plan.compression)
        self._factor, self._parameters = 1.0, list(parameters)
        # Whether the sums of several ranks travel with the gradients.
        self._in_buckets = reduce == torch.float32 and mesh.num_data_ranks == mesh.world_size
        self._nothing = torch.empty(0, device=mesh.device)
        self._buckets = GradientBuckets(parameters, reduce, mesh.num_data_ranks, collective, self.compression)

    def begin(self, step: int = 0, factor: float = 1.0) -> None:
        super().begin(step, factor)
        self._buckets.begin()
        self._sums = None
        self._factor = self._root = factor
        if self.compression is not None:
            self.compression.begin(step)

    def arm(self) -> None:
        if self.compression is not None and self._sums is not None:
            self.compression.arm(float(self._sums[WEIGHT]) * self._factor)
        self._buckets.arm()

    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Wait for the gradients. Sums and rows travel in the last bucket, or separately if its dtype is too narrow.

        Collective: all ranks; an all-reduce per bucket. The last bucket is longer by about ten numbers per rank.
        """
        sums = self._own_sums(num_sums)
        world_size = self._mesh.world_size
        if world_size == 1 or not self._in_buckets:
            flags, _ = self._buckets.finish(flags, self._nothing)
            if world_size > 1:
                return all_sums(sums, flags, self._mesh.device)
            if device_reads.waits(sums.device):  # the norm comes in the same copy
                norm = norm_tensor([p.grad for p in self._parameters if p.grad is not None])
                if norm is not None and norm.device == sums.device:
                    read = torch.cat([sums, norm.reshape(1)]).cpu().numpy()
                    return StepSums(read[:-1], flags, norm=float(read[-1]))
            return StepSums((sums if sums.is_cpu else sums.cpu()).numpy(), flags)
        flags, extras = self._buckets.finish(flags, self._extras(sums, row))
        cut = len(extras) - world_size * len(row)
        gathered = extras[cut:].view(world_size, len(row)).double().numpy()
        return StepSums(from_limbs(extras[:cut]).numpy(), flags, gathered, self._buckets.compared)

    def _extras(self, sums: Tensor, row: list[float]) -> Tensor:
        """Return what travels with the gradients: the sums, and a table with this rank's row."""
        device = self._mesh.device
        rows = torch.zeros(self._mesh.world_size, len(row))
        rows[self._mesh.rank] = torch.tensor(row)
        return torch.cat([to_limbs(sums.to(device)), device_reads.sent(rows.flatten(), device)])

    @property
    def queues(self) -> bool:
        return self.compression is None and self.update_division.queues

    def _queued_sum(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        sums, device = device_reads.sent(self._own_sums(num_sums), self._mesh.device), self._mesh.device
        world_size = self._mesh.world_size
        if world_size == 1 or not self._in_buckets:
            failures, _ = self._buckets.queue(flags, torch.empty(0, device=device))
            if world_size == 1:
                return QueuedSums(sums, failures, None)
            failures[-1] += self._num_odd()
            return QueuedSums(*queued_sums(sums, failures), None)
        failures, extras = self._buckets.queue(flags, self._extras(sums, row))
        cut = len(extras) - world_size * len(row)
        return QueuedSums(from_limbs(extras[:cut]), failures, extras[cut:].view(world_size, len(row)))

    def gradient_memory(self) -> tuple[list[Tensor], list[Tensor]]:
        return self._buckets.buffers(), self._buckets.borrowed()

    def close(self) -> None:
        self._buckets.close()


def all_sums(sums: Tensor, flags: Flags, device: torch.device) -> StepSums:
    """Return a step's sums and flags over all ranks, summed on the device. Collective: as `queued_sums`."""
    failures = torch.tensor([flags.errors, flags.redo], dtype=torch.float64)
    numbers = torch.cat(queued_sums(device_reads.sent(sums, device), device_reads.sent(failures, device))).cpu().numpy()
    return StepSums(numbers[:-2], Flags(int(numbers[-2]), int(numbers[-1])))


def queued_sums(sums: Tensor, failures: Tensor) -> tuple[Tensor, Tensor]:
    """Return a step's sums (float64) and failures over all ranks, on their device.

    Collective: all ranks, one all-reduce of float64 numbers.
    """
    numbers = torch.cat([sums, failures.double()])
    dist.all_reduce(numbers)
    return numbers[: len(sums)], numbers[len(sums) :]


class ExactDataParallel(Strategy):
    """Data parallelism in exact mode: one grain per microbatch, with a flat gradient in the reduce dtype.

    `tree`: sums over the grains of all ranks.
    """

    def __init__(
        self,
        model: ShardedModel,
        parameters: Sequence[Tensor],
        tree: TreeSum,
        mark: Mark,
        update_division: UpdateDivision | None = None,
    ) -> None:
        super().__init__(model, mark, update_division)
        self._parameters, self._tree = list(parameters), tree
        self._num_grains = tree.num_grains
        self.begin()

    def begin(self, step: int = 0, factor: float = 1.0) -> None:
        super().begin(step, factor)
        self._tree.clear()
        self._rows: dict[int, Tensor] = {}
        self._used = torch.zeros(len(self._parameters), dtype=torch.float64)
        self._known = [False] * len(self._parameters)
        self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        if total.requires_grad:  # else the grain has no weight
            run_backward(total)
        grain = microbatch.grains[0].index
        with torch._C.DisableTorchFunction():  # the grain's scope covers the model's operations only
            flat = self._tree.empty()  # the gradient, with zeros for parameters without one
            into, gradients = [], []
            for i, (parameter, view) in enumerate(zip(self._parameters, views_of(flat, self._parameters), strict=True)):
                if parameter.grad is None:
                    view.zero_()
                    continue
                into.append(view)
                gradients.append(as_real(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad))
                if not self._known[i]:
                    self._used[i], self._known[i] = 1.0, True
            if into:
                torch._foreach_copy_(into, gradients)
            self._tree.add(grain, flat)
        self._clear()
        self._rows[grain] = sums

    def add_buffers(self, microbatch: Microbatch, values: Tensor) -> None:
        if len(values):
            self._rows[microbatch.grains[0].index][NUM_SUMS:].add_(values)

    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Sum by the tree. Collective: all ranks; two all-reduces of the grains' sums, then those of the tree."""
        table = torch.zeros(self._num_grains, num_sums + 1, dtype=torch.float64)
        if self._rows:
            own, grains = torch.stack(list(self._rows.values())).cpu(), torch.tensor(list(self._rows))
            table[grains, 0] = self._mesh.rank + 1.0
            table[grains, 1 : 1 + own.shape[1]] = own
        status = torch.cat([torch.tensor([flags.errors, flags.redo], dtype=torch.float64), self._used])
        if self._mesh.world_size > 1:
            # Each row has one writer and is zero elsewhere: this sum moves values and changes no bit of them.
            self._tree.move(table)
            self._tree.move(status)
        flags = Flags(int(status[0]), int(status[1]))
        holders = [torch.nonzero(table[:, 0] == rank + 1).flatten().tolist() for rank in range(self._mesh.world_size)]
        present = {(g, g + 1): table[g, 1:] for grains_of_rank in holders for g in grains_of_rank}
        total = evaluate(present, self._num_grains, torch.Tensor.add)
        sums = torch.zeros(max(num_sums, NUM_SUMS), dtype=torch.float64) if total is None else total
        if not flags.errors and not flags.redo:
            views = views_of(self._tree.total(holders, self._mesh.rank), self._parameters)
            for parameter, view, is_used in zip(self._parameters, views, status[2:].tolist(), strict=True):
                parameter.grad = in_dtype(view, parameter) if is_used else None
        return StepSums(sums.numpy(), flags)

    def gradient_memory(self) -> tuple[list[Tensor], list[Tensor]]:
        return self._tree.buffers(), self._tree.borrowed()

    def close(self) -> None:
        self._tree.close()


# Base of the digits of whole numbers: sums of digits over up to 4096 ranks are exact in float32.
_BASE = 4096.0
_NUM_LIMBS = 4


def to_limbs(sums: Tensor) -> Tensor:
    """Convert a step's sums from float64 to float32 numbers that ranks can add up.

    The loss total and the buffers are rounded to float32, the dtype in which they were computed. Weight, samples and
    digest become four digits each: the highest is not limited, the lowest includes the fraction. Whole numbers are
    exact.
    """
    whole = sums[WEIGHT:NUM_SUMS]
    limbs = []
    for _ in range(_NUM_LIMBS - 1):
        high = torch.floor(whole / _BASE)
        limbs.append(whole - high * _BASE)
        whole = high
    return torch.cat([sums[:WEIGHT], *limbs, whole, sums[NUM_SUMS:]]).float()


def from_limbs(limbs: Tensor) -> Tensor:
    """Convert the output of `to_limbs` back to float64 sums."""
    limbs = limbs.double()
    count = NUM_SUMS - WEIGHT
    digits = limbs[WEIGHT : WEIGHT + _NUM_LIMBS * count].view(_NUM_LIMBS, count)
    whole = sum(
        (digits[i] * _BASE**i for i in range(_NUM_LIMBS)),
        start=torch.zeros(count, dtype=torch.float64, device=limbs.device),
    )
    return torch.cat([limbs[:WEIGHT], whole, limbs[WEIGHT + _NUM_LIMBS * count :]])
