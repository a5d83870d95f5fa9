"""Program of a stage, derived from a trace: the treatment of each call before the stage, and the stage's tensors.

A trial of the stage without data checks that none of its outputs depends on a stub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.errors import PlanError
from shoal.numerics.operators import tensors_in
from shoal.parallel.model.function_trace import FunctionCall, FunctionTrace
from shoal.parallel.pipeline.stage_trace import Forward, ModuleCall, Outline, Slot, StageTrace, written_by


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
    found = []
    for stage, (begin, end) in enumerate(pairwise([None, *begins, None])):
        steps, slots = (_steps(trace, begin), begin.slots) if begin is not None else ((), ())
        ends_before, next_slots = (end.name, end.slots) if end is not None else (None, ())
        found.append(StageProgram(stage, steps, slots, ends_before, next_slots))
    return found


def _steps(trace: StageTrace, begin: ModuleCall) -> tuple[StageCall, ...]:
    steps: list[StageCall] = []
    stubbed_until = -1
    for call in trace.calls[: begin.number]:
        if call.enter < stubbed_until:
            continue
        if not _is_stubbed(call, begin):
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
    return (*steps, StageCall(begin.name, Do.BEGIN))


def _is_stubbed(call: ModuleCall, begin: ModuleCall) -> bool:
    return call.exit < begin.enter and call.tainted


def holds(trace: StageTrace, firsts: Sequence[str], names: Mapping[str, int]) -> list[set[str]]:
    """Return the parameters and buffers that each stage uses; each of `names` is in at least one stage.

    Raises: PlanError for a buffer that one stage writes and another reads.
    """
    begins = [call for name in firsts if (call := trace.first(name)) is not None]
    held: list[set[str]] = [set() for _ in range(len(begins) + 1)]
    written: dict[str, set[int]] = {}
    for use in trace.uses:
        stages = set(_stages_of(trace, use.time, use.call, begins))
        for stage in stages:
            held[stage].add(use.name)
        if use.writes:
            written.setdefault(use.name, set()).update(stages)
    for name in written:
        if sum(name in stage for stage in held) > 1 and written[name] != set(range(len(held))):
            raise PlanError(
                given=f"a pipeline of {len(held)} stages",
                conflict=f"{name!r} is written on one stage and used on another",
                remedy="cut the model elsewhere by pipeline.split, so that one stage has both",
            )
    for name in set(names).difference(*held):  # unused names go to the stage of their module
        held[_stage_of_module(trace, name, begins)].add(name)
    return held


def _stages_of(trace: StageTrace, time: int, call: int | None, begins: Sequence[ModuleCall]) -> list[int]:
    """Return the stages that run the code of `call` at `time`: its own stage and later stages that do not stub it."""
    own = sum(begin.enter <= time for begin in begins)
    around = list(trace.around(call))
    after = [
        stage
        for stage in range(own + 1, len(begins) + 1)
        if not any(_is_stubbed(one, begins[stage - 1]) for one in around)
    ]
    return [own, *after]


def _stage_of_module(trace: StageTrace, name: str, begins: Sequence[ModuleCall]) -> int:
    prefix = name
    while prefix:
        prefix = prefix.rpartition(".")[0]
        call = trace.first(prefix)
        if call is not None and prefix:
            return sum(begin.enter <= call.enter for begin in begins)
    return 0


class LeakError(Exception):
    """A value of earlier stages crosses into the stage that `begins` with a module, other than as its argument."""

    def __init__(self, begins: str, how: str) -> None:
        super().__init__(how)
        self.begins, self.how = begins, how


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
        changed = [*call.made, *written_by(call)]
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
