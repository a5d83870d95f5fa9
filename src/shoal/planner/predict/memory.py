"""Peak memory of one rank by category, from the size of its stage and its microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shoal.planner.predict.accounts import Accounts
from shoal.planner.predict.roofline import ITEMSIZE, is_layer
from shoal.planner.predict.share import Share
from shoal.planner.predict.stage_split import Counts, Held
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import NOTHING, Amount, Body, Operation, OperationKind, Phase, Profile, TensorCut
from shoal.plans.accounting.all_reduce import compression_buffers
from shoal.plans.accounting.collectives import Array, owned
from shoal.plans.accounting.memory import (
    bucketed,
    cut,
    gathered_parameters,
    scattered_gradients,
    scattered_peak,
    sharded_parameters,
    waiting_gradients,
)
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class StageSize:
    """Elements of a stage's parameters on one rank, and bytes of activations per microbatch."""

    numel: float
    trainable: float
    parameter_bytes: float
    saved: float  # between the forward and the backward of a microbatch
    transient: float  # in addition to `saved`, at the peak of the backward

    @property
    def touched(self) -> float:
        """Bytes that a step touches: activations, parameters, gradients and one optimizer state."""
        return self.saved + 4 * self.parameter_bytes


class Rank(NamedTuple):
    """Pipeline rank at index `place`: its units, their size, its microbatches in flight, and bytes of activations."""

    place: int
    held: Held
    size: StageSize
    in_flight: float  # equivalent number of microbatches on all stages of the rank
    activations: float


def rank_at(place: int, held: Held, size: StageSize, in_flight: float) -> Rank:
    """Return the rank with `in_flight` microbatches in flight."""
    return Rank(place, held, size, in_flight, in_flight * size.saved + size.transient)


class Sizes:
    """Bytes of bodies, cached by the share of a sample."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[tuple[int, Share, str], tuple[float, float]] = {}
        self._known_weights: dict[tuple[Body, int], tuple[int, int, int]] = {}
        self._parts: dict[tuple[int, int, bool], OperationBytes] = {}
        self._whole: dict[tuple[int, Share], tuple[float, float]] = {}
        self._stages: dict[tuple[Counts, Share, str], StageSize] = {}

    def stage(self, counts: Counts, share: Share, recompute: str) -> StageSize:
        """Return the size of a rank's units."""
        key = counts, share, recompute
        if key not in self._stages:
            numel = trainable = num_bytes = saved = transient = 0.0
            for body, count in counts:
                own, trained, own_bytes = self._weights(body, share.tensor)
                numel += count * own
                trainable += count * trained
                num_bytes += count * own_bytes
                kept, beside = self.body(body, share, recompute)
                saved += count * kept
                transient = max(transient, beside)
            self._stages[key] = StageSize(numel, trainable, num_bytes, saved, transient)
        return self._stages[key]

    def _weights(self, body: Body, tensor: int) -> tuple[int, int, int]:
        """Return the elements, trained elements and bytes of a unit's parameters on one tensor rank."""
        key = body, tensor
        if key not in self._known_weights:
            sizes = [(w, w.numel_of(tensor)) for w in body.weights]
            trained = sum(numel for w, numel in sizes if w.trainable)
            self._known_weights[key] = sum(n for _, n in sizes), trained, sum(n * w.itemsize for w, n in sizes)
        return self._known_weights[key]

    def body(self, body: Body, share: Share, recompute: str) -> tuple[float, float]:
        """Return the bytes that a unit saves per microbatch, and the further bytes that its backward needs."""
        share = share.of(body, self._program.divides_ends)
        key = id(body), share, recompute
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._body(body, share, recompute)
        return found

    def _body(self, body: Body, share: Share, recompute: str) -> tuple[float, float]:
        key, samples = (id(body), share), share.local_samples
        if key not in self._whole:
            parts = self._parts_of(body, share)
            # At once, a backward uses an output and the gradient it reads, which the operator before wrote.
            worst = before = 0.0
            for (whole, by, _), is_read in parts.written:
                own = (whole.fixed + whole.per_sample * samples) / by
                if own + before > worst:
                    worst = own + before
                if is_read:
                    before = own
            self._whole[key] = _sum(parts.saved, samples), worst
        saved, working = self._whole[key]
        if not body.repeated or recompute == "none":
            return saved, working
        kept = self._kept_on_purpose(body, share, saved, recompute)
        return kept, saved - kept + working

    def _parts_of(self, body: Body, share: Share) -> OperationBytes:
        """Return the bytes of a unit's operations on one rank, for any number of samples."""
        key = id(body), share.tensor, share.sequence
        if key not in self._parts:
            every, selective = body.operations, self._program.selective
            chosen = every if selective == "products" else kept_alternately(every)
            later = [o for o in every if o.phase is not Phase.FORWARD]
            self._parts[key] = OperationBytes(  # operations without bytes are skipped
                [self._saved(body, o, share) for o in every if o.saved_bytes != NOTHING],
                [_Part(o.selected_bytes, _output_divided(o, share)) for o in chosen if o.selected_bytes != NOTHING],
                [(_Part(o.written_bytes, _output_divided(o, share)), o.phase is Phase.BACKWARD_INPUT) for o in later],
            )
        return self._parts[key]

    def _saved(self, body: Body, operation: Operation, share: Share) -> _Part:
        """Return the bytes that autograd saves for an operation. A cast layer may save the cast input."""
        cast = self._program.layers if self._program.keeps_cast and body.repeated and is_layer(operation) else None
        by = _saved_divided(operation, share, self._program)
        return _Part(operation.saved_bytes, by, 2 if cast is None else ITEMSIZE[cast])

    def _kept_on_purpose(self, body: Body, share: Share, saved: float, recompute: str) -> float:
        """Return the part of a block's `saved` bytes that stays in memory under recomputation."""
        samples, selective = share.local_samples, self._program.selective
        entering = body.input_bytes.at(samples) / (share.tensor if share.sequence else 1)
        if recompute == "full":
            return min(entering, saved)
        if selective == "all_but_attention":
            return saved - _sum([self._saved(body, o, share) for o in _scores(body.operations)], samples)
        kept = _sum(self._parts_of(body, share).selected, samples)
        return min(kept if selective == "products" else kept + entering, saved)


