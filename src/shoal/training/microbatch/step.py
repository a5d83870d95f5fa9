"""A step's microbatches on this rank, each computed forward and backward, and the step's sums over all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.data.loader import Loader, Microbatch, StepData, Transfer
from shoal.distributed.agreement import raise_together
from shoal.distributed.failures import as_shoal_error, is_lost_peer, user_error
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, OutOfMemoryError, ShoalError
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.generators import DrawWatch, generators_kept
from shoal.numerics.grain_randomness import NotFusibleError
from shoal.numerics.isolation import without_modes
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.precision import Precision
from shoal.parallel.base import (
    NO_FAILURES,
    NUM_SUMS,
    Flags,
    QueuedSums,
    StepSums,
    Strategy,
    buffer_sums,
    microbatch_sums,
)
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.microbatch.look import LATER_STEPS
from shoal.training.microbatch.loss import LossComputer, no_gradient, refuse_past_the_model
from shoal.training.microbatch.policy import MicrobatchPolicy, RedoError
from shoal.training.microbatch.probe import PolicyProbe
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
        """True if the hooks of the observer may do anything."""
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


@dataclass  # made in every step
class StepPasses:
    """This rank's passes of a step: its microbatches, and the next step if it was already read.

    `proposal`: the policy for a repetition of this step, or None. `error`: why this rank could not compute the step.
    """

    passes: ForwardBackward
    seen: list[Microbatch]
    following: FetchedStep | None
    proposal: MicrobatchPolicy | None
    error: ShoalError | None

    @property
    def flags(self) -> Flags:
        """The failures that the other ranks have to know of."""
        if self.error is None and self.proposal is None:
            return NO_FAILURES
        return Flags(errors=int(self.error is not None), redo=int(self.proposal is not None))


@dataclass  # made in every step
class ComputedStep(StepPasses):
    """A computed step with its sums over all ranks."""

    sums: StepSums


@dataclass  # made in every step
class UnreadStep(StepPasses):
    """A queued step with its sums over all ranks, which may still be on the device."""

    sums: QueuedSums


# Builds this rank's agreement row for the next step from the microbatches fetched so far.
Row = Callable[[FetchedStep | None], list[float]]


class StepRunner:
    """Runner of steps, one after the other. `note` takes a line for people.

    `rests`: True if no code draws random numbers between steps, except after a call of `draws_may_follow`.
    """

    def __init__(self, parts: StepParts, loader: Loader, note: Callable[[str], None], *, rests: bool = False) -> None:
        self._parts, self._loader = parts, loader
        self._transfer = Transfer(parts.mesh.device, parts.precision.inputs)
        self.probe = PolicyProbe(parts, loader, note, self._fetch_again)
        together = parts.strategy.syncs_every_microbatch or parts.sharded_model.divided
        self._output: Any = None  # of the model's last call in a microbatch, if ranks synchronize in each microbatch
        if parts.strategy.syncs_every_microbatch and parts.pipeline is None:

            def note_output(model: nn.Module, args: Any, output: Any) -> None:
                self._output = output

            parts.sharded_model.model.register_forward_hook(note_output)
        self._draws = DrawWatch() if rests and not together and not loader.may_draw else None

    def draws_may_follow(self) -> None:
        """Record that user code, which may draw random numbers, runs before the next step."""
        if self._draws is not None:
            self._draws.forget()

    def fetch(self, step: int) -> FetchedStep:
        """Read this rank's first microbatch of a step, so that a bad sample is known before any sum."""
        self._parts.clock.mark("data_wait")
        try:
            data = self._loader.step(step)
            if data is None or not data.num_microbatches:
                return FetchedStep(step, data)
            first = next(data.microbatches)
            return FetchedStep(step, data, LoadedMicrobatch(first, self._transfer.start(first.batch)))
        except Exception as error:
            return FetchedStep(step, error=as_shoal_error(error))

    def run(self, fetched: FetchedStep, factor: float, row: Row) -> ComputedStep:
        """Compute a step and return its sums. `factor` multiplies the loss totals before the backward.

        If all ranks have read the next step, the sums' `rows` contain the `row` of every rank.
        Raises: on every rank, if any rank failed.
        Collective: all ranks.
        """
        if not self.probe.is_done or fetched.step + 1 in LATER_STEPS or self._parts.computer.has_evaluated:
            fetched = self.probe.before_step(fetched)
        while True:
            # An error of this rank travels with the sums, so that ranks stay in step.
            done = self._passes(fetched, factor)
            sums = done.passes.finish(done.flags, row(done.following) if self._parts.mesh.world_size > 1 else [])
            computed = ComputedStep(done.passes, done.seen, done.following, done.proposal, done.error, sums)
            if sums.flags.errors:
                raise_together(self._parts.mesh, computed.error)
            if sums.is_constant and not sums.flags.redo:
                raise_together(self._parts.mesh, no_gradient(sums.weight))
            if not sums.flags.redo:
                return computed
            self.probe.agree_on(computed.proposal, fetched.step, in_step=True)
            fetched = self._fetch_again(fetched.step)

    def _fetch_again(self, step: int) -> FetchedStep:
        """Fetch the step again under the current policy. Raises: on every rank. Collective: all ranks."""
        self._parts.buffers.restore()
        self._loader.seek(step, self._parts.computer.computation.effective_grains)
        fetched = self.fetch(step)
        raise_together(self._parts.mesh, fetched.error)
        return fetched

    def queue(self, fetched: FetchedStep, factor: float, row: Row) -> UnreadStep:
        """Queue a step for a strategy that `queues`: nothing is read, and this rank's failures travel with the sums.

        Collective: all ranks.
        """
        done = self._passes(fetched, factor)
        return UnreadStep(**vars(done), sums=done.passes.queue(done.flags, row(done.following)))

    def redo(self, number: int, step: UnreadStep, failures: Flags) -> None:
        """Handle the failures of step `number`, which is then computed again.

        Raises: on every rank, if any rank failed.
        Collective: all ranks, which have read the same `failures`.
        """
        if failures.errors:
            raise_together(self._parts.mesh, step.error)
        if failures.redo:
            self.probe.agree_on(step.proposal, number, in_step=True)

    def _passes(self, fetched: FetchedStep, factor: float) -> StepPasses:
        parts, inputs = self._parts, self._parts.precision.inputs
        meets = parts.strategy.syncs_every_microbatch
        together = self._with_gradient if meets and parts.pipeline is None else None
        passes = ForwardBackward(parts, factor, self._draws, with_gradient=together)
        passes.begin(fetched.step)
        if parts.observer_looks:
            parts.observer.begin(fetched.step, factor)
        seen: list[Microbatch] = []
        following, proposal, error = None, None, None

        def compute() -> None:
            """Compute the microbatches; their data are released on return, before the next step is fetched."""
            if parts.pipeline is not None:
                loaded = list(fetched.microbatches(inputs))
                seen.extend(one.microbatch.without_batch() for one in loaded)
                if meets:
                    most, filler = (
                        self._loader.most_microbatches(fetched.step),
                        next(self._loader.fillers(fetched.step)),
                    )
                    fillers = most - len(loaded)
                    loaded += [LoadedMicrobatch(filler, functools.partial(inputs, filler.batch))] * fillers
                if loaded:
                    from shoal.training.microbatch.pipeline_step import run_stages  # imports half a second of torch

                    batches = [one.batch() for one in loaded]
                    parts.clock.mark("forward")
                    run_stages(parts.pipeline, passes, [one.microbatch for one in loaded], batches, own=len(seen))
            else:
                own = fetched.data.num_microbatches if fetched.data is not None else 0
                most = self._loader.most_microbatches(fetched.step) if meets else own
                microbatches, is_read = fetched.microbatches(inputs), fetched.first is not None
                for number in range(most):
                    if number or not is_read:
                        parts.clock.mark("data_wait")
                    if number < own:
                        current = next(microbatches)
                        seen.append(current.microbatch.without_batch())
                    else:
                        filler = next(self._loader.fillers(fetched.step))
                        current = LoadedMicrobatch(filler, functools.partial(inputs, filler.batch))
                    self._output = None  # for example, from a look
                    passes.compute(current, last=number == most - 1, counts=number < own)

        try:
            if fetched.error is not None:
                raise fetched.error
            compute()
        except RedoError as redo:
            if meets:  # the other ranks may be in a collective of this microbatch, and do not repeat it
                raise JobError(
                    given=f"a model of which the first batch did not show how it computes: {redo}",
                    conflict="ranks with sharded parameters cannot go back in the midst of a step",
                    remedy='write shard.level = "optimizer", or a model that computes all batches alike',
                ) from redo
            proposal = redo.proposal
            if self._draws is not None and self._draws.is_unclear:
                self._draws = None  # each step gets its own watch from now on
        except Exception as caught:
            # This rank cannot report its error if a peer is lost or waits within the same model: in a collective of
            # this microbatch, or for a stage that has not read its microbatches.
            is_lost, pipeline = is_lost_peer(caught), parts.pipeline
            reports = pipeline is not None and pipeline.alone and not is_lost
            ends_at_once = (is_lost and not isinstance(caught, ShoalError)) or (
                parts.sharded_model.divided and not reports
            )
            if ends_at_once or (fetched.error is None and pipeline is not None and not seen):
                raise as_shoal_error(caught) from caught
            try:
                if is_out_of_memory(caught):
                    proposal = self.probe.fewer_grains(caught)
                else:
                    error = as_shoal_error(caught)
            except OutOfMemoryError as too_large:
                error = too_large
        else:
            if self._loader.looks_ahead:  # while the device computes and the sums are on their way
                following = self.fetch(fetched.step + 1)
        return StepPasses(passes, seen, following, proposal, error)

    def _with_gradient(self, step: int, total: Tensor) -> Tensor:
        """Return a total, or a zero with a gradient in its place, where the other ranks synchronize in the backward.

        The zero has a backward through the model. If the loss has not called the model, another microbatch's loss does;
        it is the same microbatch on all such ranks.
        """
        if not total.requires_grad:
            parts = self._parts
            with generators_kept(), without_modes():
                for filler in self._loader.fillers(step) if self._output is None else ():
                    with parts.computer.scope(filler):
                        parts.computer.loss(parts.precision.inputs(filler.batch))
                    if self._output is not None:
                        break
            leaves = [leaf for leaf in tree_leaves(self._output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            total = torch.zeros((), device=parts.mesh.device)
            if leaves:
                total = torch.stack([(leaf * 0.0).sum() for leaf in leaves]).sum()
        self._output = None  # the graph is about to be freed
        return total
