"""Cuts of a traced model into stages, and each stage's program: the treatment of each call before it, and its tensors.

A plan names the cuts, or they are chosen so that the largest stage is as small as possible. A trial of a stage without
data checks that none of its outputs depends on a stub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import PlanError, nearest
from shoal.numerics.operators import tensors_in
from shoal.parallel.model.structure import members_of
from shoal.parallel.model.trial import FunctionCall, FunctionTrace
from shoal.parallel.pipeline.stage_trace import Forward, ModuleCall, Outline, Slot, StageTrace, written_by
from shoal.plans.legal import IN_ORDER, other_number


class LeakError(Exception):
    """A value of earlier stages crosses into the stage that `begins` with a module, other than as its argument."""

    def __init__(self, begins: str, how: str) -> None:
        super().__init__(how)
        self.begins, self.how = begins, how


# ---------------------------------------------------------------------------------------------------------------- cuts


def is_cut(trace: StageTrace, call: ModuleCall) -> bool:
    """Return True if the call's own arguments are all that crosses into it."""
    crossing = {key for key, (birth, last) in trace.lives.items() if birth < call.enter < last}
    return bool(call.slots) and call.keeps_graph and crossing <= call.argument_ids


def candidates(model: nn.Module, trace: StageTrace) -> list[ModuleCall]:
    """Return the first calls of members of ModuleLists and Sequentials before which the model can be cut, in order."""
    members = set(members_of(model))
    by_begin: dict[int, ModuleCall] = {}
    seen: set[str] = set()
    for call in trace.calls:
        if call.name in seen or call.name not in members:
            continue
        seen.add(call.name)
        if is_cut(trace, call):
            # A list and its first member begin together: one cut, under the outer name.
            begin = call.enter
            for around in trace.around(call.parent):
                if around.enter != begin - 1:
                    break
                begin = around.enter
            by_begin.setdefault(begin, call)
    return list(by_begin.values())


def chosen(model: nn.Module, trace: StageTrace, split: Sequence[str], num_stages: int) -> list[str]:
    """Return the first module of each stage after the first. Raises: PlanError that lists the possible cuts."""
    if split:
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
    if num_stages == 1:
        return []
    possible = candidates(model, trace)
    if len(possible) < num_stages - 1:
        raise PlanError(
            given=f"a pipeline of {num_stages} stages",
            conflict=f"this model can be cut at {len(possible)} places by itself"
            + (f" ({', '.join(call.name for call in possible[:6])})" if possible else ""),
            remedy=f"use {len(possible) + 1} stages at most (layout.pipeline * pipeline.stages_per_rank), or name the "
            "first module of each stage in pipeline.split",
        )
    costs = [(0, 0), *((call.flops, call.parameter_bytes) for call in possible), (trace.flops, trace.parameter_bytes)]
    return [possible[place - 1].name for place in balanced(costs, num_stages)]


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


# ------------------------------------------------------------------------------------------------------------ programs


class Do(StrEnum):
    """Treatment of a call before the stage: run its code, replace it by a stub, or begin the stage."""

    RUN = "run"
    STUB = "stub"
    DENSE = "dense"  # a stub whose output is written into
    BEGIN = "begin"


@dataclass(frozen=True)
class StageCall:
    """Call before a stage; `outline` is that of its output in the trace."""

    name: str
    do: Do
    outline: Outline | None = None


@dataclass(frozen=True)
class StageProgram:
    """A stage's calls until it begins, in order.

    `slots`: the values that cross into the stage. `ends_before`: the module with which the next stage begins.
    """

    stage: int
    steps: tuple[StageCall, ...]
    slots: tuple[Slot, ...]
    ends_before: str | None
    next_slots: tuple[Slot, ...]


def programs(trace: StageTrace, firsts: Sequence[str]) -> list[StageProgram]:
    """Return a program per stage. Raises: PlanError if a stage needs a value that it would stub."""
    begins: list[ModuleCall] = []
    for name in firsts:
        call = trace.first(name)
        if call is None or (begins and call.enter <= begins[-1].enter):
            raise PlanError(
                given=f"a pipeline stage that begins at {name!r}",
                conflict="a function that is to be computed with the model does not call it, or not in that order",
                remedy="call the whole model in the loss and in each metric, or use layout.pipeline = 1",
            )
        if not call.keeps_graph:
            raise PlanError(
                given=f"a pipeline stage that begins at {name!r}",
                conflict="the model calls it without autograd, as under no_grad or in a reentrant checkpoint: no "
                "gradient could go back to the stage before",
                remedy="checkpoint with use_reentrant=False, or name another module in pipeline.split",
            )
        begins.append(call)
    stages = []
    for stage, (begin, end) in enumerate(pairwise([None, *begins, None])):
        steps: list[StageCall] = []
        stubbed_until = -1
        for call in trace.calls[: begin.number] if begin is not None else ():
            if call.enter < stubbed_until:
                continue
            if begin is None or not _is_stubbed(call, begin):
                steps.append(StageCall(call.name, Do.RUN))
                continue
            if call.writes_into:
                raise PlanError(
                    given=f"a pipeline stage that begins at {begin.name!r}",
                    conflict=f"{call.name!r}, which runs on a stage before it, writes into {call.writes_into}",
                    remedy="return a new tensor from that module, or use layout.pipeline = 1",
                )
            stubbed_until = call.exit
            steps.append(StageCall(call.name, Do.DENSE if call.dense else Do.STUB, call.outline))
        if begin is not None:
            steps.append(StageCall(begin.name, Do.BEGIN))
        slots = () if begin is None else begin.slots
        ends_before, next_slots = (end.name, end.slots) if end is not None else (None, ())
        stages.append(StageProgram(stage, tuple(steps), slots, ends_before, next_slots))
    return stages


