"""Validation of a plan: by itself, by tables of settings that exclude each other or have no effect, and against a job.

All conflicts are reported at once, with the nearest legal values. Integers and names only; `structure.facts_of` reads
them from a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import PlanError, nearest
from shoal.plans.grains import UNEVEN, enough_grains, excess_of_shares, legal_data_degrees, share_sizes
from shoal.plans.plan import AXES, Layout, Plan, degrees_in_use, divisors
from shoal.plans.rules import (
    CAPTURED,
    FLOAT8,
    WITHOUT_EFFECT,
    Conflict,
    Rule,
    is_compressed,
    is_wide,
    shown,
    value,
    without,
)


def _pipelined(plan: Plan, *schedules: str) -> bool:
    return is_wide(plan, "pipeline") and plan.pipeline.schedule in schedules


# With this many ranks, each has 4 of the 127 levels of a signed byte.
MOST_INT8_RANKS = 31

_NOT_EXACT = "bits are fixed along the data and expert axes and a sharded optimizer: the {} axis adds in its own order"

# Each row is one refusal; all rows that apply are reported together.
CONFLICTS: tuple[Rule, ...] = (
    *(
        Rule(
            lambda plan, axis=axis: plan.execution.exact and is_wide(plan, axis),  # type: ignore[misc]
            (f"layout.{axis}", "execution.exact"),
            _NOT_EXACT.format(axis),
            f"execution.exact = false, or {without(axis, 'data or shard axis')}",
        )
        for axis in ("tensor", "pipeline", "context")
    ),
    Rule(
        lambda plan: plan.execution.exact and plan.shards_model,
        ("shard.level", "layout.shard", "execution.exact"),
        "a reduce-scatter adds in an order of its own: bits are fixed where the shard axis divides the optimizer only",
        'shard.level = "optimizer", or execution.exact = false',
    ),
    Rule(
        lambda plan: _pipelined(plan, "interleaved_1f1b") and plan.pipeline.stages_per_rank < 2,
        ("pipeline.stages_per_rank", "pipeline.schedule"),
        "interleaved_1f1b runs several stages in turn on each rank",
        'pipeline.stages_per_rank = 2 or more, or pipeline.schedule = "1f1b"',
    ),
    Rule(
        lambda plan: _pipelined(plan, "1f1b", "zero_bubble") and plan.pipeline.stages_per_rank > 1,
        ("pipeline.stages_per_rank", "pipeline.schedule"),
        "this schedule runs one stage on each rank",
        'pipeline.stages_per_rank = 1, or pipeline.schedule = "interleaved_1f1b"',
    ),
    Rule(
        lambda plan: plan.shard.offload and is_wide(plan, "shard") and not plan.shards_model,
        ("shard.offload", "shard.level"),
        "where the optimizer's state alone is divided every rank holds the parameters where it computes",
        'shard.offload = false, or shard.level = "gradients" or "parameters"',
    ),
    Rule(
        lambda plan: _pipelined(plan, "zero_bubble") and plan.execution.compile != "none",
        ("execution.compile", "pipeline.schedule"),
        "the backward of a compiled block is one: it does not come in two halves",
        'execution.compile = "none", or pipeline.schedule = "1f1b"',
    ),
    Rule(
        lambda plan: plan.tensor.sequence and is_wide(plan, "tensor") and is_wide(plan, "context"),
        ("tensor.sequence", "layout.tensor", "layout.context"),
        "both divide the positions of a sequence, and a rank would have a part of a part",
        "tensor.sequence = false, or layout.context = 1",
    ),
    Rule(
        lambda plan: plan.collectives.all_reduce not in ("native", "shared_memory") and plan.execution.exact,
        ("collectives.all_reduce", "execution.exact"),
        "exact mode sums in a tree of its own, over sockets or through shared memory",
        'collectives.all_reduce = "native" or "shared_memory", or execution.exact = false',
    ),
    Rule(
        lambda plan: plan.collectives.all_reduce not in ("native", "shared_memory") and plan.shards_model,
        ("collectives.all_reduce", "shard.level", "layout.shard"),
        "gradients that are divided are summed by fully_shard's own reduce-scatter",
        'collectives.all_reduce = "native" or "shared_memory", or shard.level = "optimizer"',
    ),
    Rule(
        lambda plan: plan.execution.channels_last and plan.execution.exact,
        ("execution.channels_last", "execution.exact"),
        "kernels for channels last add in another order: exact bits are those of the usual one",
        "execution.channels_last = false, or execution.exact = false",
    ),
    Rule(
        lambda plan: is_compressed(plan) and plan.execution.exact,
        ("collectives.compression", "execution.exact"),
        "compressed sums are not the sums of one process, and exact mode promises each bit of them",
        'collectives.compression = "none", or execution.exact = false',
    ),
    Rule(
        lambda plan: is_compressed(plan) and plan.shards_model,
        ("collectives.compression", "shard.level", "layout.shard"),
        "gradients that are divided are summed by fully_shard's own reduce-scatter, which compresses nothing",
        'collectives.compression = "none", or shard.level = "optimizer"',
    ),
    *(
        Rule(
            lambda plan, axis=axis: is_compressed(plan) and is_wide(plan, axis),  # type: ignore[misc]
            ("collectives.compression", f"layout.{axis}"),
            f"what a rank holds back is kept for whole parameters, and on the {axis} axis each rank has others",
            f'collectives.compression = "none", or {without(axis, "data axis")}',
        )
        for axis in ("tensor", "pipeline", "context", "expert")
    ),
    Rule(
        lambda plan: is_compressed(plan) and plan.precision.reduce != "float32",
        ("collectives.compression", "precision.reduce"),
        "compression begins with gradients in float32, and what it holds back is added to them",
        'precision.reduce = "float32" (collectives.compression = "bfloat16" or "float16" sends 16 bits)',
    ),
    Rule(
        lambda plan: plan.collectives.compression == "int8" and plan.layout.divides_grains > MOST_INT8_RANKS,
        ("collectives.compression", "layout.data", "layout.shard"),
        f"sums of all ranks have to fit in 8 bits, and with more than {MOST_INT8_RANKS} each has fewer than 4 levels",
        f'at most {MOST_INT8_RANKS} data ranks (data x shard), or collectives.compression = "bfloat16" or "powersgd"',
    ),
    Rule(
        lambda plan: plan.execution.compile != "none" and is_wide(plan, "tensor") and plan.tensor.sequence,
        ("execution.compile", "tensor.sequence"),
        "the exchange of positions has a backward of its own, which torch's compiler captures and then cannot compile",
        'execution.compile = "none", or tensor.sequence = false',
    ),
    Rule(
        lambda plan: plan.execution.compile != "none" and is_wide(plan, "context"),
        ("execution.compile", "layout.context"),
        "the exchange of heads has a backward of its own, which torch's compiler captures and then cannot compile",
        'execution.compile = "none", or layout.context = 1',
    ),
    Rule(
        lambda plan: plan.execution.compile != "none" and is_wide(plan, "expert"),
        ("execution.compile", "layout.expert"),
        "the exchange of tokens has sizes that the host reads in each layer, which a compiled block cannot do",
        'execution.compile = "none", or layout.expert = 1',
    ),
    Rule(
        lambda plan: is_wide(plan, "expert") and is_wide(plan, "tensor") and plan.tensor.sequence,
        ("layout.expert", "tensor.sequence"),
        "tensor ranks send the tokens of whole sequences, each its slice",
        "tensor.sequence = false, or layout.expert = 1",
    ),
    Rule(
        lambda plan: plan.execution.compile != "none" and plan.memory.recompute == "selective",
        ("execution.compile", "memory.recompute"),
        "a compiled block does not show its products; it keeps them and computes the rest again by itself",
        'memory.recompute = "none" or "full"',
    ),
    Rule(
        lambda plan: plan.execution.compile == "max-autotune" and plan.execution.exact,
        ("execution.compile", "execution.exact"),
        "each rank takes the kernels that it measured to be fastest: not the same bits on all of them",
        'execution.compile = "default", or execution.exact = false',
    ),
    *FLOAT8,
    Rule(
        lambda plan: len(plan.layout.shares) not in (0, plan.layout.divides_grains),
        ("layout.shares", "layout.data", "layout.shard"),
        "each rank that divides grains (data x shard) has a share",
        "layout.shares with a number for each of these ranks, or leave it out for equal shares",
    ),
    Rule(
        lambda plan: len(plan.shard.sizes) not in (0, plan.layout.shard),
        ("shard.sizes", "layout.shard"),
        "each rank of the shard axis has a shard",
        "shard.sizes with a number for each of these ranks, or leave it out for equal shards",
    ),
    Rule(
        lambda plan: bool(plan.shard.sizes) and plan.shards_model,
        ("shard.sizes", "shard.level"),
        "torch's fully_shard cuts gradients and parameters into equal parts",
        'shard.level = "optimizer", or no shard.sizes',
    ),
    Rule(
        lambda plan: plan.shares_memory and plan.collectives.all_reduce != "shared_memory",
        ("memory.shared", "collectives.all_reduce"),
        "each rank updates its part of the shared parameters from all gradients where they lie, in memory shared too",
        'collectives.all_reduce = "shared_memory", or memory.shared = false',
    ),
    *(
        Rule(
            lambda plan, axis=axis: plan.shares_memory and is_wide(plan, axis),  # type: ignore[misc]
            ("memory.shared", f"layout.{axis}"),
            f"one copy serves ranks that hold the same of the model, and the {axis} axis divides it",
            f"{without(axis, 'layout.data')}, or memory.shared = false",
        )
        for axis in ("shard", "tensor", "pipeline", "context", "expert")
    ),
    Rule(
        lambda plan: plan.shares_memory and is_compressed(plan),
        ("memory.shared", "collectives.compression"),
        "gradients are read where they lie: nothing is sent that could be compressed",
        'collectives.compression = "none", or memory.shared = false',
    ),
)


def _without_axes(
    conflict: str, larger: str, axes: tuple[str, ...] = ("shard", "tensor", "pipeline", "context", "expert")
) -> tuple[Rule, ...]:
    """Return rules that exclude these axes in favour of larger ones. `conflict` may name the axis as {axis}."""
    return tuple(
        Rule(
            lambda plan, axis=axis: is_wide(plan, axis),  # type: ignore[misc]
            (f"layout.{axis}",),
            conflict.format(axis=axis),
            without(axis, larger),
        )
        for axis in axes
    )


def _of_whole_batch(option: str, axes: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the refusals for a job with an option by which ranks meet within a step, about samples of all of them."""
    needs = f"{option} needs the whole model on each rank, of which the {{axis}} axis gives a rank a part"
    return (
        *_without_axes(needs, "data or shard axis", axes),
        Rule(
            lambda plan: plan.serves,
            ("server.mode",),
            f"the workers of a parameter server do not meet within a step, as {option} needs",
            'server.mode = "none"',
        ),
        Rule(
            lambda plan: plan.execution.compile != "none" or plan.execution.cuda_graph,
            ("execution.compile", "execution.cuda_graph"),
            f"with {option} ranks meet within a step, which is therefore computed eagerly",
            'execution.compile = "none" and execution.cuda_graph = false',
        ),
    )


