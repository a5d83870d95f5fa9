"""Peak memory of one rank by category, from its stage's size and its microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.planner.predict.accounts import Accounts
from shoal.planner.predict.roofline import ITEMSIZE, Share, is_layer
from shoal.planner.predict.stage_split import Counts, Held
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import NOTHING, Body, Operation, OperationKind, Phase, Profile, TensorCut
from shoal.plans.accounting.all_reduce import compression_buffers
from shoal.plans.accounting.collectives import Array, owned
from shoal.plans.accounting.memory import (
    bucketed,
    cut,
    gathered_parameters,
    scattered_gradients,
    sharded_parameters,
)
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class StageSize:
    """Elements of a stage's parameters on one rank, and bytes of activation a microbatch."""

    numel: float
    trainable: float
    parameter_bytes: float
    saved: float  # between the forward and the backward of a microbatch
    transient: float  # beside what is saved, at the worst moment of the backward

    @property
    def touched(self) -> float:
        """Bytes that a step goes through: activations, parameters, gradients and a state."""
        return self.saved + 4 * self.parameter_bytes


class Sizes:
    """Bytes of bodies, each computed once for each share of a sample."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[tuple[int, Share, str], tuple[float, float]] = {}
        self._known_weights: dict[tuple[Body, int], tuple[int, int, int]] = {}
        self._saving: dict[Body, list[Operation]] = {}
        self._whole: dict[tuple[int, Share], tuple[float, float]] = {}
        self._stages: dict[tuple[Counts, Share, str], StageSize] = {}

    def stage(self, counts: Counts, share: Share, recompute: str) -> StageSize:
        """The sizes of a rank's units."""
        key = counts, share, recompute
        if key not in self._stages:
            self._stages[key] = self._stage(counts, share, recompute)
        return self._stages[key]

    def _stage(self, counts: Counts, share: Share, recompute: str) -> StageSize:
        numel = trainable = num_bytes = saved = transient = 0.0
        for body, count in counts:
            own, trained, own_bytes = self._weights(body, share.tensor)
            numel += count * own
            trainable += count * trained
            num_bytes += count * own_bytes
            kept, beside = self.body(body, share, recompute)
            saved += count * kept
            transient = max(transient, beside)
        return StageSize(numel, trainable, num_bytes, saved, transient)

    def _weights(self, body: Body, tensor: int) -> tuple[int, int, int]:
        """(elements, those that are trained, bytes) of a unit's parameters on one of so many ranks."""
        key = body, tensor
        if key not in self._known_weights:
            sizes = [(w, w.numel_of(tensor)) for w in body.weights]
            trained = sum(numel for w, numel in sizes if w.trainable)
            self._known_weights[key] = sum(n for _, n in sizes), trained, sum(n * w.itemsize for w, n in sizes)
        return self._known_weights[key]

    def body(self, body: Body, share: Share, recompute: str) -> tuple[float, float]:
        """(what a unit keeps of a microbatch, what its backward needs beside that)."""
        share = share.of(body, self._program.divides_ends)
        key = id(body), share, recompute
        if key not in self._known:
            self._known[key] = self._body(body, share, recompute)
        return self._known[key]

    def _body(self, body: Body, share: Share, recompute: str) -> tuple[float, float]:
        key = id(body), share
        if key not in self._whole:
            if body not in self._saving:  # the others would add 0.0
                self._saving[body] = [o for o in body.operations if o.saved_bytes != NOTHING]
            saved = sum(self._saved(body, o, share) for o in self._saving[body])
            self._whole[key] = saved, _working(body.operations, share)
        saved, working = self._whole[key]
        if not body.repeated or recompute == "none":
            return saved, working
        kept = self._kept_on_purpose(body, share, saved, recompute)
        return kept, saved - kept + working

    def _saved(self, body: Body, operation: Operation, share: Share) -> float:
        """Bytes that autograd keeps for an operation; of a layer that is cast its input may be kept as it was cast."""
        num_bytes = operation.saved_bytes.at(share.local_samples) / _saved_divided(operation, share, self._program)
        cast = self._program.layers if self._program.keeps_cast and body.repeated else None
        return num_bytes * ITEMSIZE[cast] / 2 if cast is not None and is_layer(operation) else num_bytes

    def _kept_on_purpose(self, body: Body, share: Share, saved: float, recompute: str) -> float:
        """Bytes that a block keeps of `saved`, where the rest is computed again."""
        samples, selective = share.local_samples, self._program.selective
        entering = body.input_bytes.at(samples) / (share.tensor if share.sequence else 1)
        if recompute == "full":
            return min(entering, saved)
        if selective == "all_but_attention":
            return saved - sum(self._saved(body, o, share) for o in _scores(body.operations))
        chosen = body.operations if selective == "products" else kept_alternately(body.operations)
        kept = sum(o.selected_bytes.at(samples) / _output_divided(o, share) for o in chosen)
        return min(kept if selective == "products" else kept + entering, saved)


