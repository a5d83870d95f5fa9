"""All that is said of a plan, at once: it is refused, warned of, and noted."""

from __future__ import annotations

import warnings

from shoal.errors import SettingWarning
from shoal.plans import Plan
from shoal.plans.legal import ModelFacts, World, conflicts, idle, notes, other_world, refuse
from shoal.plans.resolve import unheeded


def check(plan: Plan, facts: ModelFacts | None = None, world: World | None = None) -> list[str]:
    """Warns of settings without effect and returns notes; without facts, or a world, what needs them is not judged.

    Raises: PlanError with every conflict at once, each with the nearest legal values.
    """
    refuse([*(other_world(plan, world) if world is not None else ()), *conflicts(plan, facts)])
    of_job = unheeded(plan, facts.num_grains, None) if facts is not None else ()
    reduction = [sentence for sentence in of_job if sentence.startswith("shard.reduce ")]  # not grains_per_microbatch
    for sentence in (*idle(plan), *reduction):
        warnings.warn(sentence, SettingWarning, stacklevel=2)
    return list(notes(plan, facts)) if facts is not None else []
