"""Tables of settings of a plan that exclude each other, and of settings without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal.plans.plan import Plan

# Schemes with error feedback; a cast to 16 bits loses only the last bits.
FED_BACK = ("int8", "topk", "powersgd")


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


def is_wide(plan: Plan, axis: str) -> bool:
    """Return True if a mesh axis has more than one rank."""
    return bool(getattr(plan.layout, axis) > 1)


def is_compressed(plan: Plan) -> bool:
    """Return True if gradients are compressed."""
    return plan.collectives.compression != "none"


def without(axis: str, larger: str) -> str:
    """Return a remedy that leaves an axis out. Other axes then grow, but `expert` is no factor of the world size."""
    return "layout.expert = 1" if axis == "expert" else f"layout.{axis} = 1 and a larger {larger}"


def _captured(applies: Callable[[Plan], bool], key: str, conflict: str, instead: str) -> Rule:
    return Rule(
        lambda plan: plan.execution.cuda_graph and applies(plan),
        ("execution.cuda_graph", key),
        conflict,
        f"execution.cuda_graph = false, or {instead}",
    )


_WHOLE = "a rank's captured step is that of the whole model: ranks with parts of it meet within forwards and backwards"

# Refusals of plans whose step is captured in a CUDA graph.
CAPTURED: tuple[Rule, ...] = (
    *(
        _captured(
            lambda plan, axis=axis: not plan.serves and is_wide(plan, axis),  # type: ignore[misc]
            f"layout.{axis}",
            _WHOLE,
            without(axis, "layout.data"),
        )
        for axis in ("tensor", "pipeline", "context", "expert")
    ),
    _captured(
        lambda plan: plan.shards_model,
        "shard.level",
        _WHOLE,
        'shard.level = "optimizer"',
    ),
    _captured(
        lambda plan: plan.layout.divides_grains > 1 and plan.collectives.compression != "none",
        "collectives.compression",
        "what is compressed depends on numbers that the host reads",
        'collectives.compression = "none"',
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
        lambda plan: plan.execution.compile not in ("none", "default"),
        "execution.compile",
        "torch makes graphs of its own of the blocks",
        'execution.compile = "default"',
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
)

# Refusals of plans whose linear layers multiply in float8.
FLOAT8: tuple[Rule, ...] = (
    *(
        Rule(
            lambda plan, key=key, dtype=dtype: (  # type: ignore[misc]
                plan.precision.products != "same" and value(plan, key) != dtype
            ),
            (key, "precision.products"),
            "layers in float8 keep float32 parameters, and all other layers compute in bfloat16",
            f'{key} = "{dtype}", or precision.products = "same"',
        )
        for key, dtype in (("precision.parameters", "float32"), ("precision.compute", "bfloat16"))
    ),
    Rule(
        lambda plan: plan.precision.products != "same" and plan.execution.compile != "none" and is_wide(plan, "tensor"),
        ("execution.compile", "precision.products", "layout.tensor"),
        "layers in float8 take a maximum over the tensor axis within their products, where a compiled graph has no cut",
        'execution.compile = "none", layout.tensor = 1, or precision.products = "same"',
    ),
)

_NO_SUMS = "one rank, or ranks that compute the same grains, have no gradients to sum over the data"

# Each row is one warning, reported if the settings are not at their defaults.
WITHOUT_EFFECT: tuple[Idle, ...] = (
    Idle(
        lambda plan: not is_wide(plan, "shard"), ("shard.level", "shard.reduce", "shard.offload"), "layout.shard is 1"
    ),
    Idle(
        lambda plan: is_wide(plan, "shard") and not plan.shards_model,
        ("shard.reduce",),
        'shard.level = "optimizer" leaves gradients whole, and they are summed with the last microbatch',
    ),
    Idle(lambda plan: not is_wide(plan, "tensor"), ("tensor.sequence",), "layout.tensor is 1"),
    Idle(lambda plan: plan.layout.divides_grains == 1, ("collectives.compression",), _NO_SUMS),
    Idle(lambda plan: plan.layout.divides_grains == 1, ("memory.shared",), "no two ranks have the same values"),
    Idle(
        # The tensor axis also uses shared_memory, but none of the other algorithms.
        lambda plan: (
            plan.layout.divides_grains == 1
            and not (plan.collectives.all_reduce == "shared_memory" and is_wide(plan, "tensor"))
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
        lambda plan: not is_compressed(plan),
        ("compression.guard_every", "compression.guard_lost"),
        'collectives.compression = "none"',
    ),
    Idle(
        lambda plan: is_compressed(plan) and plan.compression.guard_every == 0,
        ("compression.guard_lost",),
        "compression.guard_every is 0: nothing is compared",
    ),
    Idle(
        lambda plan: not is_wide(plan, "pipeline"),
        ("pipeline.schedule", "pipeline.stages_per_rank", "pipeline.split"),
        "layout.pipeline is 1",
    ),
)
