"""Warnings about a plan's microbatch settings that have no effect on a job."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from shoal.errors import SettingWarning
from shoal.plans.conflicts import shown
from shoal.plans.legal import ModelFacts, idle_reduction
from shoal.plans.plan import Plan

_KEY = "batch.grains_per_microbatch"


def unheeded(plan: Plan, num_grains: int, alone: str | None) -> Iterator[str]:
    """Of a plan as it was written, on a job of `num_grains`; `alone`: what makes grains share no forward, if anything.

    Exact mode, which computes grain by grain too, is told of where the plan is completed.
    """
    wanted, share = plan.batch.grains_per_microbatch, -(-num_grains // plan.divides_step)
    if wanted > 1 and alone is not None and not plan.execution.exact:
        yield f"{shown(plan, _KEY)}: no effect, since {alone}: each grain has a forward of its own"
    elif wanted > share and not plan.execution.exact:
        yield f"{shown(plan, _KEY)}: no effect beyond {share}, since a rank has no more grains in a step"
    if alone is None:
        yield from idle_reduction(plan, ModelFacts(num_grains, grain_size=1))


def warn_of(sentences: Iterable[str], above: int = 0) -> None:
    """A warning each, at the line that called the caller, or so many calls above."""
    for sentence in sentences:
        warnings.warn(sentence, SettingWarning, stacklevel=3 + above)