# Refusals of plans for jobs with a loss over the global batch.
GLOBAL_LOSS: tuple[Rule, ...] = (
    *_of_whole_batch("Job(outputs=...)", ("tensor", "pipeline", "context")),
    Rule(
        is_compressed,
        ("collectives.compression",),
        "compression scales what a rank holds back by the rank's weight, and Job(outputs=...) has one weight for all",
        'collectives.compression = "none"',
    ),
)

# Refusals of plans for jobs with batch norms over the global batch.
GLOBAL_NORM: tuple[Rule, ...] = (
    *_of_whole_batch('Job(batch_norm="batch")', ("tensor", "pipeline", "context", "expert")),
    Rule(
        lambda plan: plan.execution.exact,
        ("execution.exact",),
        'exact mode computes grain by grain, and Job(batch_norm="batch") needs all grains of a rank in one forward',
        'execution.exact = false, or batch_norm="grain"',
    ),
)

# Refusals of plans with servers.
SERVED: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.serves and bool(plan.layout.shares),
        ("layout.shares", "server.mode"),
        "a worker asks for its next grains when it is done, so that fast workers compute more of them already",
        'no layout.shares, or server.mode = "none"',
    ),
    Rule(
        lambda plan: plan.serves and plan.memory.shared,
        ("memory.shared", "server.mode"),
        "a worker computes with parameters of a version of its own",
        'memory.shared = false, or server.mode = "none"',
    ),
    *(
        Rule(
            lambda plan, axis=axis: plan.serves and is_wide(plan, axis),  # type: ignore[misc]
            (f"layout.{axis}", "server.mode"),
            "a worker computes whole grains with the whole model, which servers alone divide",
            f'{without(axis, "layout.data")}, or server.mode = "none"',
        )
        for axis in ("shard", "tensor", "pipeline", "context", "expert")
    ),
    Rule(
        lambda plan: plan.execution.exact and plan.server.mode in ("bounded", "asynchronous"),
        ("server.mode", "execution.exact"),
        "what is applied when depends on which worker is done first: no two runs have the same bits",
        'server.mode = "synchronous", or execution.exact = false',
    ),
    Rule(
        lambda plan: plan.serves and plan.collectives.compression != "none",
        ("collectives.compression", "server.mode"),
        "pushes carry whole gradients",
        'collectives.compression = "none", or server.mode = "none"',
    ),
    Rule(
        lambda plan: plan.serves and plan.execution.compile != "none",
        ("execution.compile", "server.mode"),
        "this version's workers compile nothing",
        'execution.compile = "none", or server.mode = "none"',
    ),
    Rule(
        lambda plan: plan.serves and plan.precision.loss_scale != "none",
        ("precision.loss_scale", "server.mode"),
        "this version scales no loss of gradients that are pushed",
        'precision.loss_scale = "none" with precision.compute = "bfloat16", or server.mode = "none"',
    ),
    Rule(
        lambda plan: plan.serves and plan.data.workers > 0,
        ("data.workers", "server.mode"),
        "which step a worker computes next is not known before it asks: nothing can be read ahead",
        'data.workers = 0, or server.mode = "none"',
    ),
)


