"""Construction of a plan's strategies and of this rank's shard of the model. Every plan passes through this module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.distributed.collectives.base import Team
from shoal.distributed.collectives.choose import not_on, open_collective, open_tree
from shoal.distributed.collectives.fixed_tree import SharedTreeSum, TreeSum
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, EXPERT, EXPERT_COPIES, Mesh
from shoal.distributed.own_collectives import own_collectives_refused
from shoal.distributed.process_setup import return_freed_memory
from shoal.errors import JobError
from shoal.numerics.expert_balance import COUNTS, balanced_routers, count_positions
from shoal.numerics.operators import real_numel
from shoal.numerics.precision import Precision, widest
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.base import Mark, Strategy
from shoal.parallel.blocks.narrow_products import in_precision
from shoal.parallel.blocks.recompute import recompute
from shoal.parallel.data.replicated import DataParallel, ExactDataParallel, GradientBuckets
from shoal.parallel.data.sparse_rows import SparseRows
from shoal.parallel.experts.blocks import ExpertBlock, expert_blocks, refuse_adapted, refuse_mixed
from shoal.parallel.model.deferred_init import SEED_IT, Values, deferred, sample_checksum
from shoal.parallel.model.parameter_hooks import ParameterHooks, refuse_hooks
from shoal.parallel.model.sharded_model import ModelDivision, ShardedModel, TensorSlice, Whole, materialise
from shoal.parallel.shard.update_division import ShardedOptimizer, UpdateDivision
from shoal.plans.plan import Plan
from shoal.plans.resolve import CompletePlan

if TYPE_CHECKING:
    from shoal.parallel.model.trial import ModelTrial
    from shoal.parallel.pipeline.pipeline import Pipeline
    from shoal.parallel.pipeline.stages import Follower, Function
    from shoal.parallel.sequence.plan import ContextPlan


@dataclass(frozen=True)
class ModelSource:
    """Source of a model: its constructor, the random key of the seed, the loss, and a function for a small batch.

    `pair`: (model, batch) -> (total, weight), the loss as the engine computes it, under autocast and with checks.
    `is_compared`: initial values that differ between ranks are refused; False if a checkpoint replaces them.
    """

    make: Callable[[], nn.Module]
    key: int
    loss: Callable[[nn.Module, Any], Any]
    pair: Function
    batch: Callable[[], Any]
    is_compared: bool


# A large model must free gathered parameters: otherwise 100 MB of them became 900 MB in pieces. A small model's steps
# would take 1.3 to 1.8 times as long to save 10 to 100 MB (LeNet, a GPT of 3 M parameters, an MLP of 6 M; 2 CPU ranks).
_LARGE_BYTES = 64 << 20


def divide(source: ModelSource, plan: Plan, mesh: Mesh, precision: Precision) -> tuple[ShardedModel, Pipeline | None]:
    """Return this rank's shard of the model, never built whole, and the pipeline that computes it, if the plan has one.

    Collective: all ranks, two JSON gathers; on the tensor axis two broadcasts; with a pipeline, and with sums in shared
    memory, new groups and all-gathers of a few numbers.
    """
    mesh = mapped(plan, mesh)
    model, values = deferred(source.make, source.key)
    if source.is_compared and mesh.world_size > 1:
        _refuse_unlike(mesh, values, list(dict(model.named_parameters()) | dict(model.named_buffers())))
    in_precision(model, precision)
    if plan.shards_model and sum(p.nbytes for p in model.parameters()) >= _LARGE_BYTES:
        return_freed_memory()
    _refuse_complex(model, plan)
    axes = _Axes(source, plan, mesh, precision, model, expert_blocks(model) if plan.layout.expert > 1 else ())
    axes.division.hooks = hooks = ParameterHooks(model)
    axes.division.marks = marks = {n: dict(vars(p)) for n, p in model.named_parameters() if type(p) is nn.Parameter}
    with own_collectives_refused("the model or loss"):  # only some ranks run the model here
        sequences = axes.sequences(values.whole) if plan.layout.context > 1 else None
        if plan.layout.tensor > 1:
            axes.tensor(values.whole)
        if plan.layout.expert > 1:
            axes.experts(sequences)
        refuse_hooks(hooks, axes.division.parts, plan)
        if sequences is not None:
            axes.context(sequences)
        pipeline = axes.pipeline() if plan.layout.pipeline > 1 else None
    recompute(model, plan.memory.recompute)
    if plan.shards_model:
        axes.shard()
        if pipeline is not None:
            from shoal.parallel.pipeline.stage_units import StageUnits

            keep, late = plan.shard.level == "gradients", plan.shard.reduce == "last_microbatch"
            pipeline = replace(pipeline, alone=False, units=StageUnits(model, pipeline.used, keep=keep, late=late))
    parameters = torch.device("cpu") if plan.shards_model and plan.shard.offload else mesh.device
    materialise(model, values.whole, axes.division, parameters, mesh.device)
    for name, p in model.named_parameters():  # a part is another tensor than what model() has marked
        vars(p).update(marks.get(name, {}))
    return ShardedModel.gathered(mesh, model, axes.division), pipeline


def _refuse_unlike(mesh: Mesh, values: Values, names: Sequence[str]) -> None:
    """Raise JobError if ranks have other initial values. Collective: all ranks, a JSON gather, two if they may."""
    if len(set(mesh.gather_json(values.sources_checksum()))) == 1:
        return
    of_ranks = mesh.gather_json({name: sample_checksum(values.whole(name)).hex() for name in names})
    for rank, own in enumerate(of_ranks):
        if own != of_ranks[0]:
            name = next(name for name in [*of_ranks[0], *own] if own.get(name) != of_ranks[0].get(name))
            raise JobError(
                given=f"model(), which gives other initial values on rank {rank} than on rank 0 ({name})",
                conflict="each rank holds a part of the model, and the parts would be those of different models",
                remedy=f"construct the module inside model(); {SEED_IT}",
            )


def _refuse_complex(model: nn.Module, plan: Plan) -> None:
    """Raise JobError for a complex parameter if the plan cuts parameters or stores them on servers."""
    how = 'server.mode = "' + plan.server.mode + '"' if plan.serves else ""
    how = f"shard.level = {plan.shard.level!r}" if plan.shards_model else how
    how = next((f"{axis} = {n}" for axis in ("tensor", "context") if (n := getattr(plan.layout, axis)) > 1), how)
    name = next((name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()), None)
    if how and name is not None:
        raise JobError(
            given=f"the complex parameter {name}, with {how}",
            conflict="this layout cuts, gathers and sends real numbers",
            remedy='use the data or pipeline axis, or shard.level = "optimizer"; or keep the parameter as '
            "torch.nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex of it in the forward",
        )


def mapped(plan: Plan, mesh: Mesh) -> Mesh:
    """Return the mesh, with shared-memory groups for the axes that divide model or update if the plan sums so.

    Collective: all ranks, a new group for each group of such an axis, an all-gather of three numbers, and what
    `SharedGroup.open` needs. Raises: PlanError on a GPU.
    """
    divided = () if plan.shares_memory else ("data", "shard") if plan.shards_model else ("shard",)
    axes = [axis for axis in divided if axis in mesh.groups]
    axes += ["tensor"] if plan.layout.tensor > 1 else []
    if plan.collectives.all_reduce != "shared_memory" or not axes:
        return mesh
    if mesh.device.type != "cpu":
        raise not_on(mesh.device, "shared_memory")
    from shoal.distributed.collectives.shared_memory.process_group import open_group

    opened = {axis: open_group(list(mesh.layout.groups(axis)), COLLECTIVE_TIMEOUT) for axis in axes}
    return replace(mesh, groups={**mesh.groups, **{axis: group for axis, group in opened.items() if group is not None}})


@dataclass(frozen=True)
class _Axes:
    """The axes along which a model on the meta device is divided, in place, one after the other."""

    source: ModelSource
    plan: Plan
    mesh: Mesh
    precision: Precision
    model: nn.Module
    blocks: Sequence[ExpertBlock] = ()  # the experts to divide
    division: ModelDivision = field(default_factory=ModelDivision)

    def sequences(self, whole: Whole) -> ContextPlan:
        """Plan how the context axis divides sequences. The proof uses the whole model, before other axes cut it."""
        from shoal.parallel.sequence.context_parallel import plan_context

        axis = TensorAxis.of(self.mesh, "context")
        return plan_context(self._trial(whole), axis, self.mesh.device, self.plan.layout.tensor)

    def context(self, sequences: ContextPlan) -> None:
        """Make blocks compute a part of each sequence.

        Collective: none here; their forwards and backwards communicate.
        """
        from shoal.parallel.sequence.context_parallel import apply_context, both

        division, axis = self.division, TensorAxis.of(self.mesh, "context")
        division.outputs = both(apply_context(self.model, sequences, axis), division.outputs)
        division.add_partial(sequences.partial, "context")
        division.sliced = sequences.sliced
        names = {id(module): name for name, module in self.model.named_modules()}
        for router in balanced_routers(self.model):
            name = names[id(router)]
            block = next((block for block in sequences.blocks if name.startswith(f"{block}.")), None)
            if block is None:
                continue  # each rank counts the choices of all positions
            around: Any = self.model.get_submodule(block)
            count_positions(router, around.sequence_role.stream.without_padding)
            division.by_position.add(f"{name}.{COUNTS}")
        division.notes += [f"context: {line}" for line in sequences.notes]

    def tensor(self, whole: Whole) -> None:
        """Cut layers along their features.

        Collective: the tensor axis, two broadcasts; with sequences also the proofs.
        """
        from shoal.parallel.sequence.tensor_sequence import SequencePlan, plan_sequence, tensor_traffic
        from shoal.parallel.tensor.tensor_parallel import apply, plan_model, wholes

        axis, division = TensorAxis.of(self.mesh), self.division
        subject = self._trial(whole)
        plan = plan_model(subject, axis, tuple(f"{block.name}." for block in self.blocks))
        sequences = plan_sequence(subject, plan, axis, self.mesh.device) if self.plan.tensor.sequence else None
        divided = apply(self.model, plan, axis)
        division.parts |= divided.parts
        division.outputs |= wholes(divided, axis)
        division.notes += [f"tensor: {line}" for line in divided.describe()]
        partial = list(divided.partial)
        if sequences is not None:
            division.outputs |= sequences.apply(self.model, axis)
            division.notes += [f"tensor: {line}" for line in sequences.notes]
            partial += sequences.partial
        division.add_partial(dict.fromkeys(partial), "tensor")
        known = sequences or SequencePlan({}, ())
        rows = num_samples(subject.batch) or 1
        division.sends = functools.partial(tensor_traffic, plan, known, rows, axis.degree)

    def experts(self, sequences: ContextPlan | None) -> None:
        """Leave this rank its experts of each mixture. Raises: JobError for experts of whole sequences.

        Collective: none here; forwards and backwards exchange tokens or, in exact mode, experts within the group.
        """
        from shoal.parallel.experts.exchange import divide_block
        from shoal.parallel.experts.gathered import gather_block

        mesh, division = self.mesh, self.division
        size = mesh.layout.expert
        axis = TensorAxis(size, mesh.rank % size, mesh.group(EXPERT))
        tensor = TensorAxis.of(mesh) if mesh.layout.tensor > 1 else None
        for block in self.blocks:
            if sequences is not None and not set(block.parameters) <= set(sequences.partial):
                raise JobError(
                    given=f"layout.context with layout.expert, and the experts {block.name}",
                    conflict="they compute whole sequences on each rank of the context axis, so each token would be "
                    "sent several times",
                    remedy="hold the blocks with these experts in an nn.ModuleList, or use layout.context = 1",
                )
            refuse_adapted(self.model, block)
            refuse_mixed(self.model, block, self.blocks, gathers=self.plan.execution.exact)
            division.experts.update(block.parameters)
            # Modules inside of experts compute rows of several ranks, and not every rank calls each of them.
            inside = (name for name, _ in self.model.named_modules() if name.startswith(f"{block.name}."))
            division.outputs |= dict.fromkeys(inside)
            each = block.count // size
            first, last = axis.place * each, (axis.place + 1) * each
            if block.listed:
                own = tuple(f"{block.of_expert(number)}." for number in range(first, last))
                division.absent.update(name for name in block.parameters if not name.startswith(own))
            else:
                for name in block.parameters:
                    home, _, key = name.rpartition(".")
                    whole = self.model.get_parameter(name)
                    division.parts[name] = part = TensorSlice.whole(whole.shape).narrow(0, first, last)
                    cut = torch.empty(part.local_shape, dtype=whole.dtype, device="meta")
                    self.model.get_submodule(home)._parameters[key] = nn.Parameter(cut, whole.requires_grad)
            if self.plan.execution.exact:
                gather_block(self.model, block, axis, division.gathered)
            else:
                divide_block(self.model, block, axis, tensor, division.expert_loads)
            division.notes.append(f"expert: {block.name}: {each} of {block.count} experts on a rank")

    def pipeline(self) -> Pipeline:
        """Build the pipeline's stages. Collective: all ranks, new groups."""
        from shoal.parallel.pipeline.pipeline import Pipeline, StageMessages
        from shoal.parallel.pipeline.stage_units import StageUnits
        from shoal.parallel.pipeline.stages import Stages

        section, mesh, batch = self.plan.pipeline, self.mesh, self._batch()
        followers: Mapping[str, Follower] = {}
        if mesh.layout.context > 1 or self.plan.tensor.sequence:
            from shoal.parallel.sequence.positions import block_roles

            followers = block_roles(self.model)
        stages = Stages.build(
            self.model,
            self.source.pair,
            batch,
            num_stages=self.plan.layout.pipeline * section.stages_per_rank,
            split=section.split,
            device=mesh.device,
            followers=followers,
        )
        messages = StageMessages.open(list(mesh.layout.groups("pipeline")), mesh.rank, through_host=mesh.through_host)
        alone = mesh.layout.tensor * mesh.layout.context * mesh.layout.expert == 1
        units = StageUnits(self.model, {}, keep=False, late=False)  # none: nothing is cut over the shard axis yet
        pipeline = Pipeline(stages, messages, section.schedule, section.stages_per_rank, mesh.device, units, alone)
        parameters = {name for name, _ in self.model.named_parameters()}
        named = parameters | {name for name, _ in self.model.named_buffers()}
        self.division.absent.update(named.difference(*pipeline.used.values()))
        ranks: dict[str, set[int]] = {}  # of the stages that use a parameter: each rank has a part of its gradient
        for stage, names in enumerate(stages.holds):
            for name in names & parameters:
                ranks.setdefault(name, set()).add(stage % messages.num_ranks)
        shared = {name for name, users in ranks.items() if len(users) > 1}
        self.division.add_partial(shared, "pipeline")
        self.division.is_elsewhere = stages.is_before
        self.division.staged = pipeline.staged(num_samples(batch))
        return pipeline

    def shard(self) -> None:
        """Cut parameters over the shard axis.

        Collective: none here; the forward and backward of each unit communicate.
        """
        from shoal.parallel.shard.zero23 import rows, scalars, shard  # this import takes half a second

        for axis in ("data", "shard"):
            if self.mesh.layout.degree(axis) > 1:
                self.division.add_partial(scalars(self.model), axis)
        division, known = self.division, (self.plan, self.mesh, self.precision)
        shard(self.model, *known, division.absent, experts=division.experts, writing=division.writing)
        self.division.cut = functools.partial(rows, self.mesh)

    def _trial(self, whole: Whole) -> ModelTrial:
        from shoal.parallel.model.trial import ModelTrial

        return ModelTrial(self.model, self.source.loss, self._batch(), whole)

    def _batch(self) -> Any:
        return self.precision.inputs(self.source.batch())


