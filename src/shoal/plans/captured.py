"""Validation of a plan whose step is captured in a CUDA graph: layouts and settings that prevent a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.plans.conflicts import Conflict, Rule, excluded, shown
from shoal.plans.plan import Plan


def _captured(applies: Callable[[Plan], bool], key: str, conflict: str, instead: str) -> Rule:
    return Rule(
        lambda plan: plan.execution.cuda_graph and applies(plan),
        ("execution.cuda_graph", key),
        conflict,
        f"execution.cuda_graph = false, or {instead}",
    )


_ALONE = "a step is captured on one process: what ranks tell each other is known to the host once it is under way"

# Each row is one refusal, as in `conflicts`.
CAPTURED: tuple[Rule, ...] = (
    *(
        _captured(
            lambda plan, axis=axis: not plan.serves and getattr(plan.layout, axis) > 1,  # type: ignore[misc]
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


def uncapturable(plan: Plan, num_microbatches: int) -> Iterator[Conflict]:
    """Yield the conflicts of a plan with a captured step and `num_microbatches` microbatches per rank."""
    if not plan.execution.cuda_graph:
        return
    yield from excluded(plan, CAPTURED)
    if num_microbatches > 1 and not plan.execution.exact:
        yield Conflict(
            "execution.cuda_graph",
            shown(plan, "execution.cuda_graph", "batch.grains_per_microbatch"),
            f"a captured step is one microbatch, and this one has {num_microbatches}",
            "a larger batch.grains_per_microbatch (0: all grains), or execution.cuda_graph = false",
        )
