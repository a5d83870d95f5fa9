"""Step: the gradient and the sums of one step on this rank, computed as carefully as the ranks have found needful."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.data.device_transfer import Transfer
from shoal.data.loader import Loader
from shoal.data.microbatch import Microbatch, StepData
from shoal.distributed.agreement import collectively, raise_together
from shoal.distributed.failures import as_shoal_error, is_lost_peer, is_out_of_memory, user_error
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, OutOfMemoryError, ShoalError
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.grain_randomness import NotFusibleError
from shoal.numerics.precision import Precision
from shoal.parallel.base import NUM_SUMS, Flags, StepSums, Strategy, buffer_sums, microbatch_sums
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.computation import LossComputer, MicrobatchPolicy, RedoError, check_gradient
from shoal.training.observer import Observer
from shoal.training.telemetry import StepClock

if TYPE_CHECKING:
    from shoal.parallel.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class StepParts:
    """What a step is computed with. `note` takes a line for people."""

    mesh: Mesh
    precision: Precision
    sharded_model: ShardedModel
    pipeline: Pipeline | None
    strategy: Strategy
    loader: Loader
    transfer: Transfer
    computer: LossComputer
    buffers: StepBuffers
    clock: StepClock
    note: Callable[[str], None]
    observer: Observer


# What this rank says about the next step, from whether it has data for it and whether reading them failed.
Say = Callable[[bool, bool], list[float]]


@dataclass(frozen=True)
class _Fetched:
    """A step that was read: its first microbatch is on its way to the device."""

    data: StepData | None = None
    first: Callable[[], Any] | None = None
    error: ShoalError | None = None


class StepRunner:
    """Computes steps, one after the other; `error` is this rank's own, `seen` the microbatches of the last step."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self.error: ShoalError | None = None
        self.seen: list[Microbatch] = []
        self._proposal: MicrobatchPolicy | None = None
        self._probed = False
        self._too_large, self._unclear = False, False
        self._step = 0
        self._factor = 1.0
        self._ahead: tuple[int, _Fetched] | None = None
        self._first: Callable[[], Any] | None = None

    def recall(self, computation: dict[str, Any]) -> None:
        """Takes up what a run that is resumed had found needful; how many grains fit in memory is found anew."""
        computer = self._parts.computer
        here = computer.computation.grains_per_microbatch
        known = replace(MicrobatchPolicy.from_json(computation), grains_per_microbatch=here)
        computer.computation = computer.computation.with_care_of(known)

    def fetch(self, step: int) -> StepData | None:
        """This rank's part of the step with its first microbatch read, so that a bad sample is known before any sum."""
        self._step = step
        self._parts.clock.mark("data_wait")
        ahead, self._ahead = self._ahead, None
        fetched = ahead[1] if ahead is not None and ahead[0] == step else self._read(step)
        self.error, self._first = fetched.error, fetched.first
        return fetched.data

    @property
    def has_next(self) -> bool:
        """Whether the step after the last one was read already; the same on all ranks once a step has gone well."""
        return self._ahead is not None

    def _next_row(self) -> list[float]:
        fetched = self._ahead[1] if self._ahead is not None else _Fetched()
        return self._say(fetched.data is not None, fetched.error is not None)

    def forget(self) -> None:
        """Drops what was read ahead: another step comes next than the one expected."""
        self._ahead = None

    def _read(self, step: int) -> _Fetched:
        try:
            data = self._parts.loader.step(step)
            if data is None or not data.num_microbatches:
                return _Fetched(data)
            first = next(data.microbatches)
            ready = self._parts.transfer.start(first.batch)
            return _Fetched(data.again(first), ready)
        except Exception as error:
            return _Fetched(error=as_shoal_error(error))

    def run(self, data: StepData | None, factor: float, say: Say) -> StepSums:
        """The step's sums; its loss totals are multiplied by `factor` before the backward.

        Their `rows` are what each rank says of the next step, where all have read it already: see `has_next`.

        Raises: on every rank, where any failed. Collective: all ranks.
        """
        self._factor, self._say = factor, say
        if not self._probed:
            data = self._probe(data)
        while True:
            sums = self._compute(data)
            if sums.flags.errors:
                raise_together(self._parts.mesh, self.error)
            if not sums.flags.redo:
                return sums
            data = self._adopt(self._proposal)

    def _probe(self, data: StepData | None) -> StepData | None:
        """Finds out how the model has to be computed; the ranks take the most careful finding."""
        while True:
            before = self._parts.computer.computation.effective_grains
            first: Microbatch | None = None
            if data is not None and data.num_microbatches:
                first = next(data.microbatches)
                data = data.again(first)
            self._too_large, self._unclear = False, False
            if self._parts.strategy.syncs_every_microbatch:  # the same on all ranks, since they meet in every forward
                first = self._parts.loader.filler(self._step)
            divided = self._parts.sharded_model.divided
            found = collectively(self._parts.mesh, divided, functools.partial(self._propose, first))
            told = self._parts.mesh.all_gather([float(self._too_large), float(self._unclear)])
            again, unclear = told.max(axis=0) > 0
            self._probed = not unclear  # a batch that is not finite tells too little: the next one is asked as well
            changed = self._agreed(found).effective_grains != before
            data = self._adopt(found) if changed else data
            if not again:
                return data

    def _propose(self, first: Microbatch | None) -> MicrobatchPolicy | None:
        if first is None:
            return None
        try:
            finding = self._parts.computer.propose(first, self._parts.buffers)
            self._unclear = not finding.conclusive
            return finding.computation
        except Exception as error:
            if not is_out_of_memory(error) or self._parts.sharded_model.divided:
                raise
            # Nothing is known of the model yet: fewer grains, and the same question again.
            self._too_large = True
            return self._fewer_grains(error)

    def _fewer_grains(self, error: Exception) -> MicrobatchPolicy:
        """Half the grains in a microbatch. Raises: OutOfMemoryError where it is one grain already."""
        computation = self._parts.computer.computation
        if computation.effective_grains == 1:
            raise OutOfMemoryError(
                given="a microbatch of a single grain",
                conflict=f"it does not fit in memory: {str(error).strip()[:200] or type(error).__name__}",
                remedy="use smaller grains: Job(grains=...) larger, or a smaller global_batch",
            ) from error
        torch.cuda.empty_cache()
        return replace(computation, grains_per_microbatch=computation.effective_grains // 2)

    def _agreed(self, proposal: MicrobatchPolicy | None) -> MicrobatchPolicy:
        """Collective: all ranks, one JSON gather."""
        told = self._parts.mesh.gather_json(proposal.to_json() if proposal else None)
        agreed = self._parts.computer.computation
        for document in filter(None, told):
            agreed = agreed.with_care_of(MicrobatchPolicy.from_json(document))
        if agreed.randomness == "opaque" and self._parts.computer.computation.randomness != "opaque":
            self._parts.note("the model draws at random in ways that cannot be told apart by grain: grain by grain")
        elif not agreed.fuse and self._parts.computer.computation.fuse and agreed.grains_per_microbatch > 1:
            self._parts.note(f"grain by grain: {self._parts.computer.why_not_fused(agreed)}")
        self._parts.computer.computation = agreed
        self._parts.buffers.watch(agreed.buffers)
        return agreed

    def _adopt(self, proposal: MicrobatchPolicy | None) -> StepData | None:
        """Agrees on a more careful computation and fetches the step again for it."""
        agreed = self._agreed(proposal)
        self._parts.buffers.restore()
        self.forget()
        self._parts.loader.seek(self._step, agreed.effective_grains)
        self._proposal = None
        data = self.fetch(self._step)
        raise_together(self._parts.mesh, self.error)
        return data

    def _compute(self, data: StepData | None) -> StepSums:
        """Gradients and sums of the step. An exception here leaves every rank in step: it travels with the sums."""
        parts = self._parts
        parts.strategy.begin(self._step, self._factor)
        self._parts.buffers.begin()
        parts.observer.begin(self._step, self._factor)
        self.seen = []
        flags = Flags()
        try:
            if parts.pipeline is not None:
                self._in_stages(parts.pipeline, data)
            else:
                self._in_turn(data)
        except RedoError as redo:
            if (
                parts.strategy.syncs_every_microbatch
            ):  # the others may be in a collective of this microbatch, and not do so
                raise JobError(
                    given=f"a model of which the first batch did not show how it computes: {redo}",
                    conflict="ranks with sharded parameters cannot go back in the midst of a step",
                    remedy='write shard.level = "optimizer", or a model that computes all batches alike',
                ) from redo
            self._proposal, flags = redo.proposal, Flags(redo=1)
        except Exception as error:
            if self._ends_at_once(error):  # the others wait in a collective of this microbatch: this rank ends at once
                raise as_shoal_error(error) from error
            flags = self._failed(error)
        else:
            if parts.loader.looks_ahead:  # while the device computes and the sums are on their way
                parts.clock.mark("data_wait")
                self._ahead = self._step + 1, self._read(self._step + 1)
        row = self._next_row() if parts.mesh.world_size > 1 else []
        return parts.strategy.finish(flags, NUM_SUMS + self._parts.buffers.num_values, row)

    def _in_turn(self, data: StepData | None) -> None:
        """All microbatches, one after the other."""
        parts = self._parts
        own = data.num_microbatches if data is not None else 0
        most = parts.loader.most_microbatches(self._step) if parts.strategy.syncs_every_microbatch else own
        for number in range(most):
            parts.clock.mark("data_wait")
            if data is not None and number < own:
                microbatch = next(data.microbatches)
                self.seen.append(microbatch.without_batch())
                self._microbatch(microbatch, last=number == most - 1)
            else:
                self._fill(parts.loader.filler(self._step), last=number == most - 1)

    def _ends_at_once(self, error: Exception) -> bool:
        """Whether this rank cannot tell the others what it failed of, in a model that they compute together."""
        pipeline = self._parts.pipeline
        told = pipeline is not None and pipeline.alone and not is_lost_peer(error)
        return self._parts.sharded_model.divided and not told

    def _in_stages(self, pipeline: Pipeline, data: StepData | None) -> None:
        """All microbatches through this rank's stages. Collective: the pipeline's ranks, which have the same data."""
        parts = self._parts
        microbatches = list(data.microbatches) if data is not None else []
        own = len(microbatches)
        if parts.strategy.syncs_every_microbatch:
            most = parts.loader.most_microbatches(self._step)
            microbatches += [parts.loader.filler(self._step)] * (most - own)
        if not microbatches:
            return
        from shoal.training.pipeline_step import StageStep  # half a second of torch, which other plans do not need

        first, self._first = self._first, None
        batches = [first() if first is not None else parts.precision.inputs(microbatches[0].batch)]
        batches += [parts.precision.inputs(microbatch.batch) for microbatch in microbatches[1:]]
        self.seen = [microbatch.without_batch() for microbatch in microbatches[:own]]
        parts.clock.mark("forward")
        step = StageStep(parts.computer, parts.strategy, parts.buffers, parts.observer, parts.mesh.counts_loss, own)
        step.run(pipeline, microbatches, batches, self._factor)

    def _failed(self, error: Exception) -> Flags:
        try:
            if is_out_of_memory(error):
                self._proposal = self._fewer_grains(error)
                return Flags(redo=1)
            self.error = as_shoal_error(error)
        except OutOfMemoryError as too_large:
            self.error = too_large
        return Flags(errors=1)

    def _microbatch(self, microbatch: Microbatch, last: bool) -> None:
        parts = self._parts
        parts.clock.mark("host_to_device")
        first, self._first = self._first, None
        batch = first() if first is not None else parts.precision.inputs(microbatch.batch)
        parts.clock.mark("forward")
        parts.observer.microbatch(microbatch, batch)
        with self._parts.computer.scope(microbatch):
            total, weight = self._parts.computer.loss(batch)
            check_gradient(total)
            parts.computer.check_buffers(parts.buffers)
            sums = self._sums(microbatch, total, weight)
            parts.observer.loss(total.detach(), weight)
            parts.clock.mark("backward")
            scaled = total * self._factor if self._factor != 1.0 else total
            try:
                parts.strategy.backward(microbatch, scaled, sums, last)
            except NotFusibleError:
                raise
            except Exception as error:
                if is_out_of_memory(error) or is_lost_peer(error):
                    raise
                raise user_error("the backward", error) from error
        parts.observer.computed()
        self._parts.buffers.restore()

    def _sums(self, microbatch: Microbatch, total: Tensor, weight: Tensor | float) -> Tensor:
        buffers = self._parts.buffers.weighted(microbatch.num_samples)
        if not self._parts.mesh.counts_loss:
            return buffer_sums(buffers)
        return microbatch_sums(microbatch, total, weight, buffers)

    def _fill(self, microbatch: Microbatch, last: bool) -> None:
        """Computes a microbatch of weight zero, in step with ranks that have more of them."""
        parts = self._parts
        with parts.computer.scope(microbatch):
            total, _ = parts.computer.loss(parts.precision.inputs(microbatch.batch))
            sums = torch.zeros(NUM_SUMS + parts.buffers.num_values, dtype=torch.float64, device=parts.mesh.device)
            parts.strategy.backward(microbatch, total * 0.0, sums, last)
        parts.buffers.restore()
