"""Data parallelism: every rank has the whole model and computes its own grains.

Fast mode: gradients of fused microbatches in buckets, flat buffers. The plan's all-reduce of a bucket starts while the
backward still runs. Buckets use torch's post-accumulate hooks and an asynchronous all-reduce instead of the DDP
wrapper. A rank must be able to take part without a microbatch, with fewer microbatches than its peers, after an
exception, and with parameters that its loss did not use: see docs/decisions/0003-gradient-buckets.md.

Exact mode: one gradient per grain, summed in the fixed tree, bit-identical on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.data.loader import Microbatch
from shoal.distributed.collectives.base import Collective, Handle, Team
from shoal.distributed.collectives.choose import open_collective
from shoal.distributed.collectives.fixed_tree import TreeSum, evaluate
from shoal.distributed.mesh import NO_ROW
from shoal.numerics import device_reads
from shoal.numerics.gradient_norm import norm_tensor
from shoal.numerics.operators import as_real, in_dtype, real_numel, views_of
from shoal.parallel.base import (
    NO_FAILURES,
    NUM_SUMS,
    WEIGHT,
    AccumulatingStrategy,
    Flags,
    LateTerms,
    Mark,
    QueuedSums,
    StepSums,
    Strategy,
    run_backward,
)
from shoal.parallel.data.sparse_rows import SparseRows
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.parallel.shard.update_division import UpdateDivision
from shoal.plans.accounting.collectives import GLOO_BUCKET_BYTES, NCCL_BUCKET_BYTES, divide_into_buckets
from shoal.plans.plan import Plan

if TYPE_CHECKING:
    from shoal.distributed.collectives.compression.compressed_sum import Comparison, Compression
    from shoal.parallel.experts.gathered import ExpertGrains

_NUM_FLAGS = 2


@dataclass
class _Bucket:
    flat: Tensor
    summed: Tensor  # the sums over the ranks: `flat` itself, unless the collective has other memory for them
    members: list[int]  # indices of the parameters with gradients in this bucket
    pending: int = 0
    work: Handle | None = None


class GradientBuckets:
    """Gradients of one rank as views of flat buffers in the reduce dtype, in the order of the backward.

    After its gradients, the last buffer also carries the step's flags, which parameters had a gradient, and the
    caller's extra numbers. One more collective would cost as much as all others if processes outnumber idle cores.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        world_size: int,
        collective: Collective | None = None,
        compression: Compression | None = None,
    ) -> None:
        """Allocate the buffers and register the hooks.

        Args:
            parameters: parameters in the order of the model.
            dtype: the reduce dtype.
            world_size: number of ranks to sum over.
            collective: sums over the ranks and allocates the buffers; None for one rank.
            compression: sums the gradients instead, if given.

        Collective: if `collective` allocates for all ranks together.
        """
        self._parameters = list(parameters)
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._dtype, self._world_size, self._collective = dtype, world_size, collective
        self._compression = compression
        self.compared: Comparison | None = None  # of this step, if it was sampled
        self._buckets: list[_Bucket] = []
        self._place: dict[int, tuple[_Bucket, Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        self._num_extras = 0
        self._num_status = _NUM_FLAGS + len(self._parameters)
        # One process in one dtype has nothing to sum: autograd accumulates.
        self._plain = world_size == 1 and all(p.dtype == dtype for p in self._parameters)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        sizes = [real_numel(p) * dtype.itemsize for p in self._parameters]
        limit = GLOO_BUCKET_BYTES if device.type == "cpu" else NCCL_BUCKET_BYTES
        # Without parameters one bucket carries the flags.
        groups = [] if self._plain else divide_into_buckets(sizes, limit) or [[]]
        for number, group in enumerate(groups):
            extra = self._num_status if number == len(groups) - 1 else 0
            self._buckets.append(self._lay_out(list(group), extra, device))
            if compression is not None:
                compression.add(group, [tuple(self._place[i][1].shape) for i in group], device)
        self._fired = [0] * len(self._parameters)
        self._fired_before: list[int] | None = None
        # For each parameter, whether it had a gradient in the last finished step.
        self._usual: list[bool] = []
        self._used: list[bool] = []  # the same in this step: on this rank, and on any rank after `finish`
        self._gradients: list[Tensor | None] = []  # without buckets
        self.num_odd = 0  # parameters that differ from the last finished step, of one rank's last queued step
        self._constants = device_reads.Constants(device)
        self._armed = False
        self._open = False  # between begin and finish; outside, another strategy may use the same parameters
        self._launched = 0
        # False until a whole step has shown that each gradient is complete when its hook first fires. Under reentrant
        # checkpointing the hook of a shared parameter fires more than once.
        self._overlap = False
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._hook, i))
            for i, p in enumerate(self._parameters)
            if not self._plain
        ]

    def _lay_out(self, members: list[int], extra: int, device: torch.device) -> _Bucket:
        """Allocate a bucket with the gradients of its members as consecutive views, and `extra` numbers at its end."""
        own = [self._parameters[i] for i in members]
        length = sum(map(real_numel, own))
        if self._collective is not None and device.type == "cpu":
            flat = self._collective.allocate(length + extra, self._dtype)
            summed = self._collective.sum_of(flat)
        else:
            flat = summed = torch.zeros(length + extra, dtype=self._dtype, device=device)
        bucket = _Bucket(flat, summed, members)
        views, sums = views_of(flat[:length], own), views_of(summed[:length], own)
        self._place |= {i: (bucket, view) for i, view in zip(members, views, strict=True)}
        self._sums |= dict(zip(members, sums, strict=True))
        return bucket

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the flat buffers, with those of the collective and the compression, and the sums outside of them.

        Such sums are in another rank's memory, or in a second buffer of this rank.
        """
        others = [summing.buffers() for summing in (self._collective, self._compression) if summing is not None]
        own = [*(b.flat for b in self._buckets), *(tensor for tensors in others for tensor in tensors)]
        return own, [b.summed for b in self._buckets if b.summed is not b.flat]

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient after `finish` in the reduce dtype, even if `.grad` is narrower."""
        if self._plain or parameter.grad is None:
            return parameter.grad
        return self._sums[self._numbers[id(parameter)]]

    def begin(self) -> None:
        """Clear the gradients and start a step."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._plain:
            self._gradients = []
            return
        for bucket in self._buckets:
            bucket.pending, bucket.work = len(bucket.members), None
        self._fired = [0] * len(self._parameters)
        self._fired_before, self._armed, self._launched = None, False, 0
        self._open = True

    def arm(self) -> None:
        """Announce the last backward: from now on a bucket is sent when the hooks of all its parameters have fired."""
        if not self._plain:
            self._armed = self._overlap and self._world_size > 1
            self._fired_before = list(self._fired)

    def _hook(self, index: int, parameter: Tensor) -> None:
        if not self._open:
            return
        bucket, view = self._place[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = parameter.grad = gradient.to_dense()
        if gradient is None or self._dtype != parameter.dtype:  # narrow or complex: accumulate in the reduce dtype
            if gradient is not None:
                view.add_(as_real(gradient)) if self._fired[index] else view.copy_(as_real(gradient))
                parameter.grad = None
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view
        self._fired[index] += 1
        if self._armed:
            if self._fired_before and self._fired[index] > self._fired_before[index] + 1:
                raise RuntimeError("a gradient changed after its all-reduce began")
            bucket.pending -= 1
            # In the order of the buckets, not of the hooks: collectives must match across ranks. The last bucket waits
            # for the flags.
            while self._launched < len(self._buckets) - 1 and self._buckets[self._launched].pending == 0:
                self._launch()

    def _launch(self) -> None:
        assert self._collective is not None, "several ranks have something to sum with"
        bucket = self._buckets[self._launched]
        if self._compression is not None:
            bucket.work = self._compression.start(self._launched, bucket.flat)
        else:
            bucket.work = self._collective.all_reduce(bucket.flat, asynchronous=True)
        self._launched += 1

    def finish(self, flags: Flags, extras: Tensor) -> tuple[Flags, Tensor]:
        """Send the remaining buckets, wait for all, and give every used parameter its summed gradient.

        `extras`: float32 on the device; returned summed over the ranks, on the CPU.
        """
        tail = self._send(flags, extras)
        if tail is not None:
            status = tail.float().cpu()
            here, extras = status[: self._num_status].numpy(), status[self._num_status :]
            flags, self._used = Flags(int(here[0]), int(here[1])), (here[_NUM_FLAGS:] > 0).tolist()
            if self._compression is not None:
                unused = []  # bucket, start and stop of each parameter that no rank used
                for number, bucket in enumerate(self._buckets):
                    for view in (self._place[i][1] for i in bucket.members if not self._used[i]):
                        start = int(view.storage_offset()) - int(bucket.flat.storage_offset())
                        unused.append((number, start, start + view.numel()))
                self.compared = self._compression.settle([b.flat for b in self._buckets], unused)
        self._usual = self._used
        self._give(self._usual)
        return flags, extras if extras.is_cpu else extras.cpu()

    def queue(self, flags: Flags, extras: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same as `finish`, without waiting, for the parameters with a gradient in the last `finish`.

        Returns: [3] of flags and the number of parameters that differ from the last `finish`, and `extras`;
        both on the device.
        """
        tail = self._send(flags, extras)
        self._give(self._usual)
        if tail is None:
            self.num_odd = sum(a != b for a, b in zip(self._used, self._usual, strict=True))
            return self._constants[flags.errors, flags.redo, self.num_odd], extras
        tail = tail.float()
        used_there = tail[_NUM_FLAGS : self._num_status] > 0
        odd_there = (used_there != self._constants[tuple(self._usual)]).sum().float().reshape(1)
        return torch.cat([tail[:_NUM_FLAGS], odd_there]), tail[self._num_status :]

    def _send(self, flags: Flags, extras: Tensor) -> Tensor | None:
        """End the backwards of this rank, send the remaining buckets, and wait for all.

        Return the end of the last bucket, summed over the ranks: flags, which parameters were used, and `extras`; None
        for one rank. `_used` becomes which parameters have a gradient on this rank.
        """
        self._open = False
        if self._plain:
            # They stay until the next step: torch would wrap a gradient for Python again at each access.
            self._gradients = gradients = [parameter.grad for parameter in self._parameters]
            self._used = [gradient is not None for gradient in gradients]
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None and gradient.is_sparse:
                    parameter.grad = gradient.to_dense()
            return None
        for i in (i for bucket in self._buckets[self._launched :] for i in bucket.members):
            if not self._fired[i]:
                self._place[i][1].zero_()
        if self._fired_before is not None and not self._overlap:
            self._overlap = all(a <= b + 1 for a, b in zip(self._fired, self._fired_before, strict=True))
        self._used = [count > 0 for count in self._fired]
        if self._world_size == 1:
            return None
        last = self._buckets[-1]
        if extras.numel() != self._num_extras:  # make room at the end; collective as the constructor
            self._num_extras, before = extras.numel(), last
            last = self._lay_out(before.members, self._num_status + self._num_extras, before.flat.device)
            length = len(last.flat) - self._num_status - self._num_extras
            last.flat[:length] = before.flat[:length]
            if self._collective is not None:
                self._collective.release(before.flat)
            self._buckets[-1] = last
        tail = last.flat[-self._num_status - extras.numel() :]
        tail[: self._num_status] = self._constants[flags.errors, flags.redo, *self._used]
        tail[self._num_status :] = extras
        while self._launched < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
        return last.summed[-len(tail) :]

    def _give(self, used: Sequence[bool]) -> None:
        """Give each used parameter its gradient. Missing ones become zeros: that step will not be applied."""
        if self._plain:
            for parameter, is_used in zip(self._parameters, used, strict=True):
                if is_used != (parameter.grad is not None):
                    parameter.grad = torch.zeros_like(parameter) if is_used else None
            return
        for i, parameter in enumerate(self._parameters):
            own = self._sums[i]
            parameter.grad = (own if own.dtype == parameter.dtype else in_dtype(own, parameter)) if used[i] else None

    def close(self) -> None:
        """Remove the hooks and close the collective."""
        for handle in self._handles:
            handle.remove()
        if self._collective is not None:
            self._collective.close()


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
        sparse: SparseRows | None = None,
        expert_sums: GradientBuckets | None = None,
    ) -> None:
        """Build the gradient buckets. `collective`: an open collective; by default the plan's algorithm is opened.

        `sparse`: sums of further parameters' sparse gradients. `expert_sums`: sums of divided experts' gradients.
        """
        super().__init__(model, mark, update_division)
        plan, mesh = plan or Plan(), model.mesh
        if mesh.num_data_ranks > 1 and collective is None:
            parts = mesh.layout.groups("data", "shard") if mesh.replicas is not None else ()
            team = Team(mesh.replicas, [list(ranks) for ranks in parts])
            collective = open_collective(plan.collectives.all_reduce, team, mesh.device)
            if plan.collectives.compression != "none":
                from shoal.distributed.collectives.compression.compressed_sum import Compression

                self.compression = Compression(collective, plan.collectives.compression, plan.compression)
        self._factor: float | Tensor = 1.0
        self.is_alone = mesh.world_size == 1
        self._parameters = list(parameters)
        # Whether the sums of several ranks travel with the gradients.
        is_data_only = mesh.num_data_ranks == mesh.world_size and expert_sums is None
        self._in_buckets = reduce == torch.float32 and is_data_only
        self.expert_sums = expert_sums
        self.syncs_every_microbatch = bool(model.division.experts)  # ranks exchange tokens in each layer
        self._nothing = torch.empty(0, device=mesh.device)
        self._buckets = GradientBuckets(parameters, reduce, mesh.num_data_ranks, collective, self.compression)
        self._sparse_rows = sparse or SparseRows((), mesh, reduce)
        self.sparse = self._sparse_rows.parameters

    def begin(self, step: int = 0, factor: float | Tensor = 1.0) -> None:
        self.update_division.begin()
        self._sparse_rows.begin()
        self._buckets.begin()
        if self.expert_sums is not None:
            self.expert_sums.begin()
        self._sums = None
        self._factor = self._root = factor
        if self.compression is not None:
            self.compression.begin(step)

    def arm(self) -> None:
        if self.compression is not None and self._sums is not None:
            self.compression.step_unit = float(self._sums[WEIGHT]) * float(self._factor)
        self._buckets.arm()
        if self.expert_sums is not None:
            self.expert_sums.arm()

    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Wait for the gradients. Sums and rows travel in the last bucket, or separately if its dtype is too narrow.

        Collective: all ranks; an all-reduce per bucket. The last bucket is longer by about ten numbers per rank.
        """
        sums = torch.zeros(num_sums, dtype=torch.float64) if self._sums is None else self._sums
        world_size = self._mesh.world_size
        if world_size == 1 or not self._in_buckets:
            flags, _ = self._buckets.finish(flags, self._nothing)
            if self.expert_sums is not None:
                self.expert_sums.finish(NO_FAILURES, self._nothing)
            self._give_rows(flags)
            if world_size > 1:
                return all_sums(sums, flags, self._mesh.device)
            sums = sums.sums() if isinstance(sums, LateTerms) else sums
            if device_reads.waits(sums.device):  # the norm comes in the same copy
                norm = norm_tensor([p.grad for p in (*self._parameters, *self.sparse) if p.grad is not None])
                if norm is not None and norm.device == sums.device:
                    read = torch.cat([sums, norm.reshape(1)]).cpu().numpy()
                    return StepSums(read[:-1], flags, norm=float(read[-1]))
            return StepSums((sums if sums.is_cpu else sums.cpu()).numpy(), flags)
        flags, extras = self._buckets.finish(flags, self._extras(sums, row))
        self._give_rows(flags)
        cut = len(extras) - world_size * len(row)
        gathered = extras[cut:].view(world_size, len(row)).double().numpy()
        return StepSums(from_limbs(extras[:cut]).numpy(), flags, gathered, self._buckets.compared)

    def _give_rows(self, flags: Flags) -> None:
        """Sum the sparse gradients, unless a rank has failed. Collective: as `SparseRows.give`."""
        if flags == NO_FAILURES:
            self._sparse_rows.take(self._mesh.rank)
            self._sparse_rows.give(self._mesh.world_size)

    def _extras(self, sums: Tensor, row: list[float]) -> Tensor:
        """Return what travels with the gradients: the sums, and a table with this rank's row."""
        device = self._mesh.device
        rows = torch.zeros(self._mesh.world_size, len(row), device=device)
        if row is not NO_ROW:
            rows[self._mesh.rank] = device_reads.sent(torch.tensor(row), device)
        return torch.cat([to_limbs(sums.to(device)), rows.flatten()])

    @property
    def queues(self) -> bool:
        return self.compression is None and self.update_division.queues and not self.sparse

    def _queued_sum(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        sums, device, world_size = self._sums, self._mesh.device, self._mesh.world_size
        loss = (sums.total, sums.weight) if isinstance(sums, LateTerms) else None
        if loss is None:
            sums = device_reads.sent(torch.zeros(num_sums, dtype=torch.float64) if sums is None else sums, device)
        if world_size == 1 or not self._in_buckets:
            failures, _ = self._buckets.queue(flags, torch.empty(0, device=device))
            if world_size == 1:
                fails = flags != NO_FAILURES or self._buckets.num_odd > 0
                return QueuedSums(sums.known if loss is not None else sums, failures, None, fails, loss)
            failures[-1] += self._num_odd()
            if self.expert_sums is not None:
                failures[-1] += self.expert_sums.queue(NO_FAILURES, self._nothing)[0][-1]
            return QueuedSums(*queued_sums(sums, failures), None)
        failures, extras = self._buckets.queue(flags, self._extras(sums, row))
        cut = len(extras) - world_size * len(row)
        return QueuedSums(from_limbs(extras[:cut]), failures, extras[cut:].view(world_size, len(row)))

    def gradient_memory(self) -> tuple[list[Tensor], list[Tensor]]:
        own, others = self._buckets.memory()
        of_experts, others_of_experts = super().gradient_memory()
        return [*own, *of_experts, *self._sparse_rows.memory()], [*others, *others_of_experts]

    def close(self) -> None:
        self._buckets.close()
        if self.expert_sums is not None:
            self.expert_sums.close()


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

    `tree`: sums over the grains of all ranks. `sparse`: sums of further parameters' sparse gradients. `experts`: sums
    of the gradients of divided experts.
    """

    def __init__(
        self,
        model: ShardedModel,
        parameters: Sequence[Tensor],
        tree: TreeSum,
        mark: Mark,
        update_division: UpdateDivision | None = None,
        *,
        sparse: SparseRows | None = None,
        experts: ExpertGrains | None = None,
    ) -> None:
        super().__init__(model, mark, update_division)
        self.expert_grains, self.syncs_every_microbatch = experts, bool(model.division.experts)  # ranks gather them
        self._parameters, self._tree = list(parameters), tree
        self._sparse_rows = sparse or SparseRows((), model.mesh, torch.float32)
        self.sparse = self._sparse_rows.parameters
        self._num_grains = tree.num_grains
        self.begin()

    def begin(self, step: int = 0, factor: float | Tensor = 1.0) -> None:
        self.update_division.begin()
        self._tree.clear()
        self._sparse_rows.begin()
        if self.expert_grains is not None:
            self.expert_grains.begin()
        self._rows: dict[int, Tensor] = {}
        self._used = torch.zeros(len(self._parameters), dtype=torch.float64)
        self._known = [False] * len(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        if total.requires_grad:  # else the grain has no weight
            run_backward(total)
        grain = next((grain.index for grain in microbatch.grains), None)
        if self.expert_grains is not None:
            with torch._C.DisableTorchFunction():
                self.expert_grains.take(grain)
        if grain is None:  # a filler
            for parameter in self._parameters:
                parameter.grad = None
            return
        with torch._C.DisableTorchFunction():  # the grain's scope covers the model's operations only
            flat = self._tree.empty()  # the gradient, with zeros for parameters without one
            into, gradients = [], []
            for i, (parameter, view) in enumerate(zip(self._parameters, views_of(flat, self._parameters), strict=True)):
                if parameter.grad is None:
                    view.zero_()
                    continue
                into.append(view)
                gradients.append(as_real(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad))
                parameter.grad = None
                if not self._known[i]:
                    self._used[i], self._known[i] = 1.0, True
            if into:
                torch._foreach_copy_(into, gradients)
            self._tree.add(grain, flat)
            self._sparse_rows.take(grain)
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
            self._sparse_rows.give(self._num_grains)
            if self.expert_grains is not None:
                self.expert_grains.give(holders)
        return StepSums(sums.numpy(), flags)

    def gradient_memory(self) -> tuple[list[Tensor], list[Tensor]]:
        of_experts = self.expert_grains.tree.buffers() if self.expert_grains is not None else []
        return [*self._tree.buffers(), *of_experts, *self._sparse_rows.memory()], self._tree.borrowed()

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
