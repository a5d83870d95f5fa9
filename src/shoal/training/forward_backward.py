"""Forward and backward passes of a step's microbatches on this rank, whoever computes their losses, and observers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.data.loader import Microbatch
from shoal.distributed.failures import is_lost_peer, user_error
from shoal.distributed.mesh import Mesh
from shoal.errors import ShoalError
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.draw_watch import DrawWatch
from shoal.numerics.grain_randomness import NotFusibleError
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.precision import Precision
from shoal.parallel.base import NUM_SUMS, Flags, QueuedSums, StepSums, Strategy, buffer_sums, microbatch_sums
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.computation import LossComputer, refuse_past_the_model
from shoal.training.telemetry import StepClock

if TYPE_CHECKING:
    from shoal.parallel.pipeline.pipeline import Pipeline


class Observer:
    """Interface of a step's hooks, called on every rank; this class does nothing. An observer must change nothing.

    A step that has to be computed again begins again. Gradients are read off the parameters' `.grad`.
    """

    @property
    def has_hooks(self) -> bool:
        """Whether its hooks may do anything."""
        return type(self) is not Observer

    @property
    def looks(self) -> bool:
        """Whether each step that comes is read before the next one, to be looked at. The same on all ranks."""
        return self.has_hooks

    @property
    def always_looks(self) -> bool:
        """Whether it will look at every step that comes, and not at the next few alone."""
        return self.looks

    def attach(self, sharded_model: ShardedModel, optimizer: Optimizer, strategy: Strategy) -> None:
        """A run's parts are built, before its first step. Called by who has built them, not by the engine."""

    def begin(self, step: int, factor: float) -> None:
        """A step's computation starts; loss totals are multiplied by `factor` before the backward."""

    def microbatch(self, microbatch: Microbatch, batch: Any) -> None:
        """The forward of a microbatch comes next; `batch` is on the device."""

    def forwarded(self) -> None:
        """The forward of that microbatch is done as far as this rank's stage of the model goes, which has no loss."""

    def loss(self, total: Tensor, weight: Tensor | float) -> None:
        """The loss of that microbatch; its backward comes next."""

    def computed(self) -> None:
        """The backward of that microbatch is done."""

    def reduced(self, loss: float, weight: float, scale: float) -> None:
        """Gradients are summed over all ranks; times `scale` they are the mean. `loss` is the mean loss."""

    def clipped(self, norm: float) -> None:
        """Gradients are the mean, clipped; `norm` is theirs before."""

    def updated(self, skipped: str | None) -> None:
        """Parameters, optimizer and buffers are those after the step, or unchanged where it was skipped."""

    def pulled(self, version: int) -> None:
        """A worker with parameter servers has the parameters after so many steps."""

    def part_begins(self, part: int) -> None:
        """Such a worker begins to compute a part of a step."""

    def part_computed(self) -> None:
        """Such a worker has computed its part; in fast mode the parameters' `.grad` are its gradients."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Model, strategy, policy and observers that the microbatches of a step are computed with."""

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
        """Whether the observer's hooks may do anything."""
        return self.observer.has_hooks


def labelled(
    clock: StepClock, microbatch: Microbatch, what: str = "", **about: Any
) -> contextlib.AbstractContextManager[None]:
    """A context that a trace names by the grains of a microbatch."""
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
    """Microbatch that was read; `batch` waits for its transfer to the device."""

    microbatch: Microbatch
    batch: Callable[[], Any]