_AGAIN = "the optimizer's step computes the loss again"

# Refusals of plans for optimizers that compute the loss several times in a step.
CLOSURE: tuple[Rule, ...] = (
    *_without_axes(
        f"{_AGAIN}, and needs all parameters and their update on each rank; the {{axis}} axis divides them", "data axis"
    ),
    Rule(
        lambda plan: plan.serves,
        ("server.mode",),
        f"{_AGAIN}, and the servers that step have no samples",
        'server.mode = "none"',
    ),
    Rule(
        is_compressed,
        ("collectives.compression",),
        f"{_AGAIN}, and compression holds back a part of one gradient from each step to the next",
        'collectives.compression = "none"',
    ),
    Rule(
        lambda plan: plan.precision.loss_scale != "none",
        ("precision.loss_scale",),
        f"{_AGAIN} at parameters that may need another scale",
        'precision.loss_scale = "none" with precision.compute = "bfloat16" or "float32"',
    ),
    Rule(
        lambda plan: plan.execution.cuda_graph,
        ("execution.cuda_graph",),
        f"{_AGAIN} as often as the host decides",
        "execution.cuda_graph = false",
    ),
)

# Plans that a search leaves out for models with sparse gradients. A run on such a layout has dense ones, or refuses it.
SPARSE = _without_axes("gradients of nn.Embedding(sparse=True) stay sparse on data ranks alone", "data axis")