def _working(operations: Sequence[Operation], share: Share) -> float:
    """Bytes beside what is saved at the worst moment of a backward: an operator's output, and the gradient it reads.

    That gradient is what the operator before it wrote.
    """
    samples, worst, before = share.local_samples, 0.0, 0.0
    for operation in operations:
        phase = operation.phase
        if phase is Phase.FORWARD:
            continue
        written = operation.written_bytes.at(samples) / _output_divided(operation, share)
        if written + before > worst:
            worst = written + before
        if phase is Phase.BACKWARD_INPUT:
            before = written
    return worst


def kept_alternately(operations: Sequence[Operation]) -> list[Operation]:
    """Forward operations whose outputs are kept where that is attention and every second product, from the first on."""
    layers = [o for o in operations if o.phase is Phase.FORWARD and o.kind is OperationKind.MATMUL]
    attention = [o for o in operations if o.phase is Phase.FORWARD and o.kind is OperationKind.ATTENTION]
    return layers[::2] + attention


def _scores(operations: Sequence[Operation]) -> list[Operation]:
    """From the attention's scores to their product with the values, where they are not fused."""
    forward = [o for o in operations if o.phase is Phase.FORWARD]
    places = [i for i, o in enumerate(forward) if o.flops.at(1) and o.batch.per_sample and o.k.at(1)]
    return forward[places[0] + 1 : places[-1] + 1] if len(places) > 1 else []


def _saved_divided(operation: Operation, share: Share, program: Program) -> float:
    """A column-parallel layer keeps its whole input, a row-parallel one its part."""
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
class States:
    """Bytes of a rank's parameters, gradients and optimizer state, by the formulas that a run is compared with."""

    profile: Profile
    program: Program
    accounts: Accounts
    _least: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)
    _gathered: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False)

    @property
    def _per_element(self) -> float:
        return self.profile.state_bytes_per_element + self.program.master_bytes

    def _per_gradient(self, plan: Plan) -> float:
        given = self.program.gradient_bytes
        return ITEMSIZE[plan.precision.reduce] if given is None else given

    def bytes(self, plan: Plan, held: Held, size: StageSize, microbatches: int, *, on_cpu: bool) -> _Bytes:
        """Bytes by category of a rank with these units."""
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

    def least(self, plan: Plan, held: Held, size: StageSize, microbatches: int) -> float:
        """Bytes that such a rank has at least, whatever rows are rounded up to and whoever owns which state.

        They shrink with the shard axis, and the data axis does not matter.
        """
        layout, shard, precision = plan.layout, plan.shard, plan.precision
        trained = size.trainable / layout.shard
        if not plan.shards_model:
            summed, trained = size.trainable * self._per_gradient(plan), size.trainable / plan.num_owners
            return size.parameter_bytes / plan.num_copies_shared + summed + self._per_element * trained
        widths = precision.parameters, precision.reduce
        key = held, layout.shard, layout.tensor, widths, shard.level, shard.reduce, microbatches > 1
        if key not in self._least:
            sharding = self.accounts.sharding(plan, layout, held, microbatches, rounds=False)
            same = held, layout.tensor, precision.parameters, shard.level  # unrounded, these are whatever the degree is
            if same not in self._gathered:
                self._gathered[same] = gathered_parameters(sharding)
            of_units = self._gathered[same] + scattered_gradients(sharding)
            self._least[key] = size.parameter_bytes / layout.shard + of_units + self._per_element * trained
        return self._least[key]

    def of_block(self, plan: Plan, size: StageSize) -> tuple[float, float]:
        """Bytes that `least` has at least for each such block of a rank, and once where there is any."""
        shard, precision = plan.layout.shard, plan.precision
        state = self._per_element * size.trainable / shard
        if not plan.shards_model:
            state = self._per_element * size.trainable / plan.num_owners
            parameters = size.parameter_bytes / plan.num_copies_shared
            return parameters + state + size.trainable * self._per_gradient(plan), 0.0
        gathered, flat = size.numel * ITEMSIZE[precision.parameters], size.trainable * ITEMSIZE[precision.reduce]
        stays = gathered if plan.shard.level == "gradients" else 0.0
        # A block's gradients are whole when they are scattered, and a gathered one has another beside it.
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
            owners = owned(gradients.parameters, plan.num_owners)
            trained = max(sum(array.numel for array in mine) for mine in owners)
        return {
            "parameters": size.parameter_bytes / plan.num_copies_shared,
            "gathered": 0.0,
            "gradients": summed,
            "optimizer": self._per_element * trained,
        }