def num_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the first dim of its first tensor or array, 0 if it has none."""
    sized = (leaf for leaf in tree_leaves(batch) if getattr(leaf, "ndim", 0))
    return next((leaf.size(0) if isinstance(leaf, Tensor) else len(leaf) for leaf in sized), 0)


def assemble(
    plan: CompletePlan,
    sharded_model: ShardedModel,
    parameters: Sequence[Tensor],
    num_grains: int,
    mark: Mark,
    *,
    sparse: Sequence[Tensor] = (),
) -> Strategy:
    """Return the strategy of a plan. Raises: PlanError for what this version does not execute; JobError.

    `sparse`: those of the parameters that keep sparse gradients, on the data axis alone.
    """
    mesh = sharded_model.mesh
    _refuse_complex(sharded_model.model, plan)
    reduce = widest(Precision.of(plan.precision, mesh.device).reduce, parameters)
    if plan.collectives.compression != "none" and reduce == torch.float64:
        raise JobError(
            given=f'a model with float64 parameters, with collectives.compression = "{plan.collectives.compression}"',
            conflict="compression begins with gradients in float32",
            remedy='use collectives.compression = "none", or a model in float32',
        )
    if plan.serves:
        from shoal.parallel.data.pushed import ExactPart, FastPart

        if plan.execution.exact:
            return ExactPart(sharded_model, parameters, TreeSum(num_grains, _flat(parameters, reduce)), mark)
        return FastPart(sharded_model, parameters, reduce, mark)
    experts = sharded_model.expert_parameters()
    expert_sums, expert_grains, own_experts = None, None, set(map(id, experts))
    # `parameters` may be of one of several optimizers, but not in exact mode, which a Session has not with experts.
    summed_experts = [p for p in parameters if id(p) in own_experts]
    if experts and plan.execution.exact:
        from shoal.parallel.experts.gathered import ExpertGrains

        expert_grains = ExpertGrains(sharded_model, num_grains, reduce)
    elif summed_experts:
        copies = mesh.layout.expert_copies()
        summing = None
        if len(copies[0]) > 1:
            summing = open_collective(plan.collectives.all_reduce, Team(mesh.group(EXPERT_COPIES), copies), mesh.device)
        expert_sums = GradientBuckets(summed_experts, reduce, len(copies[0]), summing)
    parameters = [p for p in parameters if id(p) not in own_experts]
    if plan.shards_model:
        from shoal.parallel.shard.zero23 import FullySharded

        late = plan.shard.reduce == "last_microbatch"
        return FullySharded(sharded_model, mark, late=late, expert_sums=expert_sums)
    trained = [p for _, p in sharded_model.parameters() if p.requires_grad]
    if plan.shares_memory:
        from shoal.parallel.shard.one_copy import OneCopyUpdate, open_shared

        collective = open_shared(mesh)
        # A gradient in the dtype of the sums is the sum itself, so each rank may take a part of it.
        in_pieces = reduce == torch.float32 and not plan.execution.exact
        division: UpdateDivision = OneCopyUpdate(sharded_model, trained, collective, mark, in_pieces=in_pieces)
        if plan.execution.exact:
            shared_tree = SharedTreeSum(num_grains, _flat(parameters, reduce), collective, one_sum=True)
            return ExactDataParallel(sharded_model, parameters, shared_tree, mark, division)
        return DataParallel(sharded_model, parameters, reduce, mark, division, plan=plan, collective=collective)
    division = UpdateDivision(sharded_model)
    if plan.layout.shard > 1:
        divided = [p for p in trained if id(p) not in own_experts]
        updated = [*parameters, *summed_experts]
        division = ShardedOptimizer(sharded_model, updated, mark, divided, plan.shard.sizes, experts=experts)
    rows = SparseRows(sparse, mesh, reduce)
    dense = [p for p in parameters if all(p is not one for one in sparse)]
    if plan.execution.exact:
        tree = open_tree(plan.collectives.all_reduce, num_grains, _flat(dense, reduce))
        return ExactDataParallel(sharded_model, dense, tree, mark, division, sparse=rows, experts=expert_grains)
    return DataParallel(sharded_model, dense, reduce, mark, division, plan=plan, sparse=rows, expert_sums=expert_sums)


def _flat(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    device = parameters[0].device if parameters else None
    return torch.empty(sum(map(real_numel, parameters)), dtype=dtype, device=device)
