"""Validation of a plan by itself: tables of settings that exclude each other and of settings without effect.

Rules on the job or its model are in `legal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shoal.plans.plan import Plan


class Conflict(NamedTuple):
    """One refusal: the key, the given value, the conflict and the remedy."""

    key: str
    given: str
    conflict: str
    remedy: str


class Rule(NamedTuple):
    """Row of settings that exclude each other: condition, keys to quote (the first names it), conflict and remedy."""

    applies: Callable[[Plan], bool]
    keys: tuple[str, ...]
    conflict: str
    remedy: str


class Idle(NamedTuple):
    """Row of settings without effect: condition, keys and reason. A setting at its default is never reported."""

    applies: Callable[[Plan], bool]
    keys: tuple[str, ...]
    reason: str


def value(plan: Plan, key: str) -> object:
    """Return the value at `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(plan, section), name)


def shown(plan: Plan, *keys: str) -> str:
    """Return `section.key = value` for each key, in the syntax of a plan file."""
    return ", ".join(f"{key} = {_toml(value(plan, key))}" for key in keys)


def _toml(setting: object) -> str:
    if isinstance(setting, bool):
        return str(setting).lower()
    if isinstance(setting, tuple):
        return "[" + ", ".join(map(_toml, setting)) + "]"
    return f'"{setting}"' if isinstance(setting, str) else str(setting)


def _wide(plan: Plan, axis: str) -> bool:
    return bool(getattr(plan.layout, axis) > 1)


def _compressed(plan: Plan) -> bool:
    return plan.collectives.compression != "none"


def _pipelined(plan: Plan, *schedules: str) -> bool:
    return _wide(plan, "pipeline") and plan.pipeline.schedule in schedules


# Schemes with error feedback; a cast to 16 bits loses only the last bits.
FED_BACK = ("int8", "topk", "powersgd")
# With this many ranks, each has 4 of the 127 levels of a signed byte.
MOST_INT8_RANKS = 31

_NOT_EXACT = "bits are fixed along the data axis and a sharded optimizer only: a {} axis adds in an order of its own"

# Each row is one refusal; all rows that apply are reported together.
CONFLICTS: tuple[Rule, ...] = (
    *(
        Rule(
            lambda plan, axis=axis: plan.execution.exact and _wide(plan, axis),  # type: ignore[misc]
            (f"layout.{axis}", "execution.exact"),
            _NOT_EXACT.format(axis),
            f"execution.exact = false, or layout.{axis} = 1 and a larger data or shard axis",
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
        lambda plan: plan.shard.offload and _wide(plan, "shard") and not plan.shards_model,
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
        lambda plan: plan.tensor.sequence and _wide(plan, "tensor") and _wide(plan, "context"),
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
        lambda plan: _compressed(plan) and plan.execution.exact,
        ("collectives.compression", "execution.exact"),
        "compressed sums are not the sums of one process, and exact mode promises each bit of them",
        'collectives.compression = "none", or execution.exact = false',
    ),
    Rule(
        lambda plan: _compressed(plan) and plan.shards_model,
        ("collectives.compression", "shard.level", "layout.shard"),
        "gradients that are divided are summed by fully_shard's own reduce-scatter, which compresses nothing",
        'collectives.compression = "none", or shard.level = "optimizer"',
    ),
    *(
        Rule(
            lambda plan, axis=axis: _compressed(plan) and _wide(plan, axis),  # type: ignore[misc]
            ("collectives.compression", f"layout.{axis}"),
            f"what a rank holds back is kept for whole parameters, and on a {axis} axis each rank has others",
            f'collectives.compression = "none", or layout.{axis} = 1 and a larger data axis',
        )
        for axis in ("tensor", "pipeline", "context")
    ),
    Rule(
        lambda plan: _compressed(plan) and plan.precision.reduce != "float32",
        ("collectives.compression", "precision.reduce"),
        "compression begins with gradients in float32, and what it holds back is added to them",
        'precision.reduce = "float32" (collectives.compression = "bfloat16" or "float16" sends 16 bits)',
    ),
    Rule(
        lambda plan: plan.collectives.compression == "int8" and plan.degrees.divides_grains > MOST_INT8_RANKS,
        ("collectives.compression", "layout.data", "layout.shard"),
        f"sums of all ranks have to fit in 8 bits, and with more than {MOST_INT8_RANKS} each has fewer than 4 levels",
        f'at most {MOST_INT8_RANKS} data ranks (data x shard), or collectives.compression = "bfloat16" or "powersgd"',
    ),
    Rule(
        lambda plan: plan.execution.compile != "none" and _wide(plan, "tensor"),
        ("execution.compile", "layout.tensor"),
        "layers that share an input know it by its version, to sum its gradient once: torch's compiler has none",
        'execution.compile = "none", or layout.tensor = 1',
    ),
    Rule(
        lambda plan: plan.execution.compile != "none" and _wide(plan, "context"),
        ("execution.compile", "layout.context"),
        "the exchange of heads has a backward of its own, which torch's compiler captures and then cannot compile",
        'execution.compile = "none", or layout.context = 1',
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
    Rule(
        lambda plan: plan.shares_memory and plan.collectives.all_reduce != "shared_memory",
        ("memory.shared", "collectives.all_reduce"),
        "each rank updates its part of the shared parameters from all gradients where they lie, in memory shared too",
        'collectives.all_reduce = "shared_memory", or memory.shared = false',
    ),
    *(
        Rule(
            lambda plan, axis=axis: plan.shares_memory and _wide(plan, axis),  # type: ignore[misc]
            ("memory.shared", f"layout.{axis}"),
            f"one copy serves ranks that hold the same of the model, and a {axis} axis divides it",
            f"layout.{axis} = 1 and a larger layout.data, or memory.shared = false",
        )
        for axis in ("shard", "tensor", "pipeline", "context")
    ),
    Rule(
        lambda plan: plan.shares_memory and _compressed(plan),
        ("memory.shared", "collectives.compression"),
        "gradients are read where they lie: nothing is sent that could be compressed",
        'collectives.compression = "none", or memory.shared = false',
    ),
)

# Refusals of plans with servers.
SERVED: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.serves and plan.memory.shared,
        ("memory.shared", "server.mode"),
        "a worker computes with parameters of a version of its own",
        'memory.shared = false, or server.mode = "none"',
    ),
    *(
        Rule(
            lambda plan, axis=axis: plan.serves and _wide(plan, axis),  # type: ignore[misc]
            (f"layout.{axis}", "server.mode"),
            "a worker computes whole grains with the whole model, which servers alone divide",
            f'layout.{axis} = 1 and a larger layout.data, or server.mode = "none"',
        )
        for axis in ("shard", "tensor", "pipeline", "context")
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


def _captured(applies: Callable[[Plan], bool], key: str, conflict: str, instead: str) -> Rule:
    return Rule(
        lambda plan: plan.execution.cuda_graph and applies(plan),
        ("execution.cuda_graph", key),
        conflict,
        f"execution.cuda_graph = false, or {instead}",
    )


_ALONE = "a step is captured on one process: what ranks tell each other is known to the host once it is under way"

# Refusals of plans whose step is captured in a CUDA graph.
CAPTURED: tuple[Rule, ...] = (
    *(
        _captured(
            lambda plan, axis=axis: not plan.serves and _wide(plan, axis),  # type: ignore[misc]
            f"layout.{axis}",
            _ALONE,
            f"layout.{axis} = 1",
        )
        for axis in ("data", "shard", "tensor", "pipeline", "context")
    ),
    _captured(
        lambda plan: plan.serves,
        "server.mode",
        "the update is the servers', and no part of a worker's step",
        'server.mode = "none"',
    ),
    _captured(
        lambda plan: plan.execution.exact,
        "execution.exact",
        "exact mode adds its grains up on the host",
        "execution.exact = false",
    ),
    _captured(
        lambda plan: plan.execution.compile != "none",
        "execution.compile",
        "in a block's forward the compiler decides what runs, and may make a graph of its own of it",
        'execution.compile = "none"',
    ),
    _captured(
        lambda plan: plan.memory.recompute != "none",
        "memory.recompute",
        "recomputation puts back the host's generators in the backward, and a replay asks nothing of the host",
        'memory.recompute = "none"',
    ),
    _captured(
        lambda plan: plan.precision.parameters != "float32",
        "precision.parameters",
        "a captured update is masked by torch's fused kernels, which do that for parameters in float32",
        'precision.parameters = "float32" (precision.compute may be narrower)',
    ),
    _captured(
        lambda plan: plan.precision.loss_scale == "dynamic" and plan.precision.compute == "float16",
        "precision.loss_scale",
        "the loss scale is a constant of the captured step",
        'a number, or precision.compute = "bfloat16"',
    ),
)

_NO_SUMS = "one rank, or ranks that compute the same grains, have no gradients to sum over the data"

# Each row is one warning, reported if the settings are not at their defaults.
WITHOUT_EFFECT: tuple[Idle, ...] = (
    Idle(lambda plan: not _wide(plan, "shard"), ("shard.level", "shard.reduce", "shard.offload"), "layout.shard is 1"),
    Idle(
        lambda plan: _wide(plan, "shard") and not plan.shards_model,
        ("shard.reduce",),
        'shard.level = "optimizer" leaves gradients whole, and they are summed with the last microbatch',
    ),
    Idle(lambda plan: not _wide(plan, "tensor"), ("tensor.sequence",), "layout.tensor is 1"),
    Idle(lambda plan: plan.degrees.divides_grains == 1, ("collectives.compression",), _NO_SUMS),
    Idle(lambda plan: plan.degrees.divides_grains == 1, ("memory.shared",), "there are no two ranks with the same"),
    Idle(
        # The tensor axis also uses shared_memory, but none of the other algorithms.
        lambda plan: (
            plan.degrees.divides_grains == 1
            and not (plan.collectives.all_reduce == "shared_memory" and _wide(plan, "tensor"))
        ),
        ("collectives.all_reduce",),
        _NO_SUMS,
    ),
    Idle(lambda plan: plan.server.mode != "bounded", ("server.staleness",), 'server.mode is not "bounded"'),
    Idle(lambda plan: not plan.serves, ("server.num_servers",), 'server.mode is "none"'),
    Idle(lambda plan: plan.serves, ("collectives.all_reduce",), "gradients are added up on the servers"),
    *(
        Idle(
            lambda plan, schemes=schemes: plan.collectives.compression not in schemes,  # type: ignore[misc]
            (key,),
            f"it belongs to collectives.compression = {' or '.join(map(repr, schemes))}".replace("'", '"'),
        )
        for key, schemes in (
            ("compression.block", ("int8",)),
            ("compression.density", ("topk",)),
            ("compression.rank", ("powersgd",)),
            ("compression.feedback", FED_BACK),
        )
    ),
    Idle(
        lambda plan: not _compressed(plan),
        ("compression.guard_every", "compression.guard_lost"),
        'collectives.compression = "none"',
    ),
    Idle(
        lambda plan: _compressed(plan) and plan.compression.guard_every == 0,
        ("compression.guard_lost",),
        "compression.guard_every is 0: nothing is compared",
    ),
    Idle(
        lambda plan: not _wide(plan, "pipeline"),
        ("pipeline.schedule", "pipeline.stages_per_rank", "pipeline.split"),
        "layout.pipeline is 1",
    ),
)


def excluded(plan: Plan, num_microbatches: int = 1) -> Iterator[Conflict]:
    """Yield this plan's conflicts, for at most `num_microbatches` microbatches of a rank in a step."""
    for rule in (*CONFLICTS, *SERVED, *(CAPTURED if plan.execution.cuda_graph else ())):
        if rule.applies(plan):
            yield Conflict(rule.keys[0], shown(plan, *rule.keys), rule.conflict, rule.remedy)
    if plan.execution.cuda_graph and num_microbatches > 1 and not plan.execution.exact:
        yield Conflict(
            "execution.cuda_graph",
            shown(plan, "execution.cuda_graph", "batch.grains_per_microbatch"),
            f"a captured step is one microbatch, and this one has {num_microbatches}",
            "a larger batch.grains_per_microbatch (0: all grains), or execution.cuda_graph = false",
        )


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
