"""Layouts for another number of devices: the axes of a plan with other degrees."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.plans.layout import AXES, divisors
from shoal.plans.plan import LayoutSection, PipelineSection, Plan, ShardSection, TensorSection

_UNUSED = {"shard": ShardSection(), "tensor": TensorSection(), "pipeline": PipelineSection()}


def relaid(plan: Plan, devices: int) -> Plan:
    """The plan with degrees whose product is `devices`; where the data degree alone can change, that alone.

    Else the axes stay in use as far as the number has room for them, each with a degree as near as can be to what it
    was. What a plan says about microbatches and stages of the other degrees is left open again, and about axes that
    are not in use any more, left out. Whether the job's model allows the degrees is for its facts to say.
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
    """Degrees of that product, of axes that the plan uses; of the data axis too, which may take what is left."""
    used = [axis for axis in AXES if axis != "data" and plan.degrees.degree(axis) > 1]

    def choose(axes: list[str], left: int) -> Iterator[dict[str, int]]:
        if not axes:
            yield {**dict.fromkeys(AXES, 1), "data": left}
            return
        for degree in divisors(left):
            yield from ({**others, axes[0]: degree} for others in choose(axes[1:], left // degree))

    return choose(used, devices)


def _distance(plan: Plan, degrees: dict[str, int]) -> tuple[float, ...]:
    """First how many axes go out of use, then how far degrees change that the model's structure bounds, then others.

    Of those that it bounds a divisor is safest: what was divided among four ranks can be among two.
    """
    old = plan.degrees
    used = [axis for axis in AXES if axis != "data" and old.degree(axis) > 1]
    gone = sum(degrees[axis] == 1 for axis in used)
    unsafe = sum(old.degree(axis) % degrees[axis] != 0 for axis in used if axis != "shard")
    moved = {axis: abs(math.log(degrees[axis] / old.degree(axis))) for axis in AXES}
    bounded = sum(moved[axis] for axis in used if axis != "shard")
    return gone, unsafe, bounded, moved["shard"], moved["data"]