def excluded(plan: Plan, facts: ModelFacts | None = None) -> Iterator[Conflict]:
    """Yield this plan's conflicts, with `facts` also those with the job's loss and optimizer."""
    of_job = (*(GLOBAL_LOSS if facts and facts.has_global_loss else ()),)
    of_job += (*(GLOBAL_NORM if facts and facts.has_global_norm else ()),)
    of_job += (*(CLOSURE if facts and facts.has_closure else ()),)
    of_job += (*(SPARSE if facts and facts.has_sparse else ()),)
    for rule in (*CONFLICTS, *SERVED, *(CAPTURED if plan.execution.cuda_graph else ()), *of_job):
        if rule.applies(plan):
            yield Conflict(rule.keys[0], shown(plan, *rule.keys), rule.conflict, rule.remedy)
    expert, ranks = plan.layout.expert, plan.layout.stage_ranks
    if ranks % expert:
        fit = expert // math.gcd(expert, ranks // plan.layout.data)
        in_use = [f"layout.{axis}" for axis in _STAGE if is_wide(plan, axis)] or ["layout.data"]
        yield Conflict(
            "layout.expert",
            shown(plan, "layout.expert", *in_use),
            f"expert divides the ranks of a stage (data x shard x context x tensor = {ranks}) and starts no process",
            f"layout.data = {-(-plan.layout.data // fit) * fit}, or layout.expert = {around(expert, divisors(ranks))}",
        )


_STAGE = ("data", "shard", "context", "tensor")


