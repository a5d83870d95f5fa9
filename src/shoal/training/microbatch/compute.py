"""Computation of a step's microbatches on this rank, and the interface of a step's observers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.data.loader import Microbatch, StepData
from shoal.distributed.failures import is_lost_peer, user_error
from shoal.distributed.mesh import Mesh
from shoal.errors import ShoalError
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.generators import DrawWatch
from shoal.numerics.grain_randomness import NotFusibleError
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.precision import Precision
from shoal.parallel.base import NUM_SUMS, Flags, QueuedSums, StepSums, Strategy, buffer_sums, microbatch_sums
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.microbatch.loss import LossComputer, refuse_past_the_model
from shoal.training.observer import Observer
from shoal.training.step_clock import StepClock

if TYPE_CHECKING:
    from shoal.parallel.pipeline.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Model, strategy, policy and observer for the microbatches of a step."""

    mesh: Mesh
    precision: Precision
    sharded_model: ShardedModel
    pipeline: Pipeline | None = None
    strategy: Strategy
    computer: LossComputer
    buffers: StepBuffers
    clock: StepClock
    observer: Observer

    @functools.cached_property
    def observer_looks(self) -> bool:
        """Whether the hooks of the observer may do anything."""
        return self.observer.has_hooks


def labelled(
    clock: StepClock, microbatch: Microbatch, what: str = "", **about: Any
) -> contextlib.AbstractContextManager[None]:
    """Return a context that a trace labels with the grains of a microbatch."""
    if not clock.is_listened_to:
        return contextlib.nullcontext()
    numbers = [grain.index for grain in microbatch.grains]
    grains = f"grains {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"grain {numbers[0]}"
    return clock.labelled(f"{what}{grains}", grains=numbers, samples=microbatch.num_samples, **about)


