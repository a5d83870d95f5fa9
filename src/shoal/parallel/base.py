"""Interface of parallelism strategies: backward passes of microbatches, and sums of gradients and losses over ranks.

The module also sums gradients that are partial over a mesh axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.data.loader import Microbatch
from shoal.data.sample_digest import DIGEST_WORDS
from shoal.errors import LossError
from shoal.numerics import device_reads
from shoal.parallel.backward import run_backward
from shoal.parallel.model.sharded_model import ShardedModel, local
from shoal.parallel.shard.update_division import UpdateDivision

if TYPE_CHECKING:
    from shoal.distributed.collectives.compression.compressed_sum import Comparison, Compression

# Indices of a step's sums: loss total, weight, samples, number of microbatches with a gradient, and the words of the
# sample digest. Weighted buffers follow (see numerics/batch_statistics.py).
TOTAL, WEIGHT, SAMPLES, LEARNT, DIGEST = 0, 1, 2, 3, 4
NUM_SUMS = DIGEST + DIGEST_WORDS


@dataclass(frozen=True)
class Flags:
    """Failures of this rank in this step. After a sum over ranks: the number of ranks with each failure."""

    errors: int = 0
    redo: int = 0  # out of memory, or the model needs another way of computing


NO_FAILURES = Flags()


class StepSums:
    """Sums of a step over all ranks, identical on each rank.

    `sums`: float64, with the indices above. `loss`: mean over the global batch, NaN if the batch has no weight.
    """

    def __init__(
        self,
        sums: npt.NDArray[np.float64],
        flags: Flags,
        rows: npt.NDArray[np.float64] | None = None,
        compared: Comparison | None = None,
        norm: float | None = None,
    ) -> None:
        """Set the sums and the values derived from them.

        Args:
            sums: float64, with the indices above.
            flags: number of ranks with each failure.
            rows: [world_size, n], each rank's row, if the rows travelled with the sums.
            compared: compressed against exact gradients, in a sampled step.
            norm: norm of the summed gradients, as an input of `settled`, if it was read with the sums.
        """
        self.sums, self.flags, self.rows, self.compared, self.norm = sums, flags, rows, compared, norm
        total, self.weight, samples, self.learnt = sums[:DIGEST].tolist()
        self.loss = total / self.weight if self.weight else math.nan
        self.num_samples = round(samples)
        self.is_constant = bool(self.weight) and not self.learnt  # a batch with a weight, and nowhere a gradient
        self.digest = sums[DIGEST:NUM_SUMS]  # the sum of the grains' digests
        self.buffers = sums[NUM_SUMS:]  # the buffers' values, each multiplied by its number of samples


@dataclass(frozen=True)
class QueuedSums:
    """Sums of a step over all ranks, as in StepSums, that are still on the device and unread.

    `sums`: float64. `failures` [3]: the two flags, and the number of parameters for which the presence of a gradient
    differs from the last step that was read at once. `rows`: float32 [world_size, n], or None if they did not travel
    with the sums.
    """

    sums: Tensor
    failures: Tensor
    rows: Tensor | None

    def packed(self, good: Tensor, norm: Tensor) -> Tensor:
        """Return one float64 vector for a single read: `good`, `norm`, failures, sums, and any rows."""
        parts = [good.reshape(1), norm.reshape(1), self.failures, self.sums]
        parts += [self.rows.flatten()] if self.rows is not None else []
        return torch.cat([part.double() for part in parts])


def refuse_weight(weight: float) -> float:
    """Return the weight of a loss. Raises: LossError if the weight is negative or infinite."""
    if weight < 0.0 or weight == math.inf:
        raise LossError(
            given=f"a loss whose weight is {weight}",
            conflict="the gradient is divided by the sum of the weights, each a number of samples or tokens",
            remedy="return how many the total sums over, 0 for none",
        )
    return weight


def microbatch_sums(microbatch: Microbatch, total: Tensor, weight: Tensor | float, buffers: Tensor) -> Tensor:
    """Return one microbatch's terms of the step's sums: float64, on the device, without waiting for the device."""
    # A read on the host waits for nothing, and one array made of numbers costs a fraction of writes into its elements.
    here = not device_reads.waits(total.device)
    known = [total.item(), refuse_weight(float(weight))] if here else [0.0, 0.0]
    sums = torch.from_numpy(np.array([*known, microbatch.num_samples, total.requires_grad, *microbatch.words]))
    if not (here and buffers.is_cpu):
        sums = device_reads.sent(sums, buffers.device)
    if not here:
        sums[TOTAL] = total.detach()
        sums[WEIGHT] = weight
    return torch.cat([sums, buffers]) if len(buffers) else sums


def buffer_sums(buffers: Tensor) -> Tensor:
    """Return a microbatch's terms if another rank counts its loss and samples: the buffers alone."""
    return torch.cat([buffers.new_zeros(NUM_SUMS), buffers])


# For each axis: its group, and the parameters with gradients to sum over the axis.
PartialSums = list[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]


def add_partial(model: ShardedModel) -> PartialSums:
    """Sum the gradients that are partial over axes. Return the axes' groups and the parameters summed over each.

    A parameter without a gradient on any rank has none afterwards either. Collective: for each axis, in its group, an
    all-reduce of flags, then one all-reduce per gradient.
    """
    mesh, partial = model.mesh, dict(sorted(model.division.partial.items()))
    added: PartialSums = []
    for axis in sorted({axis for axes in partial.values() for axis in axes}):
        parameters = [model.model.get_parameter(name) for name, axes in partial.items() if axis in axes]
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not parameters:
            continue
        group = mesh.group(axis)
        there = torch.tensor([float(p.grad is not None) for p in parameters], device=mesh.device)
        dist.all_reduce(there, group=group)
        added.append((group, [p for p, count in zip(parameters, there.tolist(), strict=True) if count]))
        _add_each(added[-1:], model)
    return added


