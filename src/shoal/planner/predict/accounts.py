"""Inputs of the memory and traffic accounts (shoal.plans.accounting) for a rank's units, from a profile."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.planner.predict.roofline import ITEMSIZE
from shoal.planner.predict.stage_split import Held
from shoal.planner.profile.values import Body, Unit
from shoal.plans.accounting.collectives import Array, Gradients, Sharding
from shoal.plans.plan import LayoutSection, Plan


class Accounts:
    """Cache of account inputs, computed once for all plans that give a rank the same units."""

    def __init__(self) -> None:
        self._gradients: dict[tuple[Held, int, str, bool], Gradients] = {}
        self._of_bodies: dict[tuple[Body, int], tuple[Array, ...]] = {}
        self._rests: dict[tuple[tuple[Body, ...], int], tuple[Array, ...]] = {}
        self._units: dict[tuple[Held, int], tuple[tuple[tuple[Array, ...], ...], int]] = {}

    def _arrays(self, body: Body, tensor: int) -> tuple[Array, ...]:
        """Return the largest rank's part of each weight of a body, on a tensor axis of this degree."""
        key = body, tensor
        if key not in self._of_bodies:
            self._of_bodies[key] = tuple(
                Array(w.shape_of(tensor), w.itemsize, trainable=w.trainable) for w in body.weights
            )
        return self._of_bodies[key]

    def gradients(self, plan: Plan, held: Held, *, on_cpu: bool) -> Gradients:
        """Return the gradients of a rank with these units, in the reduce dtype of the plan."""
        tensor, reduce = plan.layout.tensor, plan.precision.reduce
        key = held, tensor, reduce, on_cpu
        if key not in self._gradients:
            arrays = (a for unit in held.units for a in self._arrays(unit.body, tensor) if a.trainable)
            self._gradients[key] = Gradients(tuple(arrays), ITEMSIZE[reduce], on_cpu)
        return self._gradients[key]

    def sharding(
        self, plan: Plan, layout: LayoutSection, held: Held, microbatches: int = 1, *, rounds: bool = True
    ) -> Sharding:
        """Return the units that fully_shard makes of a rank's part of the model: one per block, one for the rest."""
        precision = plan.precision
        key = held, layout.tensor
        if key not in self._units:
            arrays = [(unit.body.repeated, self._arrays(unit.body, layout.tensor)) for unit in held.units]
            blocks = (own for repeated, own in arrays if repeated)
            others = tuple(unit.body for unit in held.units if not unit.body.repeated)
            if (others, layout.tensor) not in self._rests:
                self._rests[others, layout.tensor] = tuple(a for repeated, own in arrays if not repeated for a in own)
            rest = self._rests[others, layout.tensor]  # prices are cached by the identity of this tuple
            self._units[key] = (*blocks, rest), _behind_blocks(held.units, layout.tensor)
        units, behind = self._units[key]
        return Sharding(
            units,
            degree=layout.shard,
            replicas=layout.data,
            microbatches=microbatches,
            kept=frozenset(range(len(units))) if plan.shard.level == "gradients" else frozenset(),
            gather_itemsize=ITEMSIZE[precision.parameters],
            reduce_itemsize=ITEMSIZE[precision.reduce],
            reduce_every=plan.shard.reduce == "every_microbatch",
            root_early=behind,
            rounds=rounds,
        )


def _behind_blocks(units: Sequence[Unit], tensor: int) -> int:
    """Count the trained elements after the last block. The backward produces their gradients first."""
    last = max((place for place, unit in enumerate(units) if unit.body.repeated), default=-1)
    return sum(w.numel_of(tensor) for unit in units[last + 1 :] for w in unit.body.weights if w.trainable)
