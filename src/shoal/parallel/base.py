"""Interface of parallelism strategies: backwards of microbatches, and the sums of gradients and losses over ranks.

Also over those that share one model: gradients that are partial over an axis, and the norm.
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
from shoal.numerics import device_reads
from shoal.numerics.gradient_norm import is_settled, rounded
from shoal.numerics.losses import refuse_weight
from shoal.parallel.backward import run_backward
from shoal.parallel.model.sharded_model import ShardedModel, local

if TYPE_CHECKING:
    from shoal.distributed.collectives.compression.compressed_sum import Comparison, Compression
    from shoal.parallel.shard.owners import DividedUpdate, Parts

# The sums of a step: loss total, weight, samples, microbatches whose total has a gradient, the digest's words, then
# weighted buffers (see numerics/batch_statistics.py).
TOTAL, WEIGHT, SAMPLES, LEARNT, DIGEST = 0, 1, 2, 3, 4
NUM_SUMS = DIGEST + DIGEST_WORDS


@dataclass(frozen=True)
class Flags:
    """Failures of this rank in this step; after a sum over ranks, the number of ranks with each."""

    errors: int = 0
    redo: int = 0  # out of memory, or a model that has to be computed another way


NO_FAILURES = Flags()


class StepSums:
    """Sums of a step over all ranks, the same on each of them; `sums` float64 as laid out above.

    `loss` is the mean over the global batch, NaN where nothing had a weight.
    """

    def __init__(
        self,
        sums: npt.NDArray[np.float64],
        flags: Flags,
        rows: npt.NDArray[np.float64] | None = None,
        compared: Comparison | None = None,
        norm: float | None = None,
    ) -> None:
        """`rows`, [world_size, n], of every rank, where they travelled with the sums.

        `compared`: compressed with exact gradients, in a sampled step. `norm`: of the summed gradients, as `settled`
        takes it, where it was read with the sums.
        """
        self.sums, self.flags, self.rows, self.compared, self.norm = sums, flags, rows, compared, norm
        total, self.weight, samples, self.learnt = sums[:DIGEST].tolist()
        self.loss = total / self.weight if self.weight else math.nan
        self.num_samples = round(samples)

    @property
    def is_constant(self) -> bool:
        """Whether no microbatch on any rank has a gradient, though the batch has a weight."""
        return bool(self.weight) and not self.learnt

    @property
    def digest(self) -> npt.NDArray[np.float64]:
        """The sum of the grains' digests."""
        return self.sums[DIGEST:NUM_SUMS]

    @property
    def buffers(self) -> npt.NDArray[np.float64]:
        """The buffers' values, each times its samples."""
        return self.sums[NUM_SUMS:]


@dataclass(frozen=True)
class QueuedSums:
    """Sums of a step that lie on the device, and that nobody has read yet, over all ranks as in StepSums.

    `sums` float64; `failures` [3]: the flags, and how many gradients are there of other parameters than in the
    last step that was read at once; `rows` float32 [world_size, n], or None where they did not travel with the sums.
    """

    sums: Tensor
    failures: Tensor
    rows: Tensor | None

    def packed(self, good: Tensor, norm: Tensor) -> Tensor:
        """One float64 vector for one read: whether the step is good, the norm, failures, sums, and the rows, if any."""
        parts = [good.reshape(1), norm.reshape(1), self.failures, self.sums]
        parts += [self.rows.flatten()] if self.rows is not None else []
        return torch.cat([part.double() for part in parts])


def microbatch_sums(microbatch: Microbatch, total: Tensor, weight: Tensor | float, buffers: Tensor) -> Tensor:
    """One microbatch's terms of the step's sums: float64 on the device, so that nothing waits for the device here."""
    # What is on the host is waiting for nobody: one array made of numbers costs a fraction of writing into its places.
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
    """A microbatch's terms where another rank counts its loss and samples: the buffers alone."""
    return torch.cat([buffers.new_zeros(NUM_SUMS), buffers])


# For each axis in turn its group, and the parameters whose gradients are summed over it.
PartialSums = list[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]


