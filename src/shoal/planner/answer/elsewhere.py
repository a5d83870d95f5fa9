"""Plans for other programs: the best layout among those that a program can run, with its habits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from shoal.planner.answer.outlook import SearchResult
from shoal.planner.predict.programs import HABITS
from shoal.planner.search.search import Candidate, NothingFitsError, choose
from shoal.plans.plan import Plan


def elsewhere(answer: SearchResult, name: str, axes: Collection[str], beyond: Callable[[Plan], str]) -> Candidate:
    """Return the best plan for another program, by the aim of the answer.

    Args:
        answer: of shoal's own search.
        name: of the program, as in `HABITS`.
        axes: that it has.
        beyond: returns the reason why it cannot run a plan, or nothing.

    Raises: NothingFitsError if it can run no plan that fits.
    """
    question, habits = answer.question, HABITS[name]
    own, space = question.case, question.case.space
    facts = space.facts
    facts = facts if "pipeline" in axes else replace(facts, places=())
    facts = facts if "context" in axes else replace(facts, sequence=None)
    facts = facts if "expert" in axes else replace(facts, num_experts=())
    narrow, whole = habits.plan(space.base), habits.plan(space.base, whole=True)
    plans: list[Candidate] = []
    error: NothingFitsError | None = None
    for base in [narrow] if narrow == whole else [narrow, whole]:

        def refusal(plan: Plan, divided: bool = base is narrow and narrow != whole) -> str:
            if divided and plan.layout.world_size == plan.layout.data:
                return "its parameters are cast otherwise where nothing divides them"
            return beyond(plan)

        there = replace(
            space,
            base=base,
            facts=facts,
            tensor=space.tensor and "tensor" in axes,
            data_only=space.data_only or base is not narrow,
            all_reduces={},
            one_copy=False,
            beyond=refusal,
        )
        work = own.work if base == space.base or question.traced is None else question.traced(base)
        case = replace(
            own,
            work=replace(work, places=facts.places),
            space=there,
            program=habits.of(space.base, base, own.own_program.host_seconds),
        )
        try:
            plans.append(choose(case.search(), answer.choice.aim, question.num_steps).chosen)
        except NothingFitsError as nothing:
            error = nothing
    if error is not None and not plans:
        raise NothingFitsError(
            given=f"--emit {name}: {error.given}",
            conflict=f"of the layouts that it can express, {error.conflict}",
            remedy=f"leave out --emit for shoal's own layout; or {error.remedy}",
        )
    return min(plans, key=lambda one: (answer.choice.aim.key(one.devices, one.seconds), one.rank[1]))
