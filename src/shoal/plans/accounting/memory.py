"""Peak memory of a rank in a step, in bytes by category: parameters, gradients, optimizer, activations.

The categories may peak at different moments, so their sum is an upper bound. Not included: buffers of the model,
temporaries inside an operator, the allocator's fragments, the process itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import add

from shoal.plans.accounting.collectives import Array, Gradients, Sharding
from shoal.plans.accounting.partition import gathers, pieces
from shoal.plans.plan import Layout


@dataclass(frozen=True)
class Footprint:
    """Peak bytes of one rank; None if unknown.

    `gathered`: parameters of other ranks' shards that a computing unit needs, with the buffer in which they arrive.
    """

    parameters: int
    gathered: int | None
    gradients: int | None
    optimizer: int | None
    activations: int | None

    def to_json(self) -> dict[str, int | None]:
        """Return the bytes by category."""
        return asdict(self)


@dataclass(frozen=True)
class StateShape:
    """Optimizer state per parameter: number of tensors with the parameter's shape and dtype, and bytes of scalars."""

    tensors: int
    scalar_bytes: int = 0


# torch.optim, with foreach or without. `step`, NAdam's mu_product and ASGD's eta and mu are float32 scalars.
_STATES = {
    "Adam": StateShape(2, 4),
    "AdamW": StateShape(2, 4),
    "NAdam": StateShape(2, 8),
    "RAdam": StateShape(2, 4),
    "Adamax": StateShape(2, 4),
    "Adadelta": StateShape(2, 4),
    "Rprop": StateShape(2, 4),
    "Adagrad": StateShape(1, 4),
    "ASGD": StateShape(1, 12),
    "RMSprop": StateShape(1, 4),
    "Muon": StateShape(1, 0),
    "SGD": StateShape(0, 0),
}


def state_shape(
    optimizer: str, amsgrad: bool = False, momentum: bool = False, centered: bool = False
) -> StateShape | None:
    """Return the state of a torch.optim optimizer, or None if unknown (Adafactor's depends on shapes)."""
    known = _STATES.get(optimizer)
    if known is None:
        return None
    extras = {"Adam": amsgrad, "AdamW": amsgrad, "SGD": momentum, "RMSprop": momentum + centered}
    return StateShape(known.tensors + extras.get(optimizer, 0), known.scalar_bytes)


def whole(arrays: Iterable[Array]) -> int:
    """Return the bytes of these arrays without a division."""
    return sum(a.bytes for a in arrays)