def idle(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each setting of this plan without effect."""
    default = Plan()
    for row in WITHOUT_EFFECT:
        keys = [key for key in row.keys if value(plan, key) != value(default, key)]
        if keys and row.applies(plan):
            yield f"{shown(plan, *keys)}: no effect, since {row.reason}"
    scale, compute = plan.precision.loss_scale, plan.precision.compute
    if scale != "none" and compute != "float16":
        yield f"precision.loss_scale = {scale!r} has no effect on {compute} compute"


def on_shared_gpu(plan: Plan) -> Iterator[Conflict]:
    """Yield this plan's conflicts with several ranks on one GPU."""
    if plan.execution.cuda_graph and plan.num_processes > 1:
        yield Conflict(
            "execution.cuda_graph",
            "execution.cuda_graph = true, with --share-gpu",
            "ranks that share a GPU exchange tensors through the host, which no graph captures",
            "execution.cuda_graph = false, or leave --share-gpu out",
        )


@dataclass(frozen=True)
class ModelFacts:
    """Limits of a layout: the job's grains, and the model's structure. None means unknown."""

    num_grains: int
    grain_size: int
    blocks: tuple[str, ...] = ()  # the layers that a pipeline divides by default, in the order of the model
    cuts: tuple[str, ...] = ()  # modules that can start a stage: `blocks` and the modules before and after them
    num_heads: int | None = None
    num_kv_heads: int | None = None
    widths: tuple[int, ...] = ()  # the dims of the layers' weights, one of which a tensor axis cuts
    sequence: int | None = None  # the longest sequence, in tokens
    repeats: bool | None = None  # whether blocks of one kind follow each other, as a context axis needs
    num_experts: tuple[int, ...] | None = None  # of each mixture of experts; empty for a model without one
    places: tuple[str, ...] | None = None  # default stage cuts; from the structure alone, an upper bound
    has_global_loss: bool = False  # whether the job's loss sees the outputs of the global batch
    has_global_norm: bool = False  # whether its batch norms see the global batch
    has_closure: bool = False  # whether the job's optimizer computes the loss several times in a step
    has_sparse: bool = False  # whether a search is for layouts in which sparse gradients stay sparse

    @property
    def most_stages(self) -> int | None:
        """Maximum number of stages without a split; None if the model was not examined."""
        return len(self.places) + 1 if self.places is not None else len(self.blocks) or None


class World(NamedTuple):
    """Number of processes, and its source as users know it: `--devices 8` or `WORLD_SIZE=8`."""

    size: int
    source: str


def conflicts(plan: Plan, facts: ModelFacts | None = None) -> list[Conflict]:
    """Return all conflicts, in the order of a plan's sections."""
    if facts is None:
        return list(excluded(plan))
    rules = (too_many_data_ranks, _tensor_width, _context, _experts, _stages, _split, _microbatches, _one_microbatch)
    return [*(conflict for rule in rules for conflict in rule(plan, facts)), *excluded(plan, facts)]


def refuse(conflicts: list[Conflict]) -> None:
    """Raise one error for all conflicts, if there are any.

    Raises: PlanError with one line for each conflict.
    """
    if not conflicts:
        return

    def named(key: str, text: str) -> str:
        return text if len(conflicts) == 1 or text.startswith(f"{key} = ") else f"{key}: {text}"

    raise PlanError(
        given="\n".join(dict.fromkeys(c.given for c in conflicts)),
        conflict="\n".join(named(c.key, c.conflict) for c in conflicts),
        remedy="\n".join(named(c.key, c.remedy) for c in conflicts),
    )


def notes(plan: Plan, facts: ModelFacts) -> Iterator[str]:
    """Yield the drawbacks of a legal layout, first those that the job's grains cause."""
    yield from _uneven_shares(plan, facts)
    pipeline, ranks, counts = plan.layout.pipeline, plan.layout.divides_grains, num_microbatches(plan, facts)
    waits = _bubble(pipeline, min(counts))
    # Stages wait because a microbatch is a single grain of several samples.
    if plan.batch.grains_per_microbatch == 1 and facts.grain_size > 1 and waits > _MUCH_BUBBLE:
        more = min(_ENOUGH_MICROBATCHES * pipeline * ranks, facts.num_grains * facts.grain_size)
        yield (
            f"{facts.num_grains} grains of {facts.grain_size} samples leave a rank {min(counts)} "
            f"microbatch{'es' * (min(counts) > 1)}, and {pipeline} stages wait {waits:.0%} of a step; "
            f"Job(grains={more}) would bring that to {_bubble(pipeline, more // ranks):.0%} (which changes the run)"
        )
    tensor, heads = plan.layout.tensor, facts.num_heads
    if heads is not None and tensor > heads:
        yield (
            f"layout.tensor = {tensor}: attention has {heads} heads and stays whole on every rank; "
            f"layout.tensor = {heads} or less divides it too"
        )
    bound, workers = plan.server.staleness, plan.layout.data
    if plan.server.mode == "bounded" and bound < workers - 1:
        yield (
            f"server.staleness = {bound}: at most {bound + 1} of {workers} workers compute at a time; "
            f"server.staleness = {workers - 1} or more keeps all of them busy"
        )
    density = plan.compression.density
    if plan.collectives.compression == "topk" and density * ranks >= 1:
        yield (
            f"compression.density = {density}: values and places of {ranks} ranks are no fewer bytes than an "
            f"uncompressed sum; below {1 / ranks:.2g} they are"
        )
    if pipeline > 1 and max(counts) == 1 and (plan.batch.grains_per_microbatch > 1 or facts.grain_size == 1):
        yield "one microbatch a rank: the stages wait for each other; a smaller batch.grains_per_microbatch fills them"


def _uneven_shares(plan: Plan, facts: ModelFacts) -> Iterator[str]:
    """Yield a note if grains are too large for the plan's shares, with a number of grains that suits them."""
    shares = plan.layout.shares
    if len(shares) != plan.layout.divides_grains:
        return
    excess, enough = (
        excess_of_shares(facts.num_grains, shares),
        enough_grains(shares, facts.num_grains, facts.grain_size),
    )
    if excess > UNEVEN:
        more = f"; Job(grains={enough}) divides them better (which changes the run)" if enough is not None else ""
        sizes = share_sizes(facts.num_grains, len(shares), shares)
        yield (
            f"layout.shares = {list(shares)}: {facts.num_grains} grains are divided as {list(sizes)}, "
            f"and a step takes {excess:.1%} more than with ideal shares{more}"
        )


# Share of waiting in a pipeline's step from which a note appears; microbatches per stage that keep waiting low.
_MUCH_BUBBLE, _ENOUGH_MICROBATCHES = 0.3, 4


def _bubble(pipeline: int, microbatches: int) -> float:
    """Return the share of a step in which a 1F1B stage waits (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    return (pipeline - 1) / (max(1, microbatches) + pipeline - 1)


# ------------------------------------------------------------------------------------------------------ numbers


def neighbours(wanted: int, legal: Iterable[int]) -> list[int]:
    """Return the nearest legal numbers below and above, or the number itself if it is legal."""
    values = sorted(set(legal))
    if wanted in values:
        return [wanted]
    return [v for v in values if v < wanted][-1:] + [v for v in values if v > wanted][:1]


def around(wanted: int, legal: Iterable[int]) -> str:
    """Return the neighbours in words."""
    return " or ".join(map(str, neighbours(wanted, legal)))


def num_microbatches(plan: Plan, facts: ModelFacts) -> tuple[int, ...]:
    """Return the microbatches of a data rank in a full step; two numbers if the grains do not divide evenly."""
    sizes = set(share_sizes(facts.num_grains, plan.layout.divides_grains, plan.layout.shares)) - {0}
    return tuple(sorted({-(-size // (plan.batch.grains_per_microbatch or size)) for size in sizes}))


def degrees_for(layout: Layout, world_size: int) -> list[str]:
    """Return each single change of a degree that gives `world_size`: the data axis first, then axes in use."""
    axes = ["data", *(a for a in AXES if a != "data" and layout.degree(a) > 1)]
    others = {axis: layout.world_size // layout.degree(axis) for axis in axes}
    return [f"layout.{axis} = {world_size // rest}" for axis, rest in others.items() if world_size % rest == 0]


def nearest_worlds(layout: Layout, world_size: int) -> list[int]:
    """Return the nearest world sizes, below and above, that the layout has with another data degree."""
    rest = layout.world_size // layout.data
    return neighbours(world_size, (rest * n for n in (max(1, world_size // rest), world_size // rest + 1)))


# -------------------------------------------------------------------------------------------------------- rules


def other_world(plan: Plan, world: World) -> list[Conflict]:
    """Return the conflict between the product of the degrees and the number of processes, if they differ."""
    layout = plan.layout
    if layout.world_size == world.size:
        return []
    degrees = ", ".join(degrees_in_use(layout)) or "data = 1"
    ways = degrees_for(layout, world.size)
    near = [str(size) for size in nearest_worlds(layout, world.size) if size != layout.world_size]
    change = f"write {', or '.join(ways)}" if ways else f"{' or '.join(near)} with another layout.data"
    return [
        Conflict(
            "layout",
            f"{world.source} with a plan whose layout is {degrees}",
            f"the plan's degrees make a world of {layout.world_size}",
            f"start {layout.world_size} processes, or {change}",
        )
    ]


def too_many_data_ranks(plan: Plan, facts: ModelFacts) -> Iterator[Conflict]:
    """Yield the conflict of more data ranks than grains, if there are more."""
    ranks, shard = plan.layout.data * plan.layout.shard, plan.layout.shard
    if ranks <= facts.num_grains:
        return
    most = facts.num_grains // shard
    with_shard = f"; with layout.shard = {shard}, layout.data = {most} at most" if shard > 1 and most else ""
    yield Conflict(
        "layout.data",
        f"{ranks} data ranks for a job of grains={facts.num_grains}",
        "a grain is computed by one rank, so a job has at most as many data ranks (data x shard) as grains",
        f"use {legal_data_degrees(facts.num_grains)} data ranks{with_shard}, "
        f"or Job(grains={ranks}) (which changes the run)",
    )


def _tensor_width(plan: Plan, facts: ModelFacts) -> Iterator[Conflict]:
    """Yield the conflict of a tensor degree beyond all widths; more ranks than heads only give a note."""
    tensor, heads = plan.layout.tensor, facts.num_heads
    widest = max(facts.widths, default=None)
    if tensor == 1 or widest is None or tensor <= widest:
        return
    whole = f"; {heads} at most where attention is to be divided too" if heads is not None else ""
    yield Conflict(
        "layout.tensor",
        shown(plan, "layout.tensor"),
        f"the widest layer has {widest} rows or columns" + (f", and attention {heads} heads" if heads else ""),
        f"layout.tensor = {widest} at most{whole}",
    )


NO_BLOCKS = "the model repeats no blocks that take a hidden state [batch, positions, ...]"
HOLD_BLOCKS = "use context = 1; or, where there are blocks over sequences, hold them in an nn.ModuleList"


AT_LEAST_A_HEAD = "each rank of a context axis attends for at least one head"


def _context(plan: Plan, facts: ModelFacts) -> Iterator[Conflict]:
    context, longest, heads = plan.layout.context, facts.sequence, _heads_per_rank(plan, facts)
    if context == 1:
        return
    key, given = "layout.context", shown(plan, "layout.context")
    if facts.repeats is False:
        yield Conflict(key, f"context = {context}", NO_BLOCKS, HOLD_BLOCKS)
    if longest is not None and context > longest:
        why = f"a context axis divides the sequence, of which the longest has {longest} tokens"
        yield Conflict(key, given, why, f"{key} = {around(context, _legal_contexts(plan, facts, longest))}")
    if heads is not None and context > heads:
        per = f" ({facts.num_heads} over layout.tensor = {plan.layout.tensor})" if heads != facts.num_heads else ""
        why = f"{AT_LEAST_A_HEAD}, of {heads}{per}"
        yield Conflict(key, given, why, f"{key} = {around(context, _legal_contexts(plan, facts, heads))}")


NO_EXPERTS = "the model has no mixture of experts that shoal recognises"


def _experts(plan: Plan, facts: ModelFacts) -> Iterator[Conflict]:
    """Yield the conflict of experts that the axis cannot divide evenly, or of a model without experts."""
    expert, counts = plan.layout.expert, facts.num_experts
    if expert == 1 or counts is None:
        return
    key, given = "layout.expert", shown(plan, "layout.expert")
    if not counts:
        yield Conflict(key, given, NO_EXPERTS, "layout.expert = 1")
    elif any(count % expert for count in counts):
        fitting = divisors(math.gcd(plan.layout.stage_ranks, *counts))
        each = " and ".join(map(str, sorted(set(counts))))
        why = f"each rank of an expert group has as many experts as the others, and the model has {each} in a layer"
        yield Conflict(key, given, why, f"layout.expert = {around(expert, fitting)}")


def _heads_per_rank(plan: Plan, facts: ModelFacts) -> int | None:
    """Return the heads that the context axis divides: those that the tensor axis leaves on a rank."""
    heads, tensor = facts.num_heads, plan.layout.tensor
    return heads // tensor if heads is not None and heads % tensor == 0 else heads


def _legal_contexts(plan: Plan, facts: ModelFacts, most: int) -> list[int]:
    longest = facts.sequence if facts.sequence is not None else most
    return [d for d in divisors(_heads_per_rank(plan, facts) or longest) if d <= longest]


def cut_by_itself(places: Sequence[str] | None, blocks: Sequence[str] = ()) -> str:
    """Return the number and names of the default stage boundaries in words, or the model's blocks if unknown."""
    if places is None:
        return f"a model of {len(blocks)} layers ({blocks[0]} to {blocks[-1]}): a stage has at least one"
    named = f" ({', '.join(places if len(places) <= 6 else [*places[:5], '...', places[-1]])})" if places else ""
    return f"a model that can be cut at {len(places)} place{'' if len(places) == 1 else 's'} by itself{named}"


def _stages(plan: Plan, facts: ModelFacts) -> Iterator[Conflict]:
    """Yield the conflict of too many stages for the blocks; a plan with a split is checked in `_split`."""
    most_stages, per = facts.most_stages, plan.pipeline.stages_per_rank
    stages = plan.layout.pipeline * per
    if plan.layout.pipeline == 1 or most_stages is None or stages <= most_stages or plan.pipeline.split:
        return
    keys = ["layout.pipeline"] + (["pipeline.stages_per_rank"] if per > 1 else [])
    most = most_stages // per
    ways = [f"layout.pipeline = {most}" if most > 1 else "layout.pipeline = 1 (no pipeline)"]
    if per > 1 and most_stages // plan.layout.pipeline:
        ways.append(f"pipeline.stages_per_rank = {most_stages // plan.layout.pipeline}")
    yield Conflict(
        "layout.pipeline",
        shown(plan, *keys),
        f"{stages} stages for {cut_by_itself(facts.places, facts.blocks)}",
        f"{', or '.join(ways)} at most",
    )


def _split(plan: Plan, facts: ModelFacts) -> Iterator[Conflict]:
    split, stages = plan.pipeline.split, plan.layout.pipeline * plan.pipeline.stages_per_rank
    if not split or plan.layout.pipeline == 1:
        return
    given = shown(plan, "pipeline.split")
    miscounted = other_number(split, stages)
    if miscounted is not None:
        # The advice keeps the names and the stages per rank, and changes the degree if possible.
        pipeline, rest = divmod(len(split) + 1, plan.pipeline.stages_per_rank)
        other = f", or layout.pipeline = {pipeline}" if not rest else ""
        count, example = len(facts.blocks), ""
        if stages <= count:
            example = f", for example {_quoted([facts.blocks[i * count // stages] for i in range(1, stages)])}"
        remedy = f"give {stages - 1} names{example}{other}"
        yield Conflict("pipeline.split", f"{given} for {stages} stages", miscounted, remedy)
    if not facts.cuts:
        return
    unknown = [name for name in split if name not in facts.cuts]
    for name in unknown:
        known = f"{facts.cuts[0]} ... {facts.cuts[-1]}"
        first = "; the first stage has it already" if name in facts.blocks[:1] else nearest(name, list(facts.cuts))
        yield Conflict("pipeline.split", given, f"no stage can begin with {name!r}", f"name modules of {known}{first}")
    places = [facts.cuts.index(name) for name in split if name in facts.cuts]
    if places != sorted(set(places)):
        ordered = list(dict.fromkeys(facts.cuts[place] for place in sorted(places)))
        yield Conflict("pipeline.split", given, IN_ORDER, f"split = {_quoted(ordered)}")


IN_ORDER = "stages follow each other as the modules are executed, and each begins with another one"


def other_number(split: Sequence[str], stages: int) -> str | None:
    """Return a complaint if a split has the wrong number of names for `stages` stages, else None."""
    if len(split) == stages - 1:
        return None
    return f"it names the first module of each stage after the first: {stages - 1} names, not {len(split)}"


def _quoted(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def fits(schedule: str, pipeline: int, microbatches: int) -> bool:
    """Return True if a schedule is defined for this number of microbatches in a full step.

    1f1b and zero_bubble fill the pipeline before the first backward: a microbatch for every rank. interleaved_1f1b runs
    in equal rounds of at least a microbatch per rank. Source: Narayanan et al., arXiv 2104.04473, and the checks of
    torch.distributed.pipelining.schedules. The short step at the end of the data may have any number.
    """
    if schedule in ("1f1b", "zero_bubble"):
        return microbatches >= pipeline
    if schedule == "interleaved_1f1b":
        return microbatches % max(1, microbatches // pipeline) == 0
    return True


def _fits(plan: Plan, facts: ModelFacts) -> bool:
    schedule, pipeline = plan.pipeline.schedule, plan.layout.pipeline
    return all(fits(schedule, pipeline, count) for count in num_microbatches(plan, facts))


def legal_grains_per_microbatch(plan: Plan, facts: ModelFacts) -> list[int]:
    """Return the numbers of grains per microbatch that suit the plan's schedule, in order; may be empty."""
    share = max(share_sizes(facts.num_grains, plan.layout.divides_grains, plan.layout.shares))
    return [n for n in range(1, share + 1) if _fits(plan.with_sections(batch={"grains_per_microbatch": n}), facts)]


def _one_microbatch(plan: Plan, facts: ModelFacts) -> Iterator[Conflict]:
    per, ranks = plan.batch.grains_per_microbatch, plan.layout.divides_grains
    share = max(share_sizes(facts.num_grains, ranks, plan.layout.shares))
    if facts.has_global_norm and 0 < per < share and not plan.execution.exact:
        yield Conflict(
            "batch.grains_per_microbatch",
            f"batch.grains_per_microbatch = {per} of the {share} grains of a rank",
            'Job(batch_norm="batch") needs the statistics of all samples before the layer that follows a norm',
            f"batch.grains_per_microbatch = {share}, or more data ranks, or a smaller Job(global_batch=...) (which "
            'changes the run), or batch_norm="grain"',
        )


def _microbatches(plan: Plan, facts: ModelFacts) -> Iterator[Conflict]:
    schedule, pipeline = plan.pipeline.schedule, plan.layout.pipeline
    ranks = plan.layout.data * plan.layout.shard
    if pipeline == 1 or ranks > facts.num_grains or _fits(plan, facts):
        return
    counts = " or ".join(map(str, num_microbatches(plan, facts)))
    per = plan.batch.grains_per_microbatch or max(share_sizes(facts.num_grains, ranks, plan.layout.shares))
    legal = legal_grains_per_microbatch(plan, facts)
    grains = -(-facts.num_grains // (ranks * pipeline)) * ranks * pipeline
    fewer = f"batch.grains_per_microbatch = {around(per, legal)}"
    yield Conflict(
        "pipeline.schedule",
        f"{shown(plan, 'pipeline.schedule')} with {counts} microbatch{'' if counts == '1' else 'es'} a step "
        f"({facts.num_grains} grains over {ranks} data ranks, {per} a microbatch)",
        f"it runs them in equal rounds of at least layout.pipeline = {pipeline}"
        if schedule == "interleaved_1f1b"
        else f"it needs a microbatch for every rank of layout.pipeline = {pipeline}",
        f'{fewer if legal else f"Job(grains={grains}) (which changes the run)"}, or pipeline.schedule = "gpipe"',
    )
