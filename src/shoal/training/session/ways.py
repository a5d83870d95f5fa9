"""Strategy and optimizer step for each set of optimizers that a pass updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, PlanError
from shoal.job import Job
from shoal.numerics.precision import Precision
from shoal.parallel.assemble import assemble
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.resolve import CompletePlan
from shoal.training.observer import Observer
from shoal.training.optimizer_step import Updater
from shoal.training.session.prepared import Prepared
from shoal.training.session.rates import OwnStepper, as_one
from shoal.training.session.training import Training
from shoal.training.trace.replay import Replay

# The numbers of the optimizers that a pass updates, in the order of `prepare`.
Chosen = tuple[int, ...]


@dataclass(frozen=True)
class Base:
    """Mesh, plan, precision and job of a Session, for its loop."""

    mesh: Mesh
    plan: CompletePlan
    precision: Precision
    training: Training
    job: Job
    replay: Replay | None
    says_workers: bool = False  # the plan, how many processes read the data


@dataclass(frozen=True)
class UpdateWay:
    """Update of one pass. `trained`: its `parameters` by identity; `others` get no gradient from it."""

    parameters: tuple[nn.Parameter, ...]
    trained: tuple[int, ...]
    others: tuple[nn.Parameter, ...]
    strategy: Strategy
    updater: Updater
    stepper: OwnStepper

    def drop_others(self) -> None:
        """No gradient that this pass has left on another optimizer's parameters outlives it."""
        for parameter in self.others:
            parameter.grad = None


class UpdateWays:
    """Updates of a Session, constructed on first use, and again where other parameters are trained."""

    def __init__(self, base: Base, prepared: Prepared, sharded_model: ShardedModel, observer: Observer) -> None:
        """Collective: all ranks, as the strategies. Raises: JobError, PlanError."""
        self._base, self._prepared, self._sharded_model, self._observer = base, prepared, sharded_model, observer
        self._made: dict[Chosen, UpdateWay] = {}
        self._first = self._all_trained()
        if len(prepared.optimizers) > 1 and base.plan.collectives.compression != "none":
            raise PlanError(
                given=f'collectives.compression = "{base.plan.collectives.compression}" with several optimizers',
                conflict="what is held back of one pass would be added to another's gradients",
                remedy='write compression = "none", or one optimizer with parameter groups',
            )
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
        """The way of a pass that updates these. Collective where it is new: all ranks, as the strategy.

        Raises: JobError where they have nothing to train, or other parameters than can be taken up in the midst.
        """
        optimizers = [self._prepared.optimizers[number] for number in chosen]
        trained, known = _trained(optimizers), self._made.get(chosen)
        if known is not None and known.trained == trained:
            return known
        self._prepared.check_parameters()
        self._refuse_changes()
        if not trained:
            raise JobError(
                given=f"a pass that updates {', '.join(type(o).__name__ for o in optimizers)}",
                conflict="none of their parameters requires a gradient",
                remedy="leave the pass out, or set requires_grad before it",
            )
        if known is not None:
            known.strategy.close()
        self._made[chosen] = self._make(optimizers, trained)
        return self._made[chosen]

    def _make(self, optimizers: list[Optimizer], trained: tuple[int, ...]) -> UpdateWay:
        base, mine = self._base, set(trained)
        exact = base.plan.execution.exact
        named = list(self._sharded_model.parameters())
        parameters = [p for _, p in named if id(p) in mine]
        strategy = assemble(base.plan, self._sharded_model, parameters, base.job.grains, lambda span: None)
        stepper = OwnStepper(optimizers, base.job, exact=exact)
        one = as_one(optimizers, exact)
        updater = Updater(one, base.job, self._observer, strategy, self._sharded_model, exact=exact, stepper=stepper)
        others = tuple(p for _, p in named if id(p) not in mine)
        return UpdateWay(tuple(parameters), trained, others, strategy, updater, stepper)

    def _all_trained(self) -> frozenset[int]:
        return frozenset(id(p) for _, p in self._sharded_model.parameters() if p.requires_grad)

    def _refuse_changes(self) -> None:
        plan = self._base.plan
        if self._all_trained() == self._first or not (plan.layout.shard > 1 or plan.collectives.compression != "none"):
            return
        how = "shard" if plan.layout.shard > 1 else "collectives.compression"
        raise JobError(
            given=f"parameters that were frozen or unfrozen in the midst of the training, with {how}",
            conflict="what ranks keep for each parameter was divided among them before the first step",
            remedy="set requires_grad before session.steps(), or use the data axis without compression",
        )

    @property
    def strategy(self) -> Strategy:
        """Any one strategy: which rank updates a parameter is the same in all."""
        return next(iter(self._made.values())).strategy

    def close(self) -> None:
        """Takes the strategies' hooks off."""
        for way in self._made.values():
            way.strategy.close()


def _trained(optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    return tuple(id(p) for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad)
