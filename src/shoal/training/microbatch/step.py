"""Step execution: gradients and sums of one step on this rank, under the current microbatch policy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.data.loader import Loader, MapLoader, Microbatch, StepData, Transfer
from shoal.distributed.agreement import collectively, raise_together
from shoal.distributed.failures import as_shoal_error, is_lost_peer
from shoal.distributed.own_collectives import own_collectives_refused
from shoal.errors import JobError, OutOfMemoryError, ShoalError
from shoal.job import Job
from shoal.numerics.buffer_rules import LOOKED_GRAINS, in_words, no_rule
from shoal.numerics.draw_watch import DrawWatch
from shoal.numerics.isolation import generators_kept, without_modes
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.parallel.base import NO_FAILURES, Flags, QueuedSums, StepSums
from shoal.training.microbatch.compute import ForwardBackward, LoadedMicrobatch, StepParts
from shoal.training.microbatch.look import LATER_STEPS, Look
from shoal.training.microbatch.loss import no_gradient
from shoal.training.microbatch.policy import BufferLook, MicrobatchPolicy, ProbeResult, RedoError, refuse_other_losses


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
        self._parts, self._loader, self._note = parts, loader, note
        self._transfer = Transfer(parts.mesh.device, parts.precision.inputs)
        self._probed = False
        divided = parts.sharded_model.divided
        self._look = Look(parts.computer, (lambda told: any(parts.mesh.gather_json(told))) if divided else bool)
        together = parts.strategy.syncs_every_microbatch or parts.sharded_model.divided
        self._output: Any = None  # of the model's last call in a microbatch, if ranks synchronize in each microbatch
        if parts.strategy.syncs_every_microbatch and parts.pipeline is None:
            parts.sharded_model.model.register_forward_hook(self._note_output)
        self._draws = DrawWatch() if rests and not together and not loader.may_draw else None

    def draws_may_follow(self) -> None:
        """Record that user code, which may draw random numbers, runs before the next step."""
        if self._draws is not None:
            self._draws.forget()

    def recall(self, computation: dict[str, Any]) -> None:
        """Restore the microbatch policy of a resumed run, except the number of grains that fit in memory."""
        computer = self._parts.computer
        here = computer.computation.grains_per_microbatch
        known = replace(MicrobatchPolicy.from_json(computation), grains_per_microbatch=here)
        computer.computation = computer.computation.with_care_of(known)

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
        fetched = self.looked_at(fetched)
        while True:
            computed = self._compute(fetched, factor, row)
            sums = computed.sums
            if sums.flags.errors:
                raise_together(self._parts.mesh, computed.error)
            if sums.is_constant and not sums.flags.redo:
                raise_together(self._parts.mesh, no_gradient(sums.weight))
            if not sums.flags.redo:
                return computed
            self._agree_on(computed.proposal, fetched.step, in_step=True)
            fetched = self._fetch_again(fetched.step)

    def looked_at(self, fetched: FetchedStep) -> FetchedStep:
        """Run the look that is due before a step, if any, and return the step, possibly in other microbatches.

        Raises: on every rank, if any rank raised.
        Collective: all ranks.
        """
        if not self._probed:
            return self._probe(fetched)
        computer = self._parts.computer
        if fetched.step + 1 in LATER_STEPS or computer.has_evaluated:
            computer.has_evaluated = False
            grains = self._loader.first_grains(fetched.step)
            look = functools.partial(self._look.state, grains) if grains is not None else (lambda: None)
            with self._own_collectives_refused():
                collectively(self._parts.mesh, self._parts.sharded_model.divided, look)
        return fetched

    def _probe(self, fetched: FetchedStep) -> FetchedStep:
        """Probe the model's first batch for a safe microbatch policy. All ranks adopt the most conservative one."""
        parts = self._parts
        while True:
            before = parts.computer.computation.effective_grains
            first = fetched.first.microbatch if fetched.first is not None else None
            if parts.strategy.syncs_every_microbatch:  # the same on all ranks, which meet in every forward
                first = self._loader.filler(fetched.step)
            found = collectively(parts.mesh, parts.sharded_model.divided, functools.partial(self._propose, first))
            if not parts.observer_looks:  # an observer, such as a verification's, compares what ranks compute itself
                refuse_other_losses(parts.mesh.gather_json(found.seen))
            told = parts.mesh.all_gather([float(found.too_large), float(not found.conclusive)])
            too_large, unclear = told.max(axis=0) > 0
            agreed = self._agree_on(found.computation, None if too_large else fetched.step)
            # A non-finite batch is not conclusive: probe the next batch, too.
            self._probed = not unclear and not self._without_rule(agreed)
            if agreed.effective_grains != before:
                fetched = self._fetch_again(fetched.step)
            if not too_large:
                return fetched

    def _own_collectives_refused(self) -> contextlib.AbstractContextManager[None]:
        several = self._parts.mesh.world_size > 1
        return own_collectives_refused("the model or loss") if several else contextlib.nullcontext()

    def _propose(self, first: Microbatch | None) -> ProbeResult:
        if first is None:
            return ProbeResult(self._parts.computer.computation)
        computer, divided = self._parts.computer, self._parts.sharded_model.divided
        whole = grains = self._loader.first_grains(first.step) or first
        # A step's forward in exact mode has one grain; the look takes several, to see whether samples mix.
        meets = divided or self._parts.strategy.syncs_every_microbatch
        if not computer.exact or meets or not computer.job.fuse:
            whole = first
        if computer.exact:
            self._loader.check_repeats(first.step)
        while True:
            try:
                with self._own_collectives_refused():
                    return self._look.policy(whole, grains, self._parts.buffers)
            except Exception as error:
                if not is_out_of_memory(error) or divided:
                    raise
                if whole is first:  # nothing is known of the model yet: probe again with fewer grains
                    return ProbeResult(self._fewer_grains(error), too_large=True)
            torch.cuda.empty_cache()  # after the error, whose frames hold tensors
            whole = grains = first

    def _fewer_grains(self, error: Exception) -> MicrobatchPolicy:
        """Return the policy with half the grains per microbatch. Raises: OutOfMemoryError if there is only one."""
        computation = self._parts.computer.computation
        if computation.effective_grains == 1:
            size = self._parts.computer.job.grain_size
            raise OutOfMemoryError(
                given=f"a microbatch of a single grain, of {size} sample{'s' if size > 1 else ''}",
                conflict=f"it does not fit in memory: {str(error).strip()[:200] or type(error).__name__}",
                remedy=_smaller(self._parts.computer.job),
            ) from error
        torch.cuda.empty_cache()
        return replace(computation, grains_per_microbatch=computation.effective_grains // 2)

    def _agree_on(
        self, proposal: MicrobatchPolicy | None, step: int | None, *, in_step: bool = False
    ) -> MicrobatchPolicy:
        """Adopt the most conservative of all ranks' proposals, with rules for buffers from `step` unless it is None.

        `in_step`: the proposals are from the step's own forwards, which have changed the newly watched buffers.
        Collective: all ranks, one JSON gather, and a second one if a buffer needs a rule.
        """
        computer, buffers = self._parts.computer, self._parts.buffers
        told = self._parts.mesh.gather_json(proposal.to_json() if proposal else None)
        agreed = computer.computation
        for document in filter(None, told):
            agreed = agreed.with_care_of(MicrobatchPolicy.from_json(document))
        before = computer.computation
        has_parted = before.fuse and not agreed.fuse and (agreed.grains_per_microbatch > 1 or computer.exact)
        if has_parted or (agreed.randomness == "opaque" and before.randomness != "opaque"):
            self._note(f"grain by grain: {computer.why_not_fused(agreed)}")
        computer.computation = agreed
        buffers.watch(agreed.buffers, dict(agreed.rules))
        if step is not None and ((agreed.buffers and self._without_rule(agreed)) or buffers.declared):
            self._find_rules(step, {*agreed.buffers} - {*before.buffers} if in_step else frozenset())
        return computer.computation

    def _without_rule(self, agreed: MicrobatchPolicy) -> list[str]:
        known = dict(agreed.rules)
        return [name for name in agreed.buffers if name not in known and self._parts.buffers.settled(name) is None]

    def _find_rules(self, step: int, moving: Collection[str]) -> None:
        """Find rules for buffers from the first grains of a step, and drop buffers that no grain changes.

        `moving`: buffers that the step has changed, for example a buffer that adopts the dtype of the computation.
        Raises: JobError on every rank, for a buffer that no rule explains.
        Collective: all ranks, one JSON gather.
        """
        parts, computer, buffers = self._parts, self._parts.computer, self._parts.buffers
        agreed, names = computer.computation, self._without_rule(computer.computation)
        rules = dict(agreed.rules) | {n: rule for n, rule in buffers.declared.items() if n in agreed.buffers}
        moved, looks, unexplained = set(agreed.buffers), list[BufferLook](), list[str]()
        if names:
            buffers.restore()
            divided = parts.sharded_model.divided
            own = collectively(parts.mesh, divided, functools.partial(self._look_at_buffers, step, names, moving))
            told = parts.mesh.gather_json(asdict(own) if own is not None else None)
            looks = [BufferLook(**document) for document in filter(None, told)]
            seen = {name for look in looks for name in look.rules}
            moved = {n for n in agreed.buffers if n not in names or n in seen or n in moving or not looks}
        mixes = agreed.randomness == "opaque" or not computer.job.fuse or any(look.mixes for look in looks)
        for name in (name for name in names if name in moved):
            found = [look.rules[name] for look in looks if name in look.rules]
            common = [rule for rule in (found[0] if found else ()) if all(rule in other for other in found)]
            if common or mixes:
                rules[name] = common[0] if common else "mean"
            elif not looks and (parts.mesh.num_data_ranks == 1 or isinstance(self._loader, MapLoader)):
                rules[name] = "last"  # every step has a single grain
            elif all(look.conclusive for look in looks):
                unexplained.append(name)
        if unexplained:
            homes = dict(parts.sharded_model.model.named_modules())
            kinds = {name: _kind(homes.get(name.rpartition(".")[0])) for name in unexplained}
            ordered = any(not kinds.keys().isdisjoint(look.ordered) for look in looks)
            rarely = not any(kinds.keys() & look.rules.keys() for look in looks)
            raise no_rule(kinds, ordered=ordered, seen=bool(looks), rarely=bool(looks) and rarely)
        said = {name: rule for name, rule in rules.items() if rule != "mean" or (mixes and name in names)}
        if said and rules != dict(agreed.rules):
            self._note(f"buffers: {in_words(said)}")
        computer.computation = replace(
            agreed, buffers=tuple(sorted(moved)), rules=tuple(sorted((n, r) for n, r in rules.items() if n in moved))
        )
        buffers.watch(computer.computation.buffers, rules)

    def _look_at_buffers(self, step: int, names: list[str], moving: Collection[str]) -> BufferLook | None:
        """Return this rank's look at buffers, or None without two grains to compare."""
        for count in (LOOKED_GRAINS, 2):
            first = self._loader.first_grains(step, count)
            if first is None or len(first.grains) < 2:
                return None
            try:
                return self._look.buffers(first, names, widens=not moving)
            except Exception as error:
                if not is_out_of_memory(error) or self._parts.sharded_model.divided or count == 2:
                    raise
                torch.cuda.empty_cache()
        return None

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
            self._agree_on(step.proposal, number, in_step=True)

    def _compute(self, fetched: FetchedStep, factor: float, row: Row) -> ComputedStep:
        """Compute gradients and sums of the step. An error here travels with the sums, so that ranks stay in step."""
        done = self._passes(fetched, factor)
        sums = done.passes.finish(done.flags, row(done.following) if self._parts.mesh.world_size > 1 else [])
        return ComputedStep(done.passes, done.seen, done.following, done.proposal, done.error, sums)

    def _passes(self, fetched: FetchedStep, factor: float) -> StepPasses:
        parts = self._parts
        together = self._with_gradient if parts.strategy.syncs_every_microbatch and parts.pipeline is None else None
        passes = ForwardBackward(parts, factor, self._draws, with_gradient=together)
        passes.begin(fetched.step)
        if parts.observer_looks:
            parts.observer.begin(fetched.step, factor)
        seen: list[Microbatch] = []
        following, proposal, error = None, None, None
        try:
            if fetched.error is not None:
                raise fetched.error
            if parts.pipeline is not None:
                self._in_stages(passes, fetched, seen)
            else:
                self._in_turn(passes, fetched, seen)
        except RedoError as redo:
            if (
                parts.strategy.syncs_every_microbatch
            ):  # the other ranks may be in a collective of this microbatch, and do not repeat it
                raise JobError(
                    given=f"a model of which the first batch did not show how it computes: {redo}",
                    conflict="ranks with sharded parameters cannot go back in the midst of a step",
                    remedy='write shard.level = "optimizer", or a model that computes all batches alike',
                ) from redo
            proposal = redo.proposal
            if self._draws is not None and self._draws.is_unclear:
                self._draws = None  # each step gets its own watch from now on
        except Exception as caught:
            # Other ranks wait in a collective of this microbatch, or for a stage that has not read its microbatches.
            if self._ends_at_once(caught) or (fetched.error is None and parts.pipeline is not None and not seen):
                raise as_shoal_error(caught) from caught
            proposal, error = self._judged(caught)
        else:
            if self._loader.looks_ahead:  # while the device computes and the sums are on their way
                following = self.fetch(fetched.step + 1)
        return StepPasses(passes, seen, following, proposal, error)

    def _ends_at_once(self, error: Exception) -> bool:
        """Return True if this rank cannot report its error: a peer is lost, or waits within the same model."""
        if not isinstance(error, ShoalError) and is_lost_peer(error):
            return True
        pipeline = self._parts.pipeline
        told = pipeline is not None and pipeline.alone and not is_lost_peer(error)
        return self._parts.sharded_model.divided and not told

    def _judged(self, error: Exception) -> tuple[MicrobatchPolicy | None, ShoalError | None]:
        """Return the policy for a repetition after an out-of-memory error, or else the error that ends the run."""
        try:
            return (self._fewer_grains(error), None) if is_out_of_memory(error) else (None, as_shoal_error(error))
        except OutOfMemoryError as too_large:
            return None, too_large

    def _in_turn(self, passes: ForwardBackward, fetched: FetchedStep, seen: list[Microbatch]) -> None:
        parts, own = self._parts, fetched.data.num_microbatches if fetched.data is not None else 0
        most = self._loader.most_microbatches(fetched.step) if parts.strategy.syncs_every_microbatch else own
        inputs = parts.precision.inputs
        microbatches = fetched.microbatches(inputs)
        is_read = fetched.first is not None
        for number in range(most):
            if number or not is_read:
                parts.clock.mark("data_wait")
            last = number == most - 1
            if number < own:
                loaded = next(microbatches)
                seen.append(loaded.microbatch.without_batch())
            else:
                filler = self._loader.filler(fetched.step)
                loaded = LoadedMicrobatch(filler, functools.partial(inputs, filler.batch))
            self._output = None  # for example, from a look
            passes.compute(loaded, last=last, counts=number < own)

    def _in_stages(self, passes: ForwardBackward, fetched: FetchedStep, seen: list[Microbatch]) -> None:
        """Compute all microbatches in this rank's stages. Collective: the pipeline's ranks, with the same data."""
        parts, inputs = self._parts, self._parts.precision.inputs
        loaded = list(fetched.microbatches(inputs))
        seen += [one.microbatch.without_batch() for one in loaded]
        if parts.strategy.syncs_every_microbatch:
            most, filler = self._loader.most_microbatches(fetched.step), self._loader.filler(fetched.step)
            loaded += [LoadedMicrobatch(filler, functools.partial(inputs, filler.batch))] * (most - len(loaded))
        if not loaded:
            return
        from shoal.training.microbatch.pipeline_step import StageStep  # imports half a second of torch

        assert parts.pipeline is not None
        batches = [one.batch() for one in loaded]
        parts.clock.mark("forward")
        StageStep(passes, [one.microbatch for one in loaded], batches, own=len(seen)).run(parts.pipeline)

    def _with_gradient(self, step: int, total: Tensor) -> Tensor:
        """Return a total, or a zero with a gradient in its place, where the other ranks synchronize in the backward."""
        found = total if total.requires_grad else self._nothing(step)
        self._output = None  # the graph is about to be freed
        return found

    def _nothing(self, step: int) -> Tensor:
        """Return a zero with a backward through the model, where the other ranks synchronize.

        It replaces a loss without a gradient. If the loss has not called the model, another microbatch's loss does; it
        is the same microbatch on all such ranks.
        """
        parts = self._parts
        with generators_kept(), without_modes():
            for filler in self._loader.fillers(step) if self._output is None else ():
                with parts.computer.scope(filler):
                    parts.computer.loss(parts.precision.inputs(filler.batch))
                if self._output is not None:
                    break
        leaves = [leaf for leaf in tree_leaves(self._output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        nothing = torch.zeros((), device=parts.mesh.device)
        return torch.stack([(leaf * 0.0).sum() for leaf in leaves]).sum() if leaves else nothing

    def _note_output(self, model: nn.Module, args: Any, output: Any) -> None:
        self._output = output


def _kind(module: nn.Module | None) -> str:
    """Return a module's class name, ignoring the classes that torch derives from it to cut parameters."""
    own = (kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))
    return next(own).__name__ if module is not None else ""


def _smaller(job: Job) -> str:
    """Return the remedy for a grain that does not fit in memory."""
    if job.grain_size == 1:
        return 'write memory.recompute = "full", or divide the model: shoal plan says how it fits'
    return (
        f"write Job(grains={-(-job.global_batch // -(-job.grain_size // 2))}): half the samples, and so half the "
        "activations, of a grain (it changes the run); shoal plan says what fits"
    )