@contextlib.contextmanager
def _within(
    outer: contextlib.AbstractContextManager[None], inner: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


@dataclass  # made in every step
class LoadedMicrobatch:
    """Microbatch that was read. `batch` waits for its transfer to the device."""

    microbatch: Microbatch
    batch: Callable[[], Any]


@dataclass
class FetchedStep:
    """This rank's part of a step, with the first microbatch already read; `error`: why the read has failed."""

    step: int
    data: StepData | None = None
    first: LoadedMicrobatch | None = None
    error: ShoalError | None = None

    def microbatches(self, move: Callable[[Any], Any]) -> Iterator[LoadedMicrobatch]:
        """Yield each microbatch once, without a reference that would keep its batch in memory until the step's end."""
        first, self.first = self.first, None
        if first is not None:
            yield first
        del first
        for microbatch in self.data.microbatches if self.data is not None else ():
            yield LoadedMicrobatch(microbatch, functools.partial(move, microbatch.batch))


@dataclass  # made in every step
class ForwardBackward:
    """Computation of a step's microbatches, for jobs, pipeline stages, captured steps and Sessions.

    Args:
        parts: the parts of the step.
        factor: multiplier of the loss totals before the backward.
        draws: a watch over the random draws of all steps.
        sums_of: returns a microbatch's terms of the step's sums from total, weight and buffers, in place of `terms`.
        with_gradient: returns the total of a step's backward, in place of one that may have no gradient.
    """

    parts: StepParts
    factor: float
    draws: DrawWatch | None = None
    sums_of: Callable[[Tensor, Tensor | float, Tensor], Tensor] | None = None
    with_gradient: Callable[[int, Tensor], Tensor] | None = None
    scale: float = 1.0  # of the loss total in the backward: 1.0 if the strategy applies the factor

    def begin(self, step: int) -> None:
        """Start the step, or start it again, without gradients and sums."""
        parts = self.parts
        parts.strategy.begin(step, self.factor)
        self.scale = 1.0 if parts.strategy.begins_with_factor and parts.pipeline is None else self.factor
        if not parts.buffers.is_empty:
            parts.buffers.begin()

    def compute(self, loaded: LoadedMicrobatch, *, last: bool, counts: bool = True) -> None:
        """Compute a microbatch: forward, loss and backward. Add its gradients, sums and buffers to the step's.

        Args:
            loaded: the microbatch.
            last: whether it is the step's last on this rank.
            counts: False for a filler of weight zero, which keeps this rank in step with ranks that have more.

        Raises: RedoError if the microbatch needs a more conservative policy; JobError, LossError, UserCodeError.
        """
        batch, context = self._enter(loaded, counts)
        with context:
            total, weight = self.parts.computer.loss(batch)
            self.add(loaded.microbatch, total, weight, last=last, counts=counts)
        self._leave(counts)

    @contextlib.contextmanager
    def scope(self, loaded: LoadedMicrobatch) -> Iterator[Any]:
        """Yield the batch of a microbatch to code that computes the loss itself and calls `add`. Raises: RedoError."""
        batch, context = self._enter(loaded, True)
        with context:
            yield batch
        self._leave(True)

    def _enter(self, loaded: LoadedMicrobatch, counts: bool) -> tuple[Any, contextlib.AbstractContextManager[None]]:
        """Return a microbatch's batch, and the context of its forward and backward."""
        parts, microbatch = self.parts, loaded.microbatch
        parts.clock.mark("host_to_device")
        batch = loaded.batch()
        parts.clock.mark("forward")
        if counts and parts.observer_looks:
            parts.observer.microbatch(microbatch, batch)
        context = parts.computer.scope(microbatch, draws=self.draws)
        if parts.clock.is_listened_to:
            context = _within(labelled(parts.clock, microbatch), context)
        return batch, context

    def _leave(self, counts: bool) -> None:
        parts = self.parts
        if counts and parts.observer_looks:
            parts.observer.computed()
        if not parts.buffers.is_empty:
            parts.buffers.restore()

    def add(
        self, microbatch: Microbatch, total: Tensor, weight: Tensor | float, *, last: bool, counts: bool = True
    ) -> None:
        """Run the backward of a microbatch's loss. Add its gradients, sums and buffers to the step's.

        Buffers are read after the backward, because it also writes them if the job recomputes modules itself.

        Args:
            microbatch: the microbatch of the loss.
            total: scalar, the sum of the losses.
            weight: the number of samples or tokens in `total`.
            last: whether it is the step's last microbatch on this rank.
            counts: False for a filler, which adds zeros.

        Raises: RedoError, JobError, LossError, UserCodeError.
        """
        parts = self.parts
        buffers, strategy = parts.buffers, parts.strategy
        zeros = buffers.nothing
        if not buffers.is_empty:
            if counts:
                parts.computer.check_buffers(buffers)
            zeros = buffers.zeros()
        sums, total = self.terms(microbatch, total, weight, zeros) if counts else (buffer_sums(zeros), total * 0.0)
        if self.with_gradient is not None:
            total = self.with_gradient(microbatch.step, total)
        parts.clock.mark("backward")
        try:
            strategy.backward(microbatch, total, sums, last)
        except (NotFusibleError, ShoalError):
            raise
        except Exception as error:
            if is_out_of_memory(error) or is_lost_peer(error):
                raise
            refuse_past_the_model("loss", error)
            raise user_error("the backward", error) from error
        if counts and buffers.names:
            strategy.add_buffers(microbatch, self.weighted_buffers(microbatch))

    def terms(
        self, microbatch: Microbatch, total: Tensor, weight: Tensor | float, buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a microbatch's terms of the step's sums, and the total of its backward. Raises: LossError.

        `buffers`: the terms of the buffers.
        """
        parts = self.parts
        if self.sums_of is not None:
            sums = self.sums_of(total.detach(), weight, buffers)
        elif parts.mesh.counts_loss:
            sums = microbatch_sums(microbatch, total, weight, buffers)
        else:
            sums = buffer_sums(buffers)
        if parts.observer_looks:
            parts.observer.loss(total.detach(), weight)
        return sums, total if self.scale == 1.0 else total * self.scale

    def weighted_buffers(self, microbatch: Microbatch, *, again: bool = False) -> Tensor:
        """Return the buffers' terms of the step's sums after a microbatch. `again`: for a later stage on this rank."""
        buffers = self.parts.buffers
        if buffers.is_empty:
            return buffers.nothing
        return buffers.weighted(
            microbatch.num_samples, step=microbatch.step, grain=microbatch.grains[-1].index, again=again
        )

    def finish(self, flags: Flags, row: list[float]) -> StepSums:
        """Return the sums over all ranks, and complete every parameter's gradient. Collective: all ranks."""
        return self.parts.strategy.finish(flags, NUM_SUMS + self.parts.buffers.num_values, row)

    def queue(self, flags: Flags, row: list[float]) -> QueuedSums:
        """Do the same as `finish` without a wait, for a strategy that `queues`. Collective: all ranks."""
        return self.parts.strategy.queue(flags, NUM_SUMS + self.parts.buffers.num_values, row)

    def updated(self, sums: StepSums, skipped: str | None) -> str | None:
        """End the step. Set the buffers that forwards change, unless the step was `skipped`.

        Return a line for people if the guard of compressed sums ends the compression, otherwise None.
        """
        parts, compression = self.parts, self.parts.strategy.compression
        if skipped is None and not parts.buffers.is_empty:
            parts.buffers.assign(sums.buffers, sums.num_samples)
        if parts.observer_looks:
            parts.observer.updated(skipped)
        if skipped is not None or compression is None or sums.compared is None:
            return None
        return compression.said(sums.compared)
