"""A step's microbatches on this rank, each computed forward and backward, and the step's sums over all ranks.

The loss of a microbatch is the user's function in its context of precision and random numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.data.loader import Loader, Microbatch, StepData, Transfer
from shoal.distributed.failures import as_shoal_error, is_lost_peer, user_error
from shoal.distributed.mesh import NO_ROW, Mesh, raise_together
from shoal.errors import JobError, LossError, OutOfMemoryError, ShoalError, text_of
from shoal.jobs.job import Job
from shoal.numerics.batch_statistics import StepBuffers, normalised_alone
from shoal.numerics.generators import DrawWatch, generators_kept, seed_everything
from shoal.numerics.grain_randomness import GrainScope, NotFusibleError
from shoal.numerics.isolation import ReentrantContext, without_modes
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.outputs import microbatch_loss
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
from shoal.parallel.blocks.compiled import Regions
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.grains import random_key
from shoal.training.microbatch.coupling import meaning
from shoal.training.microbatch.global_loss import GlobalLoss, PeerFailedError
from shoal.training.microbatch.global_norm import normalised_whole
from shoal.training.microbatch.look import LATER_STEPS
from shoal.training.microbatch.loss_pair import LossPair, refuse_past_the_model
from shoal.training.microbatch.policy import MicrobatchPolicy, RedoError
from shoal.training.microbatch.probe import PolicyProbe
from shoal.training.observer import Observer, StepClock

if TYPE_CHECKING:
    from shoal.parallel.pipeline.pipeline import Pipeline


class _DrawlessScope(contextlib.AbstractContextManager[None]):
    """Context for a forward and backward of a model that draws no random numbers. Raises: RedoError if it has drawn.

    The context is reusable. Without `draws`, a watch over all steps, it reads the generators at both ends of each use.
    """

    def __init__(self, computation: MicrobatchPolicy, draws: DrawWatch | None) -> None:
        self.computation, self.given, self._draws = computation, draws, draws or DrawWatch()

    def __enter__(self) -> None:
        self._draws.begin()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._draws.forget()
        elif self._draws.end():
            self._draws.forget()
            if self._draws.is_unclear:
                raise RedoError(self.computation, "the model, or something before it, has begun to draw")
            raise RedoError(replace(self.computation, randomness="scoped"), "the model has begun to draw")


# (function, batch) -> (total, weight), computed by all ranks of a pipeline.
Evaluate = Callable[..., list[float]]


class LossComputer:
    """Loss of one job's microbatches on one device. `evaluate` computes it if the model is a pipeline.

    `cut`: ranks gather each other's parts of the parameters, which have no copy in another dtype. `divided`: no rank
    has the whole model. `regions`: the compiled regions, if any. `gathers`: only the shard axis divides the model, so
    each rank gathers whole parameters. `writing`: receives the modules with a forward that writes parameters.
    `norm`: computes batch normalisation over the rows of all ranks, if a job has that and several ranks.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        precision: Precision,
        computation: MicrobatchPolicy,
        evaluate: Evaluate | None = None,
        *,
        cut: bool = False,
        divided: bool = False,
        exact: bool = False,
        regions: Regions | None = None,
        gathers: bool = False,
        writing: set[nn.Module] | None = None,
        norm: Callable[[Mapping[str, Any], bool], Tensor] | None = None,
    ) -> None:
        self.writing = set() if writing is None else writing
        self.norm, self.has_normalised = norm, False
        self.job, self.model, self.precision, self.evaluate = job, model, precision, evaluate
        self.exact, self.regions, self.gathers = exact, regions or Regions(), gathers
        self.look_seconds = 0.0  # total of all looks
        # Sums of an evaluation's first samples. A look compares them to detect state that training leaves.
        self.evaluation: Callable[[], tuple[float, ...]] | None = None
        self.has_evaluated = False  # since the last look for state; evaluations may leave state too
        self.cut, self.divided = cut, divided or cut or evaluate is not None
        self.pair = LossPair(self.regions.whole or microbatch_loss(job), precision)
        self.computation = computation
        self._drawless: _DrawlessScope | None = None
        self._computes_plainly = isinstance(precision.products(), contextlib.nullcontext)

    def no_trace(self) -> NoTrace:
        """Return a context that restores the model, the loss and the samples after a look."""
        source = getattr(self.job.train_data, "source", None)
        functions = {"loss": self.job.loss, "train_data": getattr(source, "data", None)}
        if self.job.outputs is not None:
            functions["outputs"] = self.job.outputs
        return NoTrace(self.model, functions, gathers=self.cut)

    def in_precision(self, precision: Precision) -> LossComputer:
        """Return a computer of the same losses in another precision."""
        if precision == self.precision:
            return self
        known: dict[str, Any] = {name: getattr(self, name) for name in ("cut", "divided", "exact", "regions")}
        return LossComputer(self.job, self.model, precision, self.computation, self.evaluate, **known)

    def scope(
        self,
        microbatch: Microbatch,
        grains: GrainScope | None = None,
        draws: DrawWatch | None = None,
        *,
        counts: bool = True,
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context for a microbatch's forward and backward. It raises RedoError if the policy does not fit.

        `draws`: a watch over the random draws of consecutive steps. `counts`: False for a filler.
        """
        if self._computes_plainly and self.computation.randomness == "none":
            known = self._drawless
            if known is None or draws is None or known.given is not draws or known.computation is not self.computation:
                known = self._drawless = _DrawlessScope(self.computation, draws)
            return known
        return self._scope(microbatch, grains, counts)

    @contextlib.contextmanager
    def _scope(self, microbatch: Microbatch, grains: GrainScope | None, counts: bool) -> Iterator[None]:
        kind = self.computation.randomness
        if self.job.batch_norm == "batch":
            if kind == "opaque":
                raise JobError(
                    given='Job(batch_norm="batch") with a model that draws at random in ways that cannot be told apart '
                    "by grain",
                    conflict="such a model computes each grain by itself, and a batch norm needs all grains at once",
                    remedy='draw with functions of torch on tensors by sample, or write batch_norm="grain"',
                )
            grains = grains or self.grain_scope(microbatch, functools.partial(self._normalised, counts))
        with self.precision.products():
            if kind == "opaque":
                seed_everything(random_key(self.job.seed, "model", microbatch.step, microbatch.grains[0].index))
                yield
            elif kind == "none":
                with _DrawlessScope(self.computation, None):
                    yield
            else:
                try:
                    with grains or self.grain_scope(microbatch) as scope:
                        yield
                except NotFusibleError as error:
                    raise RedoError(replace(self.computation, randomness="opaque"), text_of(error)) from error
                if scope.leaked():
                    reason = "randomness outside torch's functions"
                    raise RedoError(replace(self.computation, randomness="opaque"), reason)

    def scope_of_stage(self, microbatch: Microbatch) -> contextlib.AbstractContextManager[None]:
        """Return the context of `scope` for a pipeline stage, which enters it again for the backward."""
        grains = self.grain_scope(microbatch)
        return ReentrantContext(lambda: self.scope(microbatch, grains))

    def grain_scope(
        self, microbatch: Microbatch, batch_norm: Callable[[Mapping[str, Any]], Tensor] | None = None
    ) -> GrainScope:
        """Return the scope of a microbatch's random numbers and batch statistics.

        `batch_norm`: computes a norm over the global batch. Without it, as in a look, no sample sees another there.
        """
        is_older = not self.computation.by_hash
        if self.job.batch_norm == "batch":
            batch_norm = batch_norm or self._normalised_alone
        known = self.job.seed, microbatch.step, microbatch.grains, self.names
        return GrainScope(*known, is_older=is_older, batch_norm=batch_norm)

    def _normalised(self, counts: bool, given: Mapping[str, Any]) -> Tensor:
        """Normalise over the global batch, of which this process has all rows if there is no `norm`."""
        return normalised_whole(given) if self.norm is None else self.norm(given, counts)

    def _normalised_alone(self, given: Mapping[str, Any]) -> Tensor:
        self.has_normalised = True
        return normalised_alone(given)

    @functools.cached_property
    def names(self) -> dict[nn.Module, str]:
        """Names of the model's modules."""
        return {module: name for name, module in self.model.named_modules()}

    def loss(self, batch: Any) -> tuple[Tensor, Tensor | float]:
        """Return (total, weight) of a batch on the device. Raises: JobError, LossError, UserCodeError."""
        return self.pair(self.model, batch)

    def why_not_fused(self, agreed: MicrobatchPolicy) -> str:
        """Return one line for people: why grains do not share a forward, and the consequence."""
        if agreed.randomness == "opaque":
            return "the model draws at random in ways that cannot be told apart by grain"
        if self.job.outputs is not None:
            return "the outputs of a batch are not those of its grains, and the loss receives those of the grains"
        if not agreed.coupled:
            return "the loss of a batch is not the sum of its grains', or could not be seen to be"
        return f"{agreed.coupled}; {meaning(agreed.coupled, self.job.grain_size, self.job.global_batch)}"

    def check_buffers(self, buffers: StepBuffers) -> None:
        """Check that a forward changed no buffers besides those in the policy. Raises: RedoError."""
        unknown = buffers.moved()
        if unknown:
            names = tuple({*buffers.names, *unknown})
            raise RedoError(replace(self.computation, buffers=names), "further buffers change")


def no_gradient(weight: float) -> LossError:
    """Return the error for a batch that has a weight but yields no gradient."""
    return LossError(
        given=f"a loss of weight {weight:g} whose total depends on no trainable parameter",
        conflict="no part of the batch has a gradient",
        remedy="compute it from the model that the loss is given, outside torch.no_grad(); or return the weight 0 "
        "for a batch that adds nothing",
    )


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
        factor: multiplier of the loss totals before the backward; a captured step has a float32 [] on the device.
        draws: a watch over the random draws of all steps.
        sums_of: returns a microbatch's terms of the step's sums from total, weight and buffers, in place of `terms`.
        with_gradient: returns the total of a step's backward, in place of one that may have no gradient.
        request: returns what the loss receives in place of the batch of a microbatch, which counts or is a filler.
    """

    parts: StepParts
    factor: float | Tensor
    draws: DrawWatch | None = None
    sums_of: Callable[[Tensor, Tensor | float, Tensor], Tensor] | None = None
    with_gradient: Callable[[int, Tensor], Tensor] | None = None
    request: Callable[[Microbatch, Any, bool], Any] | None = None
    scale: float | Tensor = 1.0  # of the loss total in the backward: 1.0 if the strategy applies the factor
    is_observed: bool = False  # whether the observer looks at this step
    is_alone: bool = False  # whether the step has one microbatch on one rank, whose buffers are the step's
    began: dict[str, Tensor] = field(default_factory=dict)  # of such a step that is queued: buffers before it

    def begin(self, step: int) -> None:
        """Start the step, or start it again, without gradients and sums."""
        parts = self.parts
        parts.strategy.begin(step, self.factor)
        self.is_observed = parts.observer.looks
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
            if self.request is not None:
                batch = self.request(loaded.microbatch, batch, counts)
            total, weight = self.parts.computer.loss(batch)
            self.add(loaded.microbatch, total, weight, last=last, counts=counts)
        self._leave(counts)

    def forward(self, loaded: LoadedMicrobatch, request: Callable[[Any], Any]) -> None:
        """Compute the loss of what `request` returns for the batch, without a backward, sums and new values of buffers.

        In exact mode the pass builds a graph, since kernels without one may give other bits. Raises: as `compute`.
        """
        parts = self.parts
        batch, context = self._enter(loaded, False)
        with context, torch.set_grad_enabled(parts.computer.exact):
            parts.computer.loss(request(batch))
        if not parts.buffers.is_empty:
            parts.computer.check_buffers(parts.buffers)
        self._leave(False)

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
        if counts and self.is_observed:
            parts.observer.microbatch(microbatch, batch)
        parts.sharded_model.division.expert_loads.counts = counts
        context = parts.computer.scope(microbatch, draws=self.draws, counts=counts)
        if parts.clock.is_listened_to:
            context = _within(labelled(parts.clock, microbatch), context)
        return batch, context

    def _leave(self, counts: bool) -> None:
        parts = self.parts
        parts.sharded_model.division.expert_loads.counts = False
        if counts and self.is_observed:
            parts.observer.computed()
        if not parts.buffers.is_empty and not self.is_alone:
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
            zeros = buffers.nothing if self.is_alone else buffers.zeros()
        sums, total = self.terms(microbatch, total, weight, zeros) if counts else (buffer_sums(zeros), total * 0.0)
        if self.with_gradient is not None:
            total = self.with_gradient(microbatch.step, total)
        parts.clock.mark("backward")
        try:
            strategy.backward(microbatch if counts else replace(microbatch, grains=()), total, sums, last)
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
    ) -> tuple[Any, Tensor]:
        """Return a microbatch's terms of the step's sums, and the total of its backward. Raises: LossError.

        `buffers`: the terms of the buffers. The terms are a tensor, or LateTerms if the step `is_alone`.
        """
        parts = self.parts
        sums: Any
        if self.sums_of is not None:
            sums = self.sums_of(total.detach(), weight, buffers)
        elif parts.mesh.counts_loss:
            sums = microbatch_sums(microbatch, total, weight, buffers, is_alone=self.is_alone)
        else:
            sums = buffer_sums(buffers)
        if self.is_observed:
            parts.observer.loss(total.detach(), weight)
        return sums, total if self.scale == 1.0 else total * self.scale

    def weighted_buffers(self, microbatch: Microbatch, *, again: bool = False) -> Tensor:
        """Return the buffers' terms of the step's sums after a microbatch. `again`: for a later stage on this rank."""
        buffers = self.parts.buffers
        if buffers.is_empty:
            return buffers.nothing
        return buffers.weighted(
            microbatch.num_samples,
            step=microbatch.step,
            grain=microbatch.grains[-1].index,
            again=again,
            is_alone=self.is_alone,
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
        if self.is_alone:
            if skipped is not None:
                parts.buffers.restore()
            parts.buffers.saved = {}
        elif skipped is None and not parts.buffers.is_empty:
            parts.buffers.assign(sums.buffers, sums.num_samples)
        if self.is_observed:
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


def _copied(microbatches: Iterator[LoadedMicrobatch], copies: list[Microbatch]) -> Iterator[LoadedMicrobatch]:
    """Yield a step's microbatches, and add copies of them to `copies`: a loss may change its batch."""
    for loaded in microbatches:
        copies.append(replace(loaded.microbatch, batch=copy_of(loaded.microbatch.batch)))
        yield loaded


class StepRunner:
    """Runner of steps, one after the other. `note` takes a line for people.

    `rests`: True if no code draws random numbers between steps, except after a call of `draws_may_follow`. `repeats`:
    True if `run_again` may follow a step. Then the step's samples stay in memory, and the next step is read later.
    """

    def __init__(
        self,
        parts: StepParts,
        loader: Loader,
        note: Callable[[str], None],
        *,
        rests: bool = False,
        repeats: bool = False,
    ) -> None:
        self._parts, self._loader = parts, loader
        self._repeats, self._copies = repeats, list[Microbatch]()
        self.transfer = Transfer(parts.mesh.device, self._on_device)
        self.probe = PolicyProbe(parts, loader, note, self._fetch_again)
        self._global_loss = GlobalLoss(parts, loader) if parts.computer.job.outputs is not None else None
        together = parts.strategy.syncs_every_microbatch or parts.sharded_model.divided
        # Whether ranks wait for each other within a forward, which therefore all of them compute equally often.
        self._meets = parts.strategy.syncs_every_microbatch or parts.computer.norm is not None
        self._output: Any = None  # of the model's last call in a microbatch, if ranks synchronize in each microbatch
        if self._meets and parts.pipeline is None:

            def note_output(model: nn.Module, args: Any, output: Any) -> None:
                self._output = output

            parts.sharded_model.model.register_forward_hook(note_output)
        self._draws = DrawWatch() if rests and not together and not loader.may_draw else None

    def _on_device(self, batch: Any) -> Any:
        return self._parts.computer.precision.inputs(batch)

    def transfer_again(self, fetched: FetchedStep) -> None:
        """Send a step's first microbatch to the device again, after a change of the memory format."""
        if fetched.first is not None:
            first = fetched.first.microbatch
            fetched.first = LoadedMicrobatch(first, self.transfer.start(first.batch))

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
            return FetchedStep(step, data, LoadedMicrobatch(first, self.transfer.start(first.batch)))
        except Exception as error:
            return FetchedStep(step, error=as_shoal_error(error))

    def run(self, fetched: FetchedStep, factor: float, row: Row, *, again: bool = False) -> ComputedStep:
        """Compute a step and return its sums. `factor` multiplies the loss totals before the backward.

        If all ranks have read the next step, the sums' `rows` contain the `row` of every rank. `again`: the step is
        computed as it was, without a look at the model.
        Raises: on every rank, if any rank failed.
        Collective: all ranks.
        """
        later = fetched.step + 1 in LATER_STEPS or self._parts.computer.has_evaluated
        if not again and (later or not self.probe.is_done):
            fetched = self.probe.before_step(fetched)
        while True:
            # An error of this rank travels with the sums, so that ranks stay in step.
            done = self._passes(fetched, factor, again=again)
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

    def run_again(self, step: int, factor: float) -> StepSums:
        """Compute the step that `run` has computed again, at the parameters' present values, from the same samples.

        Random draws are those of `run`. Buffers have the values from before the step.
        Raises: ShoalError, on every rank, if any rank failed.
        Collective: all ranks.
        """
        data = StepData(step, 0, len(self._copies), iter(self._copies))
        try:
            with generators_kept():
                return self.run(FetchedStep(step, data), factor, lambda following: NO_ROW, again=True).sums
        except Exception as error:  # classified here: the optimizer, through which it passes, is not the cause
            raise as_shoal_error(error) from error
        finally:
            self._parts.clock.mark("optimizer")

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

    def _passes(self, fetched: FetchedStep, factor: float, *, again: bool = False) -> StepPasses:
        parts, meets = self._parts, self._meets
        together = self._with_gradient if meets and parts.pipeline is None else None
        passes = ForwardBackward(parts, factor, self._draws, with_gradient=together)
        is_one = fetched.data is not None and fetched.data.num_microbatches == 1
        passes.is_alone = is_one and parts.strategy.is_alone and parts.buffers.keeps and not self._repeats
        passes.begin(fetched.step)
        passes.is_observed &= not again
        if self._global_loss is not None:
            self._global_loss.begin(fetched.step, passes)
        if passes.is_observed:
            parts.observer.begin(fetched.step, factor)
        seen: list[Microbatch] = []
        following, proposal, error = None, None, None
        try:
            if fetched.error is not None:
                raise fetched.error
            self._compute(passes, fetched, seen)
        except RedoError as redo:
            if meets:  # the other ranks may be in a collective of this microbatch, and do not repeat it
                raise JobError(
                    given=f"a model that computes this batch in another way than the first batch: {redo}",
                    conflict="ranks that meet within a forward cannot repeat a step that they have begun",
                    remedy='write shard.level = "optimizer" and batch_norm="grain", or a model that computes all '
                    "batches alike",
                ) from redo
            proposal = redo.proposal
            if self._draws is not None and self._draws.is_unclear:
                self._draws = None  # each step gets its own watch from now on
        except PeerFailedError:
            pass  # the sums say so
        except Exception as caught:
            # This rank cannot report its error if a peer is lost or waits within the same model: in a collective of
            # this microbatch, or for a stage that has not read its microbatches.
            is_lost, pipeline = is_lost_peer(caught), parts.pipeline
            reports = pipeline is not None and pipeline.alone and not is_lost
            ends_at_once = (is_lost and not isinstance(caught, ShoalError)) or (
                (parts.sharded_model.divided or parts.computer.norm is not None) and not reports
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
            # While the device computes and the sums are on their way.
            if self._loader.looks_ahead and not self._repeats:
                following = self.fetch(fetched.step + 1)
        if self._global_loss is not None and (proposal is not None or error is not None):
            self._global_loss.fail()
        return StepPasses(passes, seen, following, proposal, error)

    def _compute(self, passes: ForwardBackward, fetched: FetchedStep, seen: list[Microbatch]) -> None:
        """Compute the microbatches and add them to `seen`. Their data are released on return, before the next fetch."""
        parts, inputs, loader, meets = self._parts, self._on_device, self._loader, self._meets

        def filler() -> LoadedMicrobatch:
            microbatch = next(loader.fillers(fetched.step))
            return LoadedMicrobatch(microbatch, functools.partial(inputs, microbatch.batch))

        if parts.pipeline is not None:
            loaded = list(fetched.microbatches(inputs))
            seen.extend(one.microbatch.without_batch() for one in loaded)
            if meets:
                loaded += [filler()] * (loader.most_microbatches(fetched.step) - len(loaded))
            if loaded:
                from shoal.training.microbatch.pipeline_step import run_stages  # imports half a second of torch

                batches = [one.batch() for one in loaded]
                parts.clock.mark("forward")
                run_stages(parts.pipeline, passes, [one.microbatch for one in loaded], batches, own=len(seen))
            return
        own = fetched.data.num_microbatches if fetched.data is not None else 0
        most = loader.most_microbatches(fetched.step) if meets else own
        if most > 1 and parts.computer.job.batch_norm == "batch":
            why = parts.computer.why_not_fused(parts.computer.computation)
            raise JobError(
                given=f'Job(batch_norm="batch") with {most} microbatches a rank',
                conflict="a norm over the global batch needs all samples of a rank in one forward"
                + ("" if parts.computer.computation.fuse else f", and grains share no forward: {why}"),
                remedy='use more devices or a smaller global_batch, or write batch_norm="grain"',
            )
        microbatches, is_read = fetched.microbatches(inputs), fetched.first is not None
        if self._repeats:
            self._copies = []
            microbatches = _copied(microbatches, self._copies)
        if self._global_loss is not None:
            fillers = [filler() for _ in range(own, most)]
            microbatches, is_read = self._global_loss.microbatches(passes, microbatches, own, fillers), True
        for number in range(most):
            if number or not is_read:
                parts.clock.mark("data_wait")
            if number < own:
                current = next(microbatches)
                seen.append(current.microbatch.without_batch())
            else:
                current = filler()
            self._output = None  # for example, from a look
            passes.compute(current, last=number == most - 1, counts=number < own)

    def _with_gradient(self, step: int, total: Tensor) -> Tensor:
        """Return a total, or a zero with a gradient in its place, where the other ranks synchronize in the backward.

        The zero has a backward through the model. If the loss has not called the model, another microbatch's loss does;
        it is the same microbatch on all such ranks.
        """
        if not total.requires_grad:
            parts = self._parts
            with generators_kept(), without_modes():
                for filler in self._loader.fillers(step) if self._output is None else ():
                    with parts.computer.scope(filler, counts=False):
                        parts.computer.loss(self._on_device(filler.batch))
                    if self._output is not None:
                        break
            leaves = [leaf for leaf in tree_leaves(self._output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            total = torch.zeros((), device=parts.mesh.device)
            if leaves:
                total = torch.stack([(leaf * 0.0).sum() for leaf in leaves]).sum()
        self._output = None  # the graph is about to be freed
        return total