@dataclass  # made in every step
class ForwardBackward:
    """Forwards and backwards of a step, whose loss totals are multiplied by `factor` before the backward.

    `draws` watches over all steps.
    """

    parts: StepParts
    factor: float
    draws: DrawWatch | None = None
    scale: float = 1.0  # of a loss total as the backward begins with it: the factor, where the strategy has not got it

    def begin(self, step: int) -> None:
        """Starts the step, perhaps again: no gradients, no sums."""
        parts = self.parts
        parts.strategy.begin(step, self.factor)
        self.scale = 1.0 if parts.strategy.begins_with_factor and parts.pipeline is None else self.factor
        if not self.parts.buffers.is_empty:
            self.parts.buffers.begin()

    @contextlib.contextmanager
    def microbatch(self, loaded: LoadedMicrobatch) -> Iterator[Any]:
        """A context for the forward and the backward of one microbatch, of which it gives the batch.

        Raises: RedoError where it has to be computed more carefully.
        """
        batch = self.enter(loaded)
        with self.scope(loaded.microbatch):
            yield batch
        self.leave()

    def enter(self, loaded: LoadedMicrobatch) -> Any:
        """Begins a microbatch, which is to be computed in its `scope`: its batch."""
        parts = self.parts
        parts.clock.mark("host_to_device")
        batch = loaded.batch()
        parts.clock.mark("forward")
        if parts.observer_looks:
            parts.observer.microbatch(loaded.microbatch, batch)
        return batch

    def scope(self, microbatch: Microbatch) -> contextlib.AbstractContextManager[None]:
        """The context of the forward and the backward of a microbatch. Raises: RedoError, as `microbatch`."""
        parts = self.parts
        own = parts.computer.scope(microbatch, draws=self.draws)
        return _within(labelled(parts.clock, microbatch), own) if parts.clock.is_listened_to else own

    def leave(self) -> None:
        """Ends a microbatch after its `scope`."""
        parts = self.parts
        if parts.observer_looks:
            parts.observer.computed()
        if not parts.buffers.is_empty:
            parts.buffers.restore()

    def weighted_buffers(self, microbatch: Microbatch, *, again: bool = False) -> Tensor:
        """Terms of a step's sums from what this microbatch has left in the buffers; `again`: of a later stage here."""
        buffers = self.parts.buffers
        if buffers.is_empty:
            return buffers.nothing
        return buffers.weighted(
            microbatch.num_samples, step=microbatch.step, grain=microbatch.grains[-1].index, again=again
        )

    def sums(self, microbatch: Microbatch, total: Tensor, weight: Tensor | float, buffers: Tensor) -> Tensor:
        """Return what a microbatch adds to the step's sums. Raises: LossError."""
        parts, counts_loss = self.parts, self.parts.mesh.counts_loss
        sums = microbatch_sums(microbatch, total, weight, buffers) if counts_loss else buffer_sums(buffers)
        if parts.observer_looks:
            parts.observer.loss(total.detach(), weight)
        return sums

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, *, last: bool) -> None:
        """Add the gradients of a microbatch, its sums, and what it has left in the buffers. Raises: UserCodeError.

        The buffers are read after the backward, which writes them too where the job recomputes modules itself.
        `last`: of the step's on this rank.
        """
        strategy = self.parts.strategy
        self.parts.clock.mark("backward")
        try:
            strategy.backward(microbatch, total if self.scale == 1.0 else total * self.scale, sums, last)
        except (NotFusibleError, ShoalError):
            raise
        except Exception as error:
            if is_out_of_memory(error) or is_lost_peer(error):
                raise
            refuse_past_the_model("loss", error)
            raise user_error("the backward", error) from error
        if self.parts.buffers.names:
            strategy.add_buffers(microbatch, self.weighted_buffers(microbatch))

    def finish(self, flags: Flags, row: list[float]) -> StepSums:
        """The sums over all ranks, and every parameter's gradient. Collective: all ranks."""
        return self.parts.strategy.finish(flags, NUM_SUMS + self.parts.buffers.num_values, row)

    def queue(self, flags: Flags, row: list[float]) -> QueuedSums:
        """As `finish`, of a strategy that `queues`."""
        return self.parts.strategy.queue(flags, NUM_SUMS + self.parts.buffers.num_values, row)

    def updated(self, sums: StepSums, skipped: str | None) -> str | None:
        """Ends the step after its update, or after it was `skipped`: sets the buffers that forwards change.

        Gives a line for people where the guard of compressed sums ends the compression.
        """
        parts, compression = self.parts, self.parts.strategy.compression
        if skipped is None and not parts.buffers.is_empty:
            parts.buffers.assign(sums.buffers, sums.num_samples)
        if parts.observer_looks:
            parts.observer.updated(skipped)
        if skipped is not None or compression is None or sums.compared is None:
            return None
        return compression.said(sums.compared)
