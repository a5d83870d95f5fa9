"""From what a person asks for to a complete plan that this version can execute; every conflict is refused here."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from shoal.errors import PlanError, SettingWarning, nearest
from shoal.grains import legal_data_degrees
from shoal.plan.plan import Plan

# What `--precision` names: parameters, compute, reduce, loss_scale. Autocast where compute differs from parameters.
PRECISIONS = {
    "fp32": ("float32", "float32", "float32", "none"),
    "bf16": ("float32", "bfloat16", "float32", "none"),
    "bf16-pure": ("bfloat16", "bfloat16", "float32", "none"),
    "fp16": ("float32", "float16", "float32", "dynamic"),
}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


@dataclass(frozen=True)
class Wishes:
    """What the command line or a Session asks for beyond the plan; None where it says nothing."""

    devices: int | None = None
    exact: bool | None = None
    precision: str | None = None
    workers: int | None = None
    max_microbatch: int | None = None  # samples


def apply_wishes(plan: Plan, wishes: Wishes, from_file: bool) -> Plan:
    """The plan with the wishes written into it.

    Raises: PlanError where a wish contradicts a plan file, or names no precision.
    """
    if wishes.devices is not None:
        if wishes.devices < 1:
            raise PlanError(
                given=f"--devices {wishes.devices}",
                conflict="a run needs at least one process",
                remedy="write --devices 1 or more",
            )
        world = plan.degrees.world_size
        if from_file and wishes.devices != world:
            raise PlanError(
                given=f"--devices {wishes.devices} with a plan whose layout is {_degrees(plan)}",
                conflict=f"the plan's degrees make a world of {world}",
                remedy=f"leave --devices out, or change the plan's layout so that its product is {wishes.devices}",
            )
        if not from_file:
            plan = plan.with_sections(layout={"data": wishes.devices})
    if wishes.exact is not None:
        plan = plan.with_sections(execution={"exact": wishes.exact})
    if wishes.precision is not None:
        plan = plan.with_sections(precision=_precision(wishes.precision))
    if wishes.workers is not None:
        plan = plan.with_sections(data={"workers": wishes.workers})
    return plan


def complete(plan: Plan, num_grains: int, grain_size: int, max_microbatch: int | None = None) -> Plan:
    """The plan with nothing left open for a job of `num_grains` grains of `grain_size` samples.

    `max_microbatch` is a wish in samples: the microbatch becomes as many whole grains as fit in it, at least one.
    Raises: PlanError where the job's grains do not allow the layout.
    """
    ranks = plan.layout.data * plan.layout.shard
    if ranks > num_grains:
        raise PlanError(
            given=f"{ranks} data ranks for a job of grains={num_grains}",
            conflict="a grain is computed by one rank, so a job has at most as many data ranks as grains",
            remedy=f"use {legal_data_degrees(num_grains)} data ranks, or Job(grains={ranks}) (which changes the run)",
        )
    share = -(-num_grains // ranks)
    wanted = plan.batch.grains_per_microbatch or share
    if max_microbatch is not None:
        wanted = min(wanted, max(1, max_microbatch // grain_size))
    if plan.execution.exact and wanted != 1:
        if plan.batch.grains_per_microbatch > 1:
            message = "batch.grains_per_microbatch has no effect: exact mode computes grain by grain"
            warnings.warn(message, SettingWarning, stacklevel=2)
        wanted = 1
    return plan.with_sections(batch={"grains_per_microbatch": min(wanted, share)})


def refuse_unsupported(plan: Plan) -> None:
    """Raises: PlanError naming everything in the plan that this version does not execute; never runs it as less."""
    wants = {
        "execution.exact": (plan.execution.exact and plan.layout.tensor * plan.layout.context > 1, False),
        "layout.pipeline": (plan.layout.pipeline, 1),
        "memory.recompute": (plan.memory.recompute, "none"),
        "collectives.all_reduce": (plan.collectives.all_reduce, "native"),
        "collectives.compression": (plan.collectives.compression, "none"),
        "execution.compile": (plan.execution.compile, "none"),
    }
    beyond = {key: value for key, value in wants.items() if value[0] != value[1]}
    if beyond:
        raise PlanError(
            given=", ".join(f"{key} = {asked!r}" for key, (asked, _) in beyond.items()),
            conflict="this version executes the data axis and a sharded optimizer, with native collectives only",
            remedy=", ".join(f"{key} = {known!r}" for key, (_, known) in beyond.items()),
        )
    if plan.precision.loss_scale != "none" and plan.precision.compute != "float16":
        warnings.warn(
            f"precision.loss_scale = {plan.precision.loss_scale!r} has no effect on {plan.precision.compute} compute",
            SettingWarning,
            stacklevel=2,
        )


def _precision(name: str) -> dict[str, str]:
    known = list(PRECISIONS)
    values = PRECISIONS.get(_ALIASES.get(name, name))
    if values is None:
        raise PlanError(
            given=f"--precision {name}",
            conflict="no such precision",
            remedy=f"write one of {', '.join(known)}{nearest(name, known)}",
        )
    return dict(zip(("parameters", "compute", "reduce", "loss_scale"), values, strict=True))


def _degrees(plan: Plan) -> str:
    used = {k: v for k, v in plan.layout.model_dump().items() if v > 1}
    return ", ".join(f"{k} = {v}" for k, v in used.items()) or "data = 1"
