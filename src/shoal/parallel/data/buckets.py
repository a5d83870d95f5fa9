"""Gradient buckets: flat buffers. Their all-reduce starts while the backward still runs.

The module uses torch's post-accumulate hooks and an asynchronous all-reduce instead of the DDP wrapper. A rank must be
able to take part without a microbatch, with fewer microbatches than its peers, after an exception, and with parameters
that its loss did not use: see docs/decisions/0003-gradient-buckets.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Handle
from shoal.numerics import device_reads
from shoal.numerics.flat import as_real, in_dtype, real_numel, views_of
from shoal.parallel.base import Flags
from shoal.plans.accounting.partition import GLOO_BUCKET_BYTES, NCCL_BUCKET_BYTES, divide_into_buckets

if TYPE_CHECKING:
    from shoal.distributed.collectives.compression.compressed_sum import Comparison, Compression

_NUM_FLAGS = 2


@dataclass
class _Bucket:
    flat: Tensor
    members: list[int]  # indices of the parameters with gradients in this bucket
    summed: Tensor | None = None  # their sums over the ranks
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
        groups = [] if self._plain else divide_into_buckets(sizes, limit)
        for number, group in enumerate(groups):
            extra = self._num_status if number == len(groups) - 1 else 0
            length = sum(real_numel(self._parameters[i]) for i in group)
            self._buckets.append(_Bucket(self._allocate(length + extra, device), list(group)))
            self._lay_out(self._buckets[-1])
            if compression is not None:
                compression.add(group, [tuple(self._place[i][1].shape) for i in group], device)
        self._fired = [0] * len(self._parameters)
        self._fired_before: list[int] | None = None
        # For each parameter, whether it had a gradient in the last finished step; below, the same on the device.
        self._usual: list[bool] = []
        # Without buckets, in this step: which parameters have a gradient, and the gradients. torch would wrap a
        # gradient for Python again at each access.
        self._given: list[bool] = []
        self._gradients: list[Tensor | None] = []
        self._usual_there: Tensor | None = None
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

    def _lay_out(self, bucket: _Bucket) -> None:
        """Make the gradients of the bucket's members consecutive views of the bucket."""
        own = [self._parameters[i] for i in bucket.members]
        length = sum(map(real_numel, own))
        bucket.summed = bucket.flat
        if self._collective is not None and bucket.flat.is_cpu:
            bucket.summed = self._collective.sum_of(bucket.flat)
        views, sums = views_of(bucket.flat[:length], own), views_of(bucket.summed[:length], own)
        self._place |= {i: (bucket, view) for i, view in zip(bucket.members, views, strict=True)}
        self._sums |= dict(zip(bucket.members, sums, strict=True))

    def _allocate(self, length: int, device: torch.device) -> Tensor:
        if self._collective is not None and device.type == "cpu":
            return self._collective.allocate(length, self._dtype)
        return torch.zeros(length, dtype=self._dtype, device=device)

    def buffers(self) -> list[Tensor]:
        """Return the flat buffers, and those of the collective and the compression."""
        others = [summing.buffers() for summing in (self._collective, self._compression) if summing is not None]
        return [*(b.flat for b in self._buckets), *(tensor for tensors in others for tensor in tensors)]

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient after `finish` in the reduce dtype, even if `.grad` is narrower."""
        if self._plain or parameter.grad is None:
            return parameter.grad
        return self._sums[self._numbers[id(parameter)]]

    def borrowed(self) -> list[Tensor]:
        """Return the sums that are in another rank's memory, or in a second buffer of this rank."""
        return [b.summed for b in self._buckets if b.summed is not None and b.summed is not b.flat]

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
        self._open = False
        self._complete()
        if self._plain:
            self._usual, self._usual_there = self._given, None
            return flags, extras if extras.is_cpu else extras.cpu()
        used = [float(count > 0) for count in self._fired]
        if self._world_size > 1:
            status = self._summed(flags, used, extras).float().cpu()
            here, extras = status[: self._num_status].numpy(), status[self._num_status :]
            flags, used = Flags(int(here[0]), int(here[1])), here[_NUM_FLAGS:].tolist()
            if self._compression is not None:
                unused = []  # bucket, start and stop of each parameter that no rank used
                for number, bucket in enumerate(self._buckets):
                    for view in (self._place[i][1] for i in bucket.members if not used[i]):
                        start = int(view.storage_offset()) - int(bucket.flat.storage_offset())
                        unused.append((number, start, start + view.numel()))
                self.compared = self._compression.settle([b.flat for b in self._buckets], unused)
        self._usual, self._usual_there = [count > 0 for count in used], None
        self._give(self._usual)
        return flags, extras if extras.is_cpu else extras.cpu()

    def queue(self, flags: Flags, extras: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same as `finish`, without waiting, for the parameters with a gradient in the last `finish`.

        Returns: float32 [3] of flags and the number of parameters that differ from the last `finish`, and `extras`;
        both on the device.
        """
        self._open = False
        device = extras.device
        self._complete()
        if self._world_size == 1:
            used = self._given if self._plain else [count > 0 for count in self._fired]
            odd = sum(a != b for a, b in zip(used, self._usual, strict=True))
            self._give(self._usual)
            if not (flags.errors or flags.redo or odd):  # avoids a copy from the host
                return torch.zeros(3, device=device), extras
            status = torch.tensor([flags.errors, flags.redo, odd], dtype=torch.float32)
            return device_reads.sent(status, device), extras
        tail = self._summed(flags, [float(count > 0) for count in self._fired], extras).float()
        if self._usual_there is None:
            self._usual_there = device_reads.sent(torch.tensor(self._usual), device)
        used_there = tail[_NUM_FLAGS : self._num_status] > 0
        odd_there = (used_there != self._usual_there).sum().float().reshape(1)
        self._give(self._usual)
        return torch.cat([tail[:_NUM_FLAGS], odd_there]), tail[self._num_status :]

    def _complete(self) -> None:
        """Zero unused gradients in buffers not yet sent, and decide whether the next step may send early."""
        if self._plain:
            self._gradients = gradients = [parameter.grad for parameter in self._parameters]
            self._given = [gradient is not None for gradient in gradients]
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None and gradient.is_sparse:
                    parameter.grad = gradient.to_dense()
            return
        for i in (i for bucket in self._buckets[self._launched :] for i in bucket.members):
            if not self._fired[i]:
                self._place[i][1].zero_()
        if self._fired_before is not None and not self._overlap:
            self._overlap = all(a <= b + 1 for a, b in zip(self._fired, self._fired_before, strict=True))

    def _give(self, used: Sequence[bool]) -> None:
        """Give each used parameter its gradient. Missing ones become zeros: that step will not be applied."""
        if self._plain:
            for parameter, is_used in zip(self._parameters, used, strict=True):
                if is_used != (parameter.grad is not None):
                    parameter.grad = torch.zeros_like(parameter) if is_used else None
            return
        for i, parameter in enumerate(self._parameters):
            parameter.grad = in_dtype(self._sums[i], parameter) if used[i] else None

    def _summed(self, flags: Flags, used: list[float], extras: Tensor) -> Tensor:
        """Return the end of the last buffer, summed over the ranks: flags, which parameters were used, and `extras`."""
        last = self._buckets[-1]
        if extras.numel() != self._num_extras:  # make room at the end; collective as the constructor
            self._num_extras = extras.numel()
            length, before = sum(real_numel(self._parameters[i]) for i in last.members), last.flat
            last.flat = self._allocate(length + self._num_status + self._num_extras, before.device)
            last.flat[:length] = before[:length]
            if self._collective is not None:
                self._collective.release(before)
            self._lay_out(last)
        tail = last.flat[-self._num_status - extras.numel() :]
        status = torch.tensor([flags.errors, flags.redo, *used], dtype=self._dtype)
        tail[: self._num_status] = device_reads.sent(status, tail.device)
        tail[self._num_status :] = extras
        while self._launched < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
        assert last.summed is not None, "it is laid out"
        return last.summed[-len(tail) :]

    def close(self) -> None:
        """Remove the hooks and close the collective."""
        for handle in self._handles:
            handle.remove()
        if self._collective is not None:
            self._collective.close()