def add_partial(model: ShardedModel) -> PartialSums:
    """Sums the gradients that are partial over axes; of a parameter that no rank has one of there is none after it.

    Gives those that were there. Collective: for each axis, in its group, an all-reduce of flags and one for each such
    gradient.
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
    for group, parameters in added:
        for parameter in parameters:
            _add(parameter, model, group)


def _add(parameter: nn.Parameter, model: ShardedModel, group: dist.ProcessGroup | None) -> None:
    """Adds up a gradient over a group, in float32 at least: 16 bits would lose what autograd kept."""
    dtype = torch.float32 if parameter.itemsize < 4 else parameter.dtype
    if parameter.is_meta:  # its stages are elsewhere: this rank adds nothing
        shape = model.division.cut(tuple(parameter.shape))
        dist.all_reduce(torch.zeros(shape, dtype=dtype, device=model.mesh.device), group=group)
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    own = local(parameter.grad)
    wide = own.to(dtype)
    dist.all_reduce(wide, group=group)
    own.copy_(wide)


# Takes the name of the span that begins.
Mark = Callable[[str], None]


class Strategy(ABC):
    """Interface of a step: begin, a backward for each microbatch, finish; on every rank, also one without samples.

    After `finish` each parameter's `.grad` is the sum over all grains of all ranks, not divided by the weight, or None
    where no rank's loss depended on it.
    """

    compression: Compression | None = None  # what compresses the gradients on their way
    # Whether ranks with different grains meet within each microbatch, and so have to compute as many of them.
    syncs_every_microbatch = False
    # Whether `backward` takes the total itself, and begins its gradient with the factor that `begin` was given.
    begins_with_factor = False

    def __init__(self, model: ShardedModel, mark: Mark, owners: DividedUpdate | None = None) -> None:
        """`mark` is told when the step waits for communication; `owners` divide the update, where there are any."""
        self._model, self._mesh, self._mark, self._owners = model, model.mesh, mark, owners
        # In the last good step that was read at once: what `add_partial` summed, and what had a gradient before.
        self._added: PartialSums = []
        partial = (model.model.get_parameter(name) for name in model.division.partial)
        self._watched = [p for p in partial if p.requires_grad and not p.is_meta]
        self._had: list[bool] = []

    @abstractmethod
    def begin(self, step: int = 0, factor: float = 1.0) -> None:
        """Starts a step, perhaps again: no gradients, no sums. Loss totals are multiplied by `factor`.

        Collective: as `DividedUpdate.begin`.
        """
        if self._owners is not None:
            self._owners.begin()

    @abstractmethod
    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        """Adds a microbatch's gradient and sums; `last` says that this rank's others are all done.

        `total` is a scalar times any factor that is the same for all, or without it where the backward
        `begins_with_factor`; its graph is freed.
        """

    @abstractmethod
    def add_buffers(self, microbatch: Microbatch, values: Tensor) -> None:
        """Adds what a microbatch contributes to the buffers, after its backward; `backward` was given zeros of it."""

    def finish(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """The sums over all ranks, with every rank's `row` where that costs nothing.

        A row holds as many numbers on every rank, rounded to float32. Collective: all ranks; `num_sums` is the length
        of the sums. Where the step is good, as `add_partial`.
        """
        self._mark("exposed_communication")
        found = self._sum(flags, num_sums, row)
        if self._model.division.partial and found.weight and found.flags == NO_FAILURES:
            self._had = [parameter.grad is not None for parameter in self._watched]
            self._added = add_partial(self._model)
        return found

    @abstractmethod
    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """The sums over the ranks with different grains, of the gradients too, as `finish`."""

    @property
    def queues(self) -> bool:
        """Whether `queue` is there: the sums need nothing that the host has to know first. The same on all ranks."""
        return False

    def queue(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        """As `finish`, without a wait for the device: of the parameters that the last good `finish` gave gradients.

        Collective: as `finish`, without flags of single gradients.
        """
        self._mark("exposed_communication")
        found = self._queued_sum(flags, num_sums, row)
        _add_each(self._added, self._model)
        return found

    def _queued_sum(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        """As `_sum`, where the strategy `queues`."""
        raise NotImplementedError(type(self).__name__)

    def _num_odd(self) -> int:
        """How many gradients are there of other `_watched` parameters than usual; of the usual ones there are now."""
        odd = 0
        for parameter, had in zip(self._watched, self._had, strict=True):
            if had != (parameter.grad is not None):
                odd += 1
                parameter.grad = torch.zeros_like(parameter) if had else None
        return odd

    def queued_norm(self, own: Tensor | None) -> Tensor:
        """As `norm`, float64 [], where the device has it and not rounded; NaN where a rank has to look at its own.

        `own`: `norm_tensor` of the gradients that this rank `counts`. Collective: all ranks, as `norm`, of two numbers.
        """
        if not self._model.divided:
            return self._zeros(1)[0] if own is None else own
        told = self._zeros(2)
        if own is not None:
            told[0], told[1] = own.square(), ~is_settled(own) & (own != 0)  # a part without a gradient adds nothing
        dist.all_reduce(told)
        return torch.where(told[1] > 0, torch.nan, told[0].sqrt())

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.float64, device=self._mesh.device)

    def own_gradients(self) -> None:
        """Leaves each rank the gradients that it is to scale and clip; those of `norm`."""
        if self._owners is not None:
            self._owners.own_gradients()

    def divide(self, optimizer: torch.optim.Optimizer) -> Parts:
        """By parameter whose update is divided this rank's part of it, which the optimizer is to step in its place.

        Called once, when the optimizer is there.
        """
        return {} if self._owners is None else self._owners.divide(optimizer)

    def gradients_settle(self) -> None:
        """Waits until every gradient that this rank has is scaled and clipped. Collective: as the strategy's owners."""
        if self._owners is not None:
            self._owners.gradients_settle()

    def norm(self, own: float) -> float:
        """The Euclidean norm of the whole gradient from that over the gradients that each rank `counts`, `rounded`.

        Collective: all ranks, one all-reduce of a number, where the model is divided, or each rank has its own.
        """
        if self._owners is not None:
            own = self._owners.norm(own)
        if self._model.divided:
            squared = torch.tensor(own, dtype=torch.float64).square()
            dist.all_reduce(squared)
            own = float(squared.sqrt().numpy())  # it is on the host
        return rounded(own, self._model.dtypes)

    def update(self, step: Callable[[], None], *, queued: bool = False) -> None:
        """Calls the optimizer's `step` so that every rank ends with every parameter's new value.

        `queued`: the ranks do not ask each other whether it has raised. Collective: the ranks that divide the update.
        Raises: what `step` raises.
        """
        if self._owners is None:
            step()
        else:
            self._owners.update(step, queued=queued)
        if self.compression is not None:  # what it has held back counts from here on
            self.compression.commit()

    def updates(self, parameter: Tensor) -> bool:
        """Whether this rank updates it and so holds the optimizer's state for it."""
        return self._owners is None or self._owners.updates(parameter)

    def own_part(self, num_bytes: int) -> int:
        """Of so many bytes of parameters those that count on this rank: all but where ranks share one copy."""
        return num_bytes if self._owners is None else self._owners.own_part(num_bytes)

    def rest(self) -> None:
        """Puts away what forwards without a backward, as of an evaluation, have left."""
        return

    def gradient_buffers(self) -> list[Tensor]:
        """Gradient memory besides the parameters' own `.grad`; none."""
        return []

    def borrowed(self) -> list[Tensor]:
        """Memory in which gradients are read, and that counts elsewhere; none."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Takes the strategy's hooks off the parameters."""


class AccumulatingStrategy(Strategy):
    """Strategy that accumulates gradients in the backward, whether its own or a pipeline's."""

    _sums: Tensor | None = None
    _root = 1.0  # what the gradient of a total begins with

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        self.add(sums)
        if last:
            self.arm()
        if total.requires_grad:  # else the microbatch has no weight
            run_backward(total, self._root)

    def add(self, sums: Tensor) -> None:
        """Adds a microbatch's sums, after its forward."""
        self._sums = sums if self._sums is None else self._sums.add_(sums)

    def add_buffers(self, microbatch: Microbatch, values: Tensor) -> None:
        if len(values) and self._sums is not None:
            self._sums[NUM_SUMS:].add_(values)

    @abstractmethod
    def arm(self) -> None:
        """Says that the backward which comes next is this rank's last of the step."""

    def _own_sums(self, num_sums: int) -> Tensor:
        """What was added in this step."""
        return torch.zeros(num_sums, dtype=torch.float64) if self._sums is None else self._sums
