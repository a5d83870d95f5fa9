"""Search for a better number of grains if the minimum microbatch, one grain, makes plans poor or impossible.

The result is evaluated, not guessed: the same case is searched again with one sample per grain. The best plan's
microbatches give the grain size, and so the number of grains to recommend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.planner.answer.outlook import Case
from shoal.planner.search.aims import Aim, Limit
from shoal.planner.search.choice import counted, gib
from shoal.planner.search.search import Candidate, Wanted
from shoal.plans.plan import described

# Smallest gain in step time that justifies advice to use more grains, which changes the run.
_GAIN = 1.05


@dataclass(frozen=True)
class Finer:
    """Recommended number of grains and its plan; `before` is the best plan with the job's own number, if any fits."""

    num_grains: int
    candidate: Candidate
    case: Case
    before: Candidate | None

    @property
    def cause(self) -> str:
        """Sentence part that names the job's number of grains as the cause."""
        work = self.case.work
        kept = "from fitting" if self.before is None else "from a better plan"
        return (
            f"the number of grains keeps the job {kept}: {work.num_grains} of {work.grain_size} samples, of which a "
            f"microbatch has at least one whole, and which at most {work.num_grains} replicas share"
        )

    @property
    def effect(self) -> str:
        """Sentence part on the effect of the recommended number."""
        found, work = self.candidate, self.case.work
        size = -(-work.global_batch // self.num_grains)
        brings = "fit, at" if self.before is None else "bring"
        instead = f" instead of {_rate(self.before, work.global_batch)}" if self.before is not None else ""
        return (
            f"Job(grains={self.num_grains}): grains of {size} {brings} {_rate(found, work.global_batch)}{instead}, by "
            f"{described(found.plan)} on {counted(found.devices)}, {gib(found.prediction.peak_bytes)} each; it changes "
            "the run"
        )


def finer(case: Case, aim: Aim, best: Candidate | None) -> Finer | None:
    """Return a better number of grains than the job's, or None if grains are not the cause.

    `best`: the best plan with the job's own grains; None if none fits.
    """
    work, batch = case.work, case.work.global_batch
    if work.grain_size == 1 or case.space.max_grains == 1:
        return None
    single = _with_grains(case, batch)
    if best is not None:
        if best.plan.batch.grains_per_microbatch > 1 and best.place.replicas < work.num_grains:
            return None  # smaller microbatches and more replicas are both possible already
        single = replace(single, space=single.space.at(*sorted({best.devices, case.space.counts[-1]})))
    limit = Limit() if best is None else Limit(seconds=best.seconds / _GAIN)
    found = next(iter(single.search().take(Wanted(aim if best is None else Aim(), limit))), None)
    if found is None:
        return None
    # The same plan with its microbatches as grains, if they divide the batch and are predicted no slower.
    size = found.plan.batch.grains_per_microbatch
    number = batch // size
    if size > 1 and batch % size == 0 and number >= max(found.place.replicas, work.num_grains + 1):
        plan = found.plan.model_copy(update={"batch": found.plan.batch.model_copy(update={"grains_per_microbatch": 1})})
        coarse = _with_grains(case, number)
        if not coarse.space.refusal(plan):
            prediction = coarse.search().predict(plan)
            if prediction.fits and prediction.step_seconds <= found.seconds * _GAIN:
                return Finer(number, Candidate(plan, prediction), case, best)
    return Finer(batch, found, case, best)


def _with_grains(case: Case, number: int) -> Case:
    size = -(-case.work.global_batch // number)
    facts = replace(case.space.facts, num_grains=number, grain_size=size)
    return replace(case, work=replace(case.work, num_grains=number), space=replace(case.space, facts=facts))


def _rate(candidate: Candidate, batch: int) -> str:
    share = candidate.prediction.mfu
    rate = f"{batch / candidate.seconds:,.0f} samples/s"
    return rate if share is None else f"{share:.0%} of the peak ({rate})"
