"""Layouts for another number of devices: the same axes with other degrees."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.plans.layout import AXES, divisors
from shoal.plans.plan import LayoutSection, PipelineSection, Plan, ShardSection, TensorSection

_UNUSED = {"shard": ShardSection(), "tensor": TensorSection(), "pipeline": PipelineSection()}


def relaid(plan: Plan, devices: int) -> Plan:
    """Return the plan with degrees whose product is `devices`; only the data degree changes if that suffices.

    Otherwise the axes stay in use if the number of devices allows it, with degrees close to the old ones. Settings for
    microbatches and stages of other degrees become open, and settings of unused axes are dropped. The facts of the job
    decide later whether its model allows the degrees.
    """
    if devices == plan.degrees.world_size:
        return plan
    rest = plan.degrees.world_size // plan.layout.data
    if devices % rest == 0:
        return plan.with_sections(layout={"data": devices // rest})
    degrees = min(_candidates(plan, devices), key=lambda found: _distance(plan, found))
    sections: dict[str, object] = {name: unused for name, unused in _UNUSED.items() if degrees[name] == 1}
    if plan.layout.pipeline != degrees["pipeline"] > 1:
        sections["pipeline"] = plan.pipeline.model_copy(update={"split": ()})
    batch = plan.batch.model_copy(update={"grains_per_microbatch": 0})
    return plan.model_copy(update={"layout": LayoutSection(**degrees), "batch": batch, **sections})


def _candidates(plan: Plan, devices: int) -> Iterator[dict[str, int]]:
    """Yield degrees with this product on the axes that the plan uses, and on the data axis, which takes the rest."""
    used = [axis for axis in AXES if axis != "data" and plan.degrees.degree(axis) > 1]

    def choose(axes: list[str], left: int) -> Iterator[dict[str, int]]:
        if not axes:
            yield {**dict.fromkeys(AXES, 1), "data": left}
            return
        for degree in divisors(left):
            yield from ({**others, axes[0]: degree} for others in choose(axes[1:], left // degree))

    return choose(used, devices)


def _distance(plan: Plan, degrees: dict[str, int]) -> tuple[float, ...]:
    """Return a sort key: axes that go out of use, changes of degrees that the model bounds, changes of other degrees.

    For bounded degrees a divisor is safest: a model that four ranks divide can also be divided by two.
    """
    old = plan.degrees
    used = [axis for axis in AXES if axis != "data" and old.degree(axis) > 1]
    gone = sum(degrees[axis] == 1 for axis in used)
    unsafe = sum(old.degree(axis) % degrees[axis] != 0 for axis in used if axis != "shard")
    moved = {axis: abs(math.log(degrees[axis] / old.degree(axis))) for axis in AXES}
    bounded = sum(moved[axis] for axis in used if axis != "shard")
    return gone, unsafe, bounded, moved["shard"], moved["data"]