def cut(array: Array, place: int, degree: int) -> Array:
    """Return a rank's rows of `array` if fully_shard cuts dim 0 into `degree` parts: full parts first, then fewer."""
    rows = -(-array.shape[0] // degree)
    mine = min(rows, max(0, array.shape[0] - place * rows))
    return replace(array, shape=(mine, *array.shape[1:]))


def optimizer_state(arrays: Iterable[Array], shape: StateShape) -> int:
    """Return the bytes of the state for the arrays that a rank updates."""
    return sum(shape.tensors * a.bytes + shape.scalar_bytes for a in arrays)


# -------------------------------------------------------------------------------------------------------- gradients


def bucketed(gradients: Gradients, layout: Layout, native: bool = True) -> int:
    """Return the gradient bytes of fast data parallelism at the start of the update.

    They are the buckets, and a copy for each rank of gathered buckets (`native` only). Parameters of another dtype than
    the buckets' have an additional gradient. A single process has only gradients.
    """
    narrow = sum(p.bytes for p in gradients.parameters if p.itemsize != gradients.reduce_itemsize)
    ranks = layout.divides_grains
    if ranks == 1 and not narrow:
        return sum(p.bytes for p in gradients.parameters)
    total = narrow
    for length in gradients.buckets(layout):
        num_bytes = length * gradients.reduce_itemsize
        total += num_bytes
        if native and ranks > 1 and gathers(num_bytes, ranks, gradients.on_cpu):
            total += ranks * num_bytes
    return total


def exact(gradients: Gradients, grains_of_ranks: Sequence[Sequence[int]], num_grains: int, rank: int) -> int:
    """Return the gradient bytes of exact mode at the start of the update.

    They are the tree's template vector, its other vectors and, for several ranks, the sum.
    """
    own = grains_of_ranks[rank]
    tree = max((len(pieces(own[:count], num_grains)) + 1 for count in range(len(own))), default=0)
    vectors = 1 + tree + (len(grains_of_ranks) > 1 or not own)
    narrow = sum(p.bytes for p in gradients.parameters if p.itemsize != gradients.reduce_itemsize)
    return vectors * gradients.numel * gradients.reduce_itemsize + narrow


def shared_pieces(gradients: Gradients, grains_of_ranks: Sequence[Sequence[int]], num_grains: int) -> int:
    """Return the bytes of a rank's slot, without the sum, if exact mode sums through shared memory."""
    most = max(len(pieces(grains, num_grains)) for grains in grains_of_ranks)
    return most * gradients.numel * gradients.reduce_itemsize


# --------------------------------------------------------------------------------------------------------- fully_shard


def sharded_parameters(sharding: Sharding) -> int:
    """Return the bytes of a rank's shard, equal on every rank because dim 0 of each parameter is padded."""

    def own(unit: Sequence[Array]) -> int:
        return sum(sharding.padded_numel(p) // sharding.degree * p.itemsize for p in unit)

    return sum(sharding.each(own))


def gathered_parameters(sharding: Sharding) -> int:
    """Return the bytes of units that stay gathered, and twice the largest other unit: as it arrives and as it is used.

    A unit that stays also needs its arrival buffer until the next unit has arrived. A prefetch takes as much.
    """
    if sharding.degree == 1:
        return 0
    return max(_gathered_at(sharding, sharding.gathered_bytes))


def _gathered_at(sharding: Sharding, sizes: Sequence[int]) -> Iterable[int]:
    # The root, last of the units, is gathered first and stays throughout forward and backward. In the forward an
    # arrival buffer is freed when the next unit has arrived.
    root = len(sizes) - 1
    forward = [root, *range(root)]
    stays, before = 0, 0
    for unit in forward:
        yield stays + before + sizes[unit]  # its gather is issued
        yield stays + 2 * sizes[unit]  # it has arrived
        stays += sizes[unit] if unit in sharding.resident or unit == root else 0
        before = sizes[unit]
    again = [unit for unit in reversed(range(root)) if unit not in sharding.resident]
    if (
        root not in sharding.resident
    ):  # the root was released between forward and backward, and the last unit is prefetched
        yield 2 * sizes[root]
        yield stays + max((sizes[unit] for unit in again[:1]), default=0)
    for unit, following in zip(again, [*again[1:], None], strict=False):
        yield stays + 2 * sizes[unit]
        yield stays + sizes[unit] + (sizes[following] if following is not None else 0)  # the next is prefetched


def scattered_gradients(sharding: Sharding) -> int:
    """Return the peak when a unit's gradients are scattered: its flat whole gradients, and all summed shards.

    The root comes last, so its early gradients wait. From the second scattered microbatch on, all units' shards exist.
    If only the last microbatch is scattered, the other units' whole gradients wait too.
    """
    every = sharding.microbatches > 1 and sharding.reduce_every
    return scattered_peak(sharding.scattered_bytes, waiting_gradients(sharding), sharding.degree, every=every)


def waiting_gradients(sharding: Sharding) -> list[int]:
    """Return the bytes of each unit's gradients before any is scattered."""
    root = len(sharding.units) - 1

    def trained(unit: Sequence[Array]) -> int:
        return sum(p.numel for p in unit if p.trainable)

    early = trained(sharding.units[root]) if sharding.root_early is None else sharding.root_early
    waiting = [0] * root + [early * sharding.gather_itemsize]  # in the backward's dtype
    if sharding.microbatches > 1 and not sharding.reduce_every:  # earlier microbatches, in the reduce dtype
        if sharding.gather_itemsize == sharding.reduce_itemsize:
            waiting[root] = 0  # accumulated in place
        whole = [numel * sharding.reduce_itemsize for numel in sharding.each(trained)]
        waiting = list(map(add, whole, waiting))
    return waiting


def scattered_peak(flat: Sequence[int], waiting: Sequence[int], degree: int, *, every: bool) -> int:
    """Return the peak of units with `flat` bytes to scatter and `waiting` bytes; `every`: for several microbatches."""
    shards = [size // degree for size in flat]
    root = len(flat) - 1
    summed = sum(shards) if every else 0
    peak, left = 0, sum(waiting)
    for unit in [*reversed(range(root)), root]:
        left -= waiting[unit]
        summed += shards[unit]
        peak = max(peak, left + summed + flat[unit])
        summed -= shards[unit] if every else 0
    return peak