def _add_each(added: PartialSums, model: ShardedModel) -> None:
    """Sum gradients over groups, in float32 at least: 16 bits would lose what autograd accumulated."""
    for group, parameter in ((group, parameter) for group, parameters in added for parameter in parameters):
        dtype = torch.float32 if parameter.itemsize < 4 else parameter.dtype
        if parameter.is_meta:  # another rank computes the parameter's stages: this rank adds zeros
            shape = model.division.cut(tuple(parameter.shape))
            dist.all_reduce(torch.zeros(shape, dtype=dtype, device=model.mesh.device), group=group)
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = local(parameter.grad)
        wide = own.to(dtype)
        dist.all_reduce(wide, group=group)
        own.copy_(wide)


# A callable that takes the name of the span that begins.
Mark = Callable[[str], None]


class Strategy(ABC):
    """Interface of a step on every rank, also on a rank without samples: begin, a backward per microbatch, finish.

    After `finish`, each parameter's `.grad` is the sum over all grains of all ranks, not divided by the weight. It is
    None if no rank's loss depends on the parameter. The update then works through `update_division`.
    """

    compression: Compression | None = None  # compresses the gradients before they are sent
    # Whether ranks with different grains communicate within each microbatch, and so need equal numbers of microbatches.
    syncs_every_microbatch = False
    # Whether `backward` takes the unscaled total and starts its gradient with the factor that `begin` received.
    begins_with_factor = False

    def __init__(self, model: ShardedModel, mark: Mark, update_division: UpdateDivision | None = None) -> None:
        """Set the model, the `mark` to call before communication waits, and the division of the update, if any."""
        self._model, self._mesh, self._mark = model, model.mesh, mark
        self.update_division = update_division or UpdateDivision(model)
        # From the last good step that was read at once: what `add_partial` summed, and which parameters had a gradient
        # before.
        self._added: PartialSums = []
        partial = (model.model.get_parameter(name) for name in model.division.partial)
        self._watched = [p for p in partial if p.requires_grad and not p.is_meta]
        self._had: list[bool] = []

    @abstractmethod
    def begin(self, step: int = 0, factor: float = 1.0) -> None:
        """Start a step, or start it again, without gradients or sums. Loss totals are multiplied by `factor`.

        Collective: as `UpdateDivision.begin`.
        """

    @abstractmethod
    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        """Add a microbatch's gradient and sums.

        Args:
            microbatch: the microbatch of `total`.
            total: scalar, multiplied by a factor common to all microbatches unless the strategy `begins_with_factor`.
                Its graph is freed.
            sums: float64, the microbatch's terms of the step's sums.
            last: whether all other microbatches of this rank are done.
        """

    @abstractmethod
    def add_buffers(self, microbatch: Microbatch, values: Tensor) -> None:
        """Add a microbatch's terms of the buffers after its backward, which received zeros in their place."""

    def finish(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Return the sums over all ranks, with every rank's `row` if the rows cost no extra message.

        Args:
            flags: failures of this rank.
            num_sums: length of the sums.
            row: the same number of values on every rank, rounded to float32.

        Collective: all ranks; in a good step also as `add_partial`.
        """
        self._mark("exposed_communication")
        sums = self._sum(flags, num_sums, row)
        if self._model.division.partial and sums.weight and sums.flags == NO_FAILURES:
            self._had = [parameter.grad is not None for parameter in self._watched]
            self._added = add_partial(self._model)
        return sums

    @abstractmethod
    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Sum gradients and step sums over the ranks with different grains, as `finish`."""

    @property
    def queues(self) -> bool:
        """True if `queue` is available: the sums need no value that the host must read first. The same on all ranks."""
        return False

    def queue(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        """Do the same as `finish`, without a wait, for parameters with a gradient in the last good `finish`.

        Collective: as `finish`, without the all-reduce of flags.
        """
        self._mark("exposed_communication")
        sums = self._queued_sum(flags, num_sums, row)
        _add_each(self._added, self._model)
        return sums

    def _queued_sum(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        """Do the same as `_sum`, if the strategy `queues`."""
        raise NotImplementedError(type(self).__name__)

    def _num_odd(self) -> int:
        """Return how many `_watched` gradients are unusually present or missing, and restore the usual state."""
        odd = 0
        for parameter, had in zip(self._watched, self._had, strict=True):
            if had != (parameter.grad is not None):
                odd += 1
                parameter.grad = torch.zeros_like(parameter) if had else None
        return odd

    def rest(self) -> None:
        """Free what forwards without a backward, for example in an evaluation, have gathered."""
        return

    def gradient_memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradient memory outside the parameters' own `.grad`, and memory that counts elsewhere."""
        return [], []

    @abstractmethod
    def close(self) -> None:
        """Remove the strategy's hooks from the parameters."""


class AccumulatingStrategy(Strategy):
    """Strategy that accumulates gradients in the backward, its own or a pipeline's."""

    _sums: Tensor | None = None
    _root = 1.0  # the initial gradient of a total

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        self.add(sums)
        if last:
            self.arm()
        if total.requires_grad:  # else the microbatch has no weight
            run_backward(total, self._root)

    def add(self, sums: Tensor) -> None:
        """Add a microbatch's sums, after its forward."""
        self._sums = sums if self._sums is None else self._sums.add_(sums)

    def add_buffers(self, microbatch: Microbatch, values: Tensor) -> None:
        if len(values) and self._sums is not None:
            self._sums[NUM_SUMS:].add_(values)

    @abstractmethod
    def arm(self) -> None:
        """Announce that the next backward is this rank's last in the step."""
