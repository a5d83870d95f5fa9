"""Passes of a Session's step: one reading of its batches on this rank, then the update of some optimizers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint.state import model_tensors
from shoal.checkpoint.whole_optimizer import groups
from shoal.data.loader import Microbatch
from shoal.distributed.collectives.shared_memory.region import why_not_copied
from shoal.distributed.failures import as_shoal_error
from shoal.distributed.mesh import Mesh, together
from shoal.errors import JobError, PlanError, ShoalError, UserCodeError
from shoal.jobs.job import Job, Progress
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.buffer_rules import without_rule
from shoal.numerics.precision import LossScale, Precision
from shoal.parallel.assemble import assemble
from shoal.parallel.base import Flags, Mark, StepSums, Strategy
from shoal.parallel.model.parameter_hooks import ParameterHooks
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.resolve import CompletePlan
from shoal.training.microbatch.loss_pair import check_pair
from shoal.training.microbatch.policy import MicrobatchPolicy, RedoError
from shoal.training.microbatch.step import ForwardBackward, LoadedMicrobatch, LossComputer, StepParts
from shoal.training.observe.trace.recorder import TraceRecorder
from shoal.training.observe.trace.traces import Replay
from shoal.training.observer import Observer, StepClock
from shoal.training.session.arguments import Prepared, Training
from shoal.training.session.gathers import Gathers
from shoal.training.session.guard import ForwardWatch, LoopWatch
from shoal.training.session.optimizers import Groups, OwnStepper, as_one, turned
from shoal.training.setup.choices import CopyNeed, copy_need
from shoal.training.update.optimizer_step import Update, Updater

# Indices of the optimizers that a pass updates, in the order of `prepare`.
Chosen = tuple[int, ...]


@dataclass(frozen=True)
class Base:
    """Mesh, plan, precision and job of a Session, for its loop. `older`: an older version began the training."""

    mesh: Mesh
    plan: CompletePlan
    precision: Precision
    training: Training
    job: Job
    replay: Replay | None
    older: bool = False

    @property
    def records_steps(self) -> bool:
        """True if steps are recorded, for the directory of checkpoints or for callbacks. The same on all ranks."""
        return self.replay is None and (self.training.checkpoints is not None or bool(self.training.callbacks))


@dataclass(frozen=True)
class UpdateWay:
    """Update of one pass.

    `trained`: identities of its `parameters`. `others`: the model's other parameters, which get no gradient from the
    pass.
    """

    parameters: tuple[nn.Parameter, ...]
    trained: tuple[int, ...]
    others: tuple[nn.Parameter, ...]
    strategy: Strategy
    updater: Updater
    stepper: OwnStepper


class UpdateWays:
    """Updates of a Session, constructed on first use, and again if the trained parameters change."""

    def __init__(
        self, base: Base, prepared: Prepared, sharded_model: ShardedModel, observer: Observer, mark: Mark
    ) -> None:
        """Construct the update of each single optimizer. Raises: JobError, PlanError. Collective: all ranks."""
        self._base, self._prepared, self._sharded_model, self._observer = base, prepared, sharded_model, observer
        self._mark = mark
        self._ways: dict[Chosen, UpdateWay] = {}
        self._first = self._all_trained()
        if len(prepared.optimizers) > 1 and base.plan.collectives.compression != "none":
            raise PlanError(
                given=f'collectives.compression = "{base.plan.collectives.compression}" with several optimizers',
                conflict="what is held back of one pass would be added to another's gradients",
                remedy='write compression = "none", or one optimizer with parameter groups',
            )
        if base.plan.shares_memory:
            together(base.mesh, lambda: self._refuse_copies(prepared))
        if not any(map(_trained, [[o] for o in prepared.optimizers])):
            raise JobError(
                given="optimizers without trainable parameters",
                conflict="there is nothing to train",
                remedy="check requires_grad of the parameters that they were given",
            )
        for number, optimizer in enumerate(prepared.optimizers):
            if _trained([optimizer]):
                self.of((number,))

    def of(self, chosen: Chosen) -> UpdateWay:
        """Return the update of the chosen optimizers, constructed if needed.

        Raises: JobError if nothing is trained, or if the trained parameters cannot change with this plan.
        Collective: all ranks, as the strategy, if the update is new.
        """
        base, optimizers = self._base, [self._prepared.optimizers[number] for number in chosen]
        trained, known = _trained(optimizers), self._ways.get(chosen)
        if known is not None and known.trained == trained:
            return known
        self._prepared.check_parameters()
        plan = base.plan
        divides = plan.num_owners > 1 or plan.collectives.compression != "none"
        if divides and self._all_trained() != self._first:
            how = "shard" if plan.layout.shard > 1 else "collectives.compression"
            how = "memory.shared" if plan.shares_memory else how
            raise JobError(
                given=f"parameters that were frozen or unfrozen in the midst of the training, with {how}",
                conflict="the state of each parameter (of the optimizer, of compression) was divided among the "
                "ranks before the first step",
                remedy="set requires_grad before session.steps(), or use the data axis without compression and "
                "shared memory",
            )
        if not trained:
            raise JobError(
                given=f"a pass that updates {', '.join(type(o).__name__ for o in optimizers)}",
                conflict="none of their parameters requires a gradient",
                remedy="leave the pass out, or set requires_grad before it",
            )
        if known is not None and base.plan.shares_memory:
            raise JobError(
                given="an optimizer with other parameters than before the first step, with memory.shared = true",
                conflict="its parameters and their state are in memory that all ranks share",
                remedy="add parameter groups before session.steps(), or use memory.shared = false",
            )
        if known is not None:
            known.strategy.close()
        mine = set(trained)
        exact = base.plan.execution.exact
        named = list(self._sharded_model.parameters())
        parameters = [p for _, p in named if id(p) in mine]
        strategy = assemble(base.plan, self._sharded_model, parameters, base.job.num_grains, self._mark)
        stepper = OwnStepper(optimizers, base.job, exact=exact)
        one = as_one(optimizers, exact)
        updater = Updater(one, base.job, self._observer, strategy, self._sharded_model, exact=exact, stepper=stepper)
        others = tuple(p for _, p in named if id(p) not in mine)
        self._ways[chosen] = UpdateWay(tuple(parameters), trained, others, strategy, updater, stepper)
        return self._ways[chosen]

    def _refuse_copies(self, prepared: Prepared) -> None:
        """Raise JobError for models and optimizers that one copy on a host does not allow."""
        lacking = why_not_copied()
        if lacking is not None:
            CopyNeed("this machine", lacking).refuse()
        if len(prepared.optimizers) > 1:
            CopyNeed(
                f"{len(prepared.optimizers)} optimizers",
                "all ranks have the parameters in one memory, whose update is that of one optimizer",
                ", or one optimizer with parameter groups",
            ).refuse()
        hooked = [*self._sharded_model.hooks.by_name]
        need = copy_need(prepared.root(), prepared.optimizers[0], self._base.training.callbacks, hooked)
        if need is not None:
            need.refuse()

    def _all_trained(self) -> frozenset[int]:
        return frozenset(id(p) for _, p in self._sharded_model.parameters() if p.requires_grad)

    @property
    def strategy(self) -> Strategy:
        """Some strategy. All of them agree on which rank updates a parameter."""
        return next(iter(self._ways.values())).strategy

    def close(self) -> None:
        """Remove the strategies' hooks."""
        for way in self._ways.values():
            way.strategy.close()


