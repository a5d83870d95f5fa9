"""Completion of a plan from a user's options, and refusal of every conflict."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from shoal.errors import PlanError, SettingWarning, nearest
from shoal.plans.legal import (
    ModelFacts,
    World,
    conflicts,
    legal_grains_per_microbatch,
    nearest_worlds,
    num_microbatches,
    other_world,
    refuse,
    too_many_data_ranks,
)
from shoal.plans.plan import Plan

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
    """Options of a command line or Session beyond the plan; None where an option is absent."""

    devices: int | None = None
    exact: bool | None = None
    precision: str | None = None
    workers: int | None = None
    max_microbatch: int | None = None  # samples


def apply_wishes(plan: Plan, wishes: Wishes, from_file: bool) -> Plan:
    """The plan with the wishes written into it.

    Raises: PlanError where a wish contradicts a plan file, or names no precision.
    """
    given = plan
    if wishes.devices is not None:
        if wishes.devices < 1:
            raise PlanError(
                given=f"--devices {wishes.devices}",
                conflict="a run needs at least one process",
                remedy="write --devices 1 or more",
            )
        if from_file:
            refuse(other_world(plan, World(wishes.devices, f"--devices {wishes.devices}")))
        else:
            plan = _on_devices(plan, wishes.devices)
    if wishes.exact is not None:
        plan = plan.with_sections(execution={"exact": wishes.exact})
    if wishes.precision is not None:
        plan = plan.with_sections(precision=_precision(wishes.precision))
    plan = _without_stale_prediction(plan, given)
    if wishes.workers is not None:
        plan = plan.with_sections(data={"workers": wishes.workers})
    return plan


def _without_stale_prediction(plan: Plan, given: Plan) -> Plan:
    """The plan without its prediction where that was made of other degrees, another precision or mode."""
    changed = [name for name in ("layout", "precision", "execution") if getattr(plan, name) != getattr(given, name)]
    if not changed or not plan.prediction:
        return plan
    what = " and ".join(changed)
    message = f"[prediction] is left out: it is of another {what} than this command asks for"
    warnings.warn(message, SettingWarning, stacklevel=3)
    return plan.model_copy(update={"prediction": {}})


def complete(plan: Plan, num_grains: int, grain_size: int, max_microbatch: int | None = None) -> Plan:
    """The plan with nothing left open for a job of `num_grains` grains of `grain_size` samples.

    `max_microbatch` is a wish in samples: the microbatch becomes as many whole grains as fit in it.
    Raises: PlanError where the job's grains do not allow the layout, or none fits in that.
    """
    refuse(list(too_many_data_ranks(plan, ModelFacts(num_grains, grain_size))))
    share = -(-num_grains // plan.divides_step)
    wanted = plan.batch.grains_per_microbatch or _fewest_microbatches(plan, num_grains, grain_size) or share
    if max_microbatch is not None:
        if max_microbatch < grain_size:
            raise _cuts_a_grain(max_microbatch, num_grains, grain_size)
        wanted = min(wanted, max_microbatch // grain_size)
    if plan.execution.exact and wanted != 1:
        if plan.batch.grains_per_microbatch > 1:
            message = "batch.grains_per_microbatch has no effect: exact mode computes grain by grain"
            warnings.warn(message, SettingWarning, stacklevel=2)
        wanted = 1
    return plan.with_sections(batch={"grains_per_microbatch": min(wanted, share)})


def _cuts_a_grain(max_microbatch: int, num_grains: int, grain_size: int) -> PlanError:
    smaller = -(-num_grains * grain_size // max_microbatch)
    return PlanError(
        given=f"--max-microbatch {max_microbatch} for a job of grains={num_grains}",
        conflict=f"a grain is computed whole, and has {grain_size} samples",
        remedy=f"write --max-microbatch {grain_size} or more, or Job(grains={smaller}) (which changes the run)",
    )


def refuse_unsupported(plan: Plan) -> None:
    """Raises: PlanError naming everything in the plan that this version does not execute; never runs it as less."""
    refuse(conflicts(plan))
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


def _on_devices(plan: Plan, devices: int) -> Plan:
    """The plan with the data degree that makes so many processes. Raises: PlanError where none does."""
    rest = plan.degrees.world_size // plan.layout.data
    if devices % rest:
        near = " or ".join(map(str, nearest_worlds(plan.degrees, devices)))
        others = {axis: degree for axis, degree in plan.layout.model_dump().items() if axis != "data" and degree > 1}
        raise PlanError(
            given=f"--devices {devices} for a layout of {', '.join(f'{a} = {d}' for a, d in others.items())}",
            conflict=f"these degrees make groups of {rest} processes",
            remedy=f"write --devices {near}, or give another --plan",
        )
    return plan.with_sections(layout={"data": devices // rest})


def _fewest_microbatches(plan: Plan, num_grains: int, grain_size: int) -> int:
    """Grains in a microbatch: as few microbatches as the pipeline's schedule allows, one a rank at least, and even.

    0 where the plan has no pipeline, or its schedule is not legal with any number.
    """
    if plan.layout.pipeline == 1:
        return 0
    facts = ModelFacts(num_grains, grain_size)
    counts = {
        per: num_microbatches(plan.with_sections(batch={"grains_per_microbatch": per}), facts)
        for per in legal_grains_per_microbatch(plan, facts)
    }
    filling = {per: found for per, found in counts.items() if min(found) >= plan.layout.pipeline} or counts
    fewest = filling[max(filling)] if filling else ()
    return min((per for per, found in filling.items() if found == fewest), default=0)