def _is_stubbed(call: ModuleCall, begin: ModuleCall) -> bool:
    return call.exit < begin.enter and call.tainted


def holds(trace: StageTrace, firsts: Sequence[str], names: Mapping[str, int]) -> list[set[str]]:
    """Return the parameters and buffers that each stage uses; each of `names` is in at least one stage.

    Raises: PlanError for a buffer that one stage writes and another reads.
    """
    begins = [call for name in firsts if (call := trace.first(name)) is not None]
    names_of_stage: list[set[str]] = [set() for _ in range(len(begins) + 1)]
    written: dict[str, set[int]] = {}
    for use in trace.uses:
        # The use's own stage, and later stages that do not stub the call.
        own, around = sum(begin.enter <= use.time for begin in begins), list(trace.around(use.call))
        later = range(own + 1, len(begins) + 1)
        stages = {own, *(s for s in later if not any(_is_stubbed(one, begins[s - 1]) for one in around))}
        for stage in stages:
            names_of_stage[stage].add(use.name)
        if use.writes:
            written.setdefault(use.name, set()).update(stages)
    for name in written:
        if sum(name in stage for stage in names_of_stage) > 1 and written[name] != set(range(len(names_of_stage))):
            raise PlanError(
                given=f"a pipeline of {len(names_of_stage)} stages",
                conflict=f"{name!r} is written on one stage and used on another",
                remedy="cut the model elsewhere by pipeline.split, so that one stage has both",
            )
    for name in set(names).difference(*names_of_stage):  # unused names go to the stage of their module
        prefix, call = name.rpartition(".")[0], None
        while prefix and call is None:
            call, prefix = trace.first(prefix), prefix.rpartition(".")[0]
        names_of_stage[0 if call is None else sum(begin.enter <= call.enter for begin in begins)].add(name)
    return names_of_stage


class Followed(Protocol):
    """Interface of a forward through a stage."""

    begun: bool

    def call(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Call a module's forward, as the stage does."""


class StubWatch(FunctionTrace):
    """Tracker of stubs' outputs, and of all values computed from them, through one dry run."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        super().__init__()
        self._buffers = {id(t): name for name, t in named.items()}
        self._inside: list[str] = []
        self._used = self._spoilt = ""

    def follow(self, run: Followed) -> None:
        """Set the forward to test."""
        self._run = run

    def call(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Call a module as the tested forward does."""
        self._inside.append(name)
        try:
            return self._run.call(name, forward, args, kwargs)
        finally:
            self._inside.pop()

    def stub(self, step: StageCall, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Return a substitute for the module's output, marked as a stub's."""
        arguments = tree_leaves((args, kwargs))
        assert step.outline is not None
        with torch._C.DisableTorchFunction():
            output = step.outline.filled(arguments, dense=True)
        given = {id(leaf) for leaf in arguments}
        for tensor in tensors_in(output):
            if id(tensor) not in given:
                self.mark(tensor, self._sources.get(id(tensor), step.name))
        return output

    def seen(self, call: FunctionCall) -> None:
        """Mark values that are computed from a stub's output."""
        origin = next((self._sources[id(t)] for t in call.given if id(t) in self._sources), None)
        changed = [*call.results, *written_by(call)]
        if origin is None or not changed:
            return
        for tensor in changed:
            self.mark(tensor, self._sources.get(id(tensor), origin))
            if id(tensor) in self._buffers:
                self._spoilt = f"what {origin!r} gives has a part in the buffer {self._buffers[id(tensor)]!r}"
        if self._run.begun and not self._used:
            where = self._inside[-1] if self._inside else ""
            self._used = f", by {call.name} in " + (repr(where) if where else "the loss")

    def judge(self, begins: str, result: list[Any]) -> None:
        """Raise LeakError if a part of the result depends on a stub."""
        origin = next((self._sources[id(leaf)] for leaf in result if id(leaf) in self._sources), None)
        if origin is not None:
            how = f"what {origin!r} gives on a stage before is used after the cut{self._used or ' as it is'}"
            raise LeakError(begins, f"{how}, and not as an argument of {begins!r}")
        if self._spoilt:
            raise LeakError(begins, self._spoilt)