def _trained(optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    trained = [id(p) for o in optimizers for group in groups(o) for p in group["params"] if p.requires_grad]
    return tuple(dict.fromkeys(trained))


class LoopComputer(LossComputer):
    """Computer of losses that a user's loop computes. It refuses a buffer without a rule, which no policy can find."""

    def check_buffers(self, buffers: StepBuffers) -> None:
        unknown = sorted(buffers.moved(every=self.computation.randomness == "opaque"))
        if unknown:
            raise without_rule(unknown[0])


class BatchPasses:
    """Execution of passes in turn. `error`: why the last pass failed here. `torn`: an update was interrupted."""

    def __init__(self, base: Base, prepared: Prepared, clock: StepClock) -> None:
        """Construct the passes' parts. Raises: JobError, PlanError. Collective: all ranks."""
        self._base, self._prepared, self._clock = base, prepared, clock
        self._root = prepared.root()
        hooks = ParameterHooks(self._root)
        self.sharded_model = ShardedModel(base.mesh, self._root, divides_state=base.plan.num_owners > 1, hooks=hooks)
        replay = base.replay
        self._observer = TraceRecorder(Path(replay.folder), base.mesh.rank) if replay else Observer()
        self.ways = UpdateWays(base, prepared, self.sharded_model, self._observer, clock.mark)
        self.buffers = StepBuffers(
            self._root,
            declared=base.training.buffers,
            slots=base.mesh.num_data_ranks,
            slot=base.mesh.data_rank,
        )
        known = [name for name, _ in self._root.named_buffers() if name in self.buffers.settled]
        self.buffers.watch(known)
        self.buffers.begin()
        self._parts = functools.partial(
            StepParts,
            mesh=base.mesh,
            precision=base.precision,
            sharded_model=self.sharded_model,
            buffers=self.buffers,
            clock=clock,
            observer=self._observer,
        )
        self.every = as_one(prepared.optimizers, base.plan.execution.exact)
        self._states = ForwardWatch(prepared.models, base.training.allow_state)
        self._count = 0  # number of passes in all steps: a verification compares each update
        self._watch = LoopWatch()
        self._after: Groups | None = None
        self._microbatch: Microbatch | None = None
        self._gathers = Gathers(base.mesh)
        self.error: ShoalError | None = None
        self.torn = False

    def watch(self) -> None:
        """Write the first state if the loop is verified. Collective: as TraceRecorder.attach."""
        if isinstance(self._observer, TraceRecorder):
            self._observer.attach(self.sharded_model, self.every, self.ways.strategy)
            self._mark()

    def _mark(self) -> None:
        """Copy groups and model after an update, to find the loop's own changes before the next update."""
        self._after, self._values = Groups(self._prepared.optimizers), model_tensors(self._root)

    def begin(self, step: int, chosen: Chosen, turn: int, loss_scale: LossScale) -> None:
        """Start a pass: of step `step` (from 0), for the `chosen` optimizers, with index `turn` within the step.

        Raises: JobError if the optimizers have nothing to train; UserCodeError for gradients changed after an update.
        """
        base, self.error = self._base, None
        self._watch.begin(self._prepared.optimizers)
        if base.replay is not None:
            self._replay()
        self._way: UpdateWay = self.ways.of(chosen)
        self._way.stepper.turn = turn
        # The loop computes the loss. Each microbatch is seeded, differently in each pass.
        job = replace(base.job, seed=turned(base.job.seed, turn)) if turn else base.job
        policy = MicrobatchPolicy.of(base.job, base.plan.batch.grains_per_microbatch)
        policy = replace(policy, randomness="scoped" if base.training.fuse else "opaque", by_hash=not base.older)
        computer = LoopComputer(job, self._root, base.precision, policy)
        parts = self._parts(strategy=self._way.strategy, computer=computer)
        factor = loss_scale.factor(base.job.global_batch)
        self._passes = ForwardBackward(parts, factor)
        self._passes.begin(step)
        self._gathers.begin()
        self._observer.begin(self._count, factor)
        self._states.begin(step)

    def _replay(self) -> None:
        """Restore the state of the replayed run, and reapply the loop's own changes of the groups."""
        replay = self._base.replay
        if replay is None or self._after is None:
            return
        if replay.of is None:
            if self._base.mesh.rank == 0:
                replay.note(self._count, self._root, self._values)
            return
        now = Groups(self._prepared.optimizers)
        self._after.put_back()
        replay.start(self._count, self._root, self.every)
        now.put_changes(self._after)

    def batches(self, microbatches: Iterator[Microbatch], count: int) -> Generator[object]:
        """Yield this rank's batches; afterwards `error` has any error of them."""
        replay, precision = self._base.replay, self._base.precision
        self._num_batches = count
        try:
            if replay is not None:
                microbatches = replay.order(microbatches)
            for number in range(count):
                self._clock.mark("data_wait")
                self._microbatch, self._has_loss = next(microbatches), False
                self._last = number == count - 1
                loaded = LoadedMicrobatch(self._microbatch, functools.partial(precision.inputs, self._microbatch.batch))
                with self._passes.scope(loaded) as batch, precision.autocast():
                    yield batch
                    if not self._has_loss:
                        raise UserCodeError(
                            given=f"a batch of step {self._microbatch.step + 1} without step.backward(total, weight)",
                            conflict="every batch belongs to the step's gradient",
                            remedy="call step.backward(total, weight) once for each batch",
                        )
                    self._watch.check(self._prepared.optimizers)
                    self._watch.drop()
                if number == 0:
                    self._states.end()
        except RedoError as redo:
            self.error = UserCodeError(
                given=f"a model that uses {redo}",
                conflict="it cannot be told apart by grain where several grains share a forward",
                remedy="write Session(fuse=False): each batch is then one grain",
            )
        except Exception as error:
            self.error = as_shoal_error(error)
        finally:
            self._watch.drop()
            self._microbatch = None

    def backward(self, number: int, total: Tensor, weight: Tensor | float | None) -> None:
        """Add the current batch's loss. Raises: LossError; UserCodeError without a batch, or for a second call."""
        microbatch = self._microbatch
        if microbatch is None or self._has_loss:
            raise UserCodeError(
                given=f"step.backward() of step {number} "
                + ("a second time for the same batch" if microbatch is not None else "without a batch"),
                conflict="the loss of each batch counts once",
                remedy="call it once within the loop over the batches; add losses up to one total",
            )
        total, weight = check_pair("loss", total if weight is None else (total, weight))
        self._has_loss = True
        self._passes.add(microbatch, self._gathers.tied(total), weight, last=self._last)
        self._watch.note(self._way.parameters, moved=self._base.plan.execution.exact)

    def gather(self, number: int, tensor: Tensor) -> Tensor:
        """Return a tensor by sample for the samples of all ranks. Raises: as `Gathers.gather`; UserCodeError."""
        if self._microbatch is None or self._has_loss:
            raise UserCodeError(
                given=f"step.gather() of step {number} without a batch, or after its step.backward()",
                conflict="it gathers what the loss of a batch compares",
                remedy="call it within the loop over the batches, before step.backward()",
            )
        return self._gathers.gather(tensor, self._microbatch.num_samples, self._num_batches)

    def rate(self, progress: Progress) -> None:
        """Compute the schedule's multiplier for the coming update. A failure goes to `error` before the ranks sum."""
        if self.error is not None:
            return
        try:
            self._way.stepper.foresee(progress)
        except Exception as error:
            self.error = as_shoal_error(error)

    def finish(self, error: ShoalError | None) -> StepSums:
        """Return the sums over all ranks, and set every parameter's gradient. Collective: all ranks."""
        self._gathers.end(failed=error is not None)
        return self._passes.finish(Flags(errors=int(error is not None)), [])

    def update(self, sums: StepSums, loss_scale: LossScale, progress: Progress) -> Update:
        """Step the optimizers of the pass. Raises: as Updater.step."""
        for other in self._way.others:  # drop gradients that the pass has left on other optimizers' parameters
            other.grad = None
        begun = self._way.updater.num_begun
        self._clock.mark("optimizer")
        try:
            update = self._way.updater.step(sums.loss, sums.weight, loss_scale, progress)
        finally:  # an interrupted update leaves parameters that match no step
            self.torn = self._way.updater.num_begun > begun
        said = self._passes.updated(sums, update.skipped)
        if said is not None and self._base.mesh.rank == 0:
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        self._count += 1
        if self._after is not None:
            self._mark()
        self._watch.note(self._way.parameters)
        self.torn = False
        self._clock.mark("other")
        return update

    def close(self) -> None:
        """Remove hooks from the model."""
        self.ways.close()
        self.sharded_model.hooks.give_back(self._root)
        if isinstance(self._observer, TraceRecorder):
            self._observer.close()
