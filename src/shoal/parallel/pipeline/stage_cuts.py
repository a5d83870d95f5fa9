"""Cuts of a model into stages: by a plan's names, or so that the largest stage is as small as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shoal.errors import PlanError, nearest
from shoal.parallel.model.structure import members_of
from shoal.parallel.pipeline.stage_program import LeakError
from shoal.parallel.pipeline.stage_trace import ModuleCall, StageTrace
from shoal.plans.legal import IN_ORDER, other_number


def is_cut(trace: StageTrace, call: ModuleCall) -> bool:
    """Check whether the call's own arguments are all that crosses into it."""
    crossing = {key for key, (birth, last) in trace.lives.items() if birth < call.enter < last}
    return bool(call.slots) and call.keeps_graph and crossing <= call.argument_ids


def candidates(model: nn.Module, trace: StageTrace) -> list[ModuleCall]:
    """Return the first calls of members of ModuleLists and Sequentials before which the model can be cut, in order."""
    members = set(members_of(model))
    found: dict[int, ModuleCall] = {}
    seen: set[str] = set()
    for call in trace.calls:
        if call.name in seen or call.name not in members:
            continue
        seen.add(call.name)
        if is_cut(trace, call):
            # A list and its first member begin together: one cut, under the outer name.
            found.setdefault(_place(trace, call), call)
    return list(found.values())


def _place(trace: StageTrace, call: ModuleCall) -> int:
    """Return the time of the outermost enclosing call that begins at this call, with no work in between."""
    place = call.enter
    for around in trace.around(call.parent):
        if around.enter != place - 1:
            break
        place = around.enter
    return place


def chosen(model: nn.Module, trace: StageTrace, split: Sequence[str], num_stages: int) -> list[str]:
    """Return the first module of each stage after the first. Raises: PlanError that lists the possible cuts."""
    if split:
        return _given(model, trace, split, num_stages)
    if num_stages == 1:
        return []
    found = candidates(model, trace)
    if len(found) < num_stages - 1:
        raise PlanError(
            given=f"a pipeline of {num_stages} stages",
            conflict=f"this model can be cut at {len(found)} places by itself"
            + (f" ({', '.join(call.name for call in found[:6])})" if found else ""),
            remedy=f"use {len(found) + 1} stages at most (layout.pipeline * pipeline.stages_per_rank), or name the "
            "first module of each stage in pipeline.split",
        )
    costs = [(0, 0), *((call.flops, call.parameter_bytes) for call in found), (trace.flops, trace.parameter_bytes)]
    return [found[place - 1].name for place in balanced(costs, num_stages)]


def balanced(costs: Sequence[tuple[int, int]], num_stages: int) -> list[int]:
    """Return the cuts, as indices in 1..len(costs)-2, that minimise the largest stage's cost.

    `costs`: cumulative, from 0; pairs compared by the first number, then the second. The result is exact, by dynamic
    programming in O(num_stages * n^2) for n cuts.
    """
    last = len(costs) - 1

    def cost(start: int, stop: int) -> tuple[int, int]:
        return costs[stop][0] - costs[start][0], costs[stop][1] - costs[start][1]

    best = {stop: (cost(0, stop), [0]) for stop in range(1, last + 1)}
    for stages in range(2, num_stages + 1):
        better = {}
        for stop in range(stages, last + 1):
            options = ((max(best[cut][0], cost(cut, stop)), cut) for cut in range(stages - 1, stop))
            dearest, cut = min(options)
            better[stop] = dearest, [*best[cut][1], cut]
        best = better
    return best[last][1][1:]


def _given(model: nn.Module, trace: StageTrace, split: Sequence[str], num_stages: int) -> list[str]:
    given = f"pipeline.split = {list(split)}"
    miscounted = other_number(split, num_stages)
    if miscounted is not None:
        raise PlanError(
            given=f"{given} for {num_stages} stages",
            conflict=miscounted,
            remedy=f"name {num_stages - 1} modules, or none to have them chosen",
        )

    def refused(why: str) -> PlanError:
        return PlanError(given=given, conflict=why, remedy=_places(model, trace))

    canonical = {id(module): name for name, module in reversed(list(model.named_modules()))}
    every = dict(model.named_modules(remove_duplicate=False))
    calls = []
    for name in split:
        if name not in every:
            raise refused(f"the model has no module {name!r}{nearest(name, list(every))}")
        call = trace.first(canonical[id(every[name])])
        if call is None:
            raise refused(f"{name!r} is not called: a stage begins with a call")
        calls.append(call)
    if [call.enter for call in calls] != sorted({call.enter for call in calls}):
        order = dict.fromkeys(call.name for call in sorted(calls, key=lambda call: call.enter))
        raise PlanError(given=given, conflict=IN_ORDER, remedy=f"write split = {list(order)}")
    for call in calls:
        if not call.slots:
            raise refused(f"{call.name!r} is given nothing that modules before it have computed")
    return [call.name for call in calls]


def _places(model: nn.Module, trace: StageTrace) -> str:
    names = [call.name for call in candidates(model, trace)]
    shown = names if len(names) <= 12 else [*names[:6], "...", *names[-6:]]
    return f"cut before some of: {', '.join(shown)}" if names else "use layout.pipeline = 1"


def without(trace: StageTrace, refused: Sequence[str]) -> StageTrace:
    """Return the trace with some modules excluded from the possible cuts."""
    calls = [replace(call, slots=()) if call.name in refused else call for call in trace.calls]
    return replace(trace, calls=calls)


def leak(error: LeakError, model: nn.Module, trace: StageTrace) -> PlanError:
    """Return the error for the user."""
    return PlanError(
        given=f"a pipeline stage that begins at {error.begins!r}",
        conflict=error.how,
        remedy="name other modules in pipeline.split: " + _places(model, trace),
    )