class _Part(NamedTuple):
    """One rank's part of an operation's bytes: `whole` divided by `by`, with `width` bytes per 16-bit element."""

    whole: Amount
    by: float
    width: int = 2


class OperationBytes(NamedTuple):
    """Bytes of a unit's operations on one rank: saved, kept by selective recomputation, and written in the backward.

    `written` pairs each part with whether the next operation reads it as its gradient.
    """

    saved: list[_Part]
    selected: list[_Part]
    written: list[tuple[_Part, bool]]


def _sum(parts: Sequence[_Part], samples: float) -> float:
    return sum((whole.fixed + whole.per_sample * samples) / by * width / 2 for whole, by, width in parts)


def kept_alternately(operations: Sequence[Operation]) -> list[Operation]:
    """Return the forward operations with kept outputs: attention and every second product, from the first on."""
    layers = [o for o in operations if o.phase is Phase.FORWARD and o.kind is OperationKind.MATMUL]
    attention = [o for o in operations if o.phase is Phase.FORWARD and o.kind is OperationKind.ATTENTION]
    return layers[::2] + attention


def _scores(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations from the attention scores to their product with the values, if not fused."""
    forward = [o for o in operations if o.phase is Phase.FORWARD]
    places = [i for i, o in enumerate(forward) if o.flops.at(1) and o.batch.per_sample and o.k.at(1)]
    return forward[places[0] + 1 : places[-1] + 1] if len(places) > 1 else []


def _saved_divided(operation: Operation, share: Share, program: Program) -> float:
    """Return the number of tensor ranks that divide a saved input. A column-parallel layer saves the whole input."""
    if operation.cut in (TensorCut.K, TensorCut.ALL, TensorCut.BATCH):
        return share.tensor
    if operation.cut is TensorCut.N and program.keeps_gathered:
        return 1
    return share.tensor if share.sequence and operation.cut in (TensorCut.N, TensorCut.SEQUENCE) else 1


def _output_divided(operation: Operation, share: Share) -> float:
    cut = operation.cut
    if cut is TensorCut.NONE or share.tensor == 1:
        return 1
    if cut is TensorCut.SEQUENCE:
        return share.tensor if share.sequence else 1
    return 1 if cut is TensorCut.K else share.tensor


_Bytes = dict[str, float]  # by category


@dataclass(frozen=True)
class Unrounded:
    """Bytes of the gathers and scatters of a rank's units on any shard degree, without rounding up rows.

    `every`: the gradients of every microbatch are scattered, and there are several.
    """

    gathered: int
    flat: Sequence[int]
    waiting: Sequence[int]
    every: bool
    _known: dict[int, int] = field(default_factory=dict, repr=False)

    def on(self, degree: int) -> int:
        """Return the largest number of bytes on one of `degree` ranks."""
        if degree not in self._known:
            scattered = scattered_peak(self.flat, self.waiting, degree, every=self.every)
            self._known[degree] = self.gathered + scattered
        return self._known[degree]


@dataclass(frozen=True)
class States:
    """Bytes of parameters, gradients and optimizer state of a rank, by the formulas that a run is compared with."""

    profile: Profile
    program: Program
    accounts: Accounts
    _owned: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    _unrounded: dict[tuple[object, ...], Unrounded] = field(default_factory=dict, repr=False)

    @cached_property
    def _per_element(self) -> float:
        return self.profile.state_bytes_per_element + self.program.master_bytes

    def _per_gradient(self, plan: Plan) -> float:
        given = self.program.gradient_bytes
        return ITEMSIZE[plan.precision.reduce] if given is None else given

    def bytes(self, plan: Plan, held: Held, size: StageSize, microbatches: int, *, on_cpu: bool) -> _Bytes:
        """Return the bytes by category of a rank with these units."""
        if not plan.shards_model:
            return self._whole(plan, held, size, on_cpu=on_cpu)
        sharding = self.accounts.sharding(plan, plan.layout, held, microbatches)

        def updated(unit: Sequence[Array]) -> int:
            return sum(cut(array, 0, sharding.degree).numel for array in unit if array.trainable)

        return {
            "parameters": sharded_parameters(sharding),
            "gathered": gathered_parameters(sharding),
            "gradients": scattered_gradients(sharding),
            "optimizer": self._per_element * sum(sharding.each(updated)),
        }

    def least(self, plan: Plan, ranks: Sequence[Rank], microbatches: int) -> list[float]:
        """Return lower bounds of the bytes of these ranks, for any rounding of rows and any owners of states.

        The bounds shrink with the shard degree and do not depend on the data degree.
        """
        per_element, shard = self._per_element, plan.layout.shard
        if plan.shards_model:
            units = [self._of_units(plan, rank.held, microbatches).on(shard) for rank in ranks]
            sizes = [(rank.size, own) for rank, own in zip(ranks, units, strict=True)]
            return [s.parameter_bytes / shard + own + per_element * (s.trainable / shard) for s, own in sizes]
        per_gradient, copies, owners = self._per_gradient(plan), plan.num_copies_shared, plan.num_owners
        return [
            s.parameter_bytes / copies + s.trainable * per_gradient + per_element * (s.trainable / owners)
            for s in (rank.size for rank in ranks)
        ]

    def _of_units(self, plan: Plan, held: Held, microbatches: int) -> Unrounded:
        shard, precision = plan.shard, plan.precision
        widths = precision.parameters, precision.reduce
        key = held, plan.layout.tensor, widths, shard.level, shard.reduce, microbatches > 1
        if key not in self._unrounded:
            sharding = self.accounts.sharding(plan, plan.layout, held, microbatches, rounds=False)
            every = microbatches > 1 and sharding.reduce_every
            own = gathered_parameters(sharding), sharding.scattered_bytes, waiting_gradients(sharding)
            self._unrounded[key] = Unrounded(*own, every)
        return self._unrounded[key]

    def of_block(self, plan: Plan, size: StageSize) -> tuple[float, float]:
        """Return lower bounds of the bytes that `least` counts per block, and once per rank with blocks."""
        shard, precision = plan.layout.shard, plan.precision
        state = self._per_element * size.trainable / shard
        if not plan.shards_model:
            state = self._per_element * size.trainable / plan.num_owners
            parameters = size.parameter_bytes / plan.num_copies_shared
            return parameters + state + size.trainable * self._per_gradient(plan), 0.0
        gathered, flat = size.numel * ITEMSIZE[precision.parameters], size.trainable * ITEMSIZE[precision.reduce]
        stays = gathered if plan.shard.level == "gradients" else 0.0
        # A block's gradients are whole until they are scattered, and two gathered blocks are in memory at once.
        own = size.parameter_bytes / shard + state + max(0.0, flat / shard - 1)
        return own + stays, 2 * gathered - stays + flat

    def _whole(self, plan: Plan, held: Held, size: StageSize, *, on_cpu: bool) -> _Bytes:
        program = self.program
        gradients = self.accounts.gradients(plan, held, on_cpu=on_cpu)
        summed, trained = size.trainable * self._per_gradient(plan), size.trainable / plan.num_owners
        if program.own_buckets:
            compresses = plan.collectives.compression != "none" and plan.layout.world_size > 1
            native = plan.collectives.all_reduce == "native"
            summed = compression_buffers(gradients, plan) if compresses else bucketed(gradients, plan.degrees, native)
            key = id(gradients), plan.num_owners
            if key not in self._owned:
                owners = owned(gradients.parameters, plan.num_owners)
                self._owned[key] = max(sum(array.numel for array in mine) for mine in owners)
            trained = self._owned[key]
        return {
            "parameters": size.parameter_bytes / plan.num_copies_shared,
            "gathered": 0.0,
            "gradients": summed,
            "optimizer": self._per_element * trained,
        }
