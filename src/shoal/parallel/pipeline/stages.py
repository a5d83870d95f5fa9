"""Pipeline stages of an unmodified module: each stage runs the user's own function.

Modules before the stage are stubbed: they return tensors of the right shape, filled with NaN and without memory. At the
call of the stage's first module, values from the previous stage replace the arguments that depend on stubs. At the call
of the next stage's first module, its arguments are what this stage sends, and the function is left. Each stage computes
what depends on the batch alone. A value that crosses a cut in any other way would be NaN; building the stages refuses
it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shoal.errors import JobError, ShoalError, UserCodeError
from shoal.jobs.user_errors import raised_in_derivative
from shoal.numerics.grain_randomness import DrawCounter, active_scope
from shoal.parallel.model.structure import repeated_blocks
from shoal.parallel.model.value_free import ValueFree
from shoal.parallel.pipeline.stage_program import (
    Do,
    LeakError,
    StageCall,
    StageProgram,
    StubWatch,
    candidates,
    chosen,
    holds,
    leak,
    programs,
    without,
)
from shoal.parallel.pipeline.stage_repeats import RepeatTracer
from shoal.parallel.pipeline.stage_trace import Blank, Forward, Outline, Slot, StageTrace, StageTracer

# (model, batch) -> anything; the loss and each metric.
Function = Callable[[nn.Module, Any], Any]
# Returns the previous stage's tensors, given stubs of equal shape and dtype.
Receive = Callable[[list[Blank]], list[Tensor]]
# (the call's step, forward, args, kwargs) -> a substitute for the output.
Stub = Callable[[StageCall, Forward, Any, Any], Any]


class Around(Protocol):
    """Wrapper of a module's forward on the stage that computes it; stubbed modules are not wrapped."""

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prepare the forward; return its arguments."""

    def leave(self, output: Any) -> None:
        """End the forward, also if the stage ends within the module. `output`: the output, or the values to send."""

    def again(self) -> AbstractContextManager[None]:
        """Return a context for the same forward when a backward recomputes it."""


class Follower(Protocol):
    """Module that must be notified of its stubbed calls."""

    def begin(self) -> None:
        """Reset what was recorded, before a stage's forward."""

    def stubbed(self, args: Any, kwargs: Any) -> None:
        """Record a stubbed call of the module; tensors among the arguments may be stubs."""


class _Left(BaseException):
    """Exception that leaves the user's function at the next stage's beginning; no `except Exception` catches it."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.values = values


@dataclass
class Passed:
    """Result of a forward through a stage: its inputs, and `values` for the next stage, or the `result`."""

    received: list[Tensor]
    values: list[Tensor]
    result: Any = None


class _StageRun:
    """One forward through a stage; every watched module's forward passes through `call`.

    `followers`, `around` and `compiled`: special treatment of modules, by name.
    """

    def __init__(
        self,
        program: StageProgram,
        stub: Stub,
        receive: Receive,
        followers: Mapping[str, Follower],
        *,
        around: Mapping[str, Around],
        compiled: Mapping[str, Forward],
    ) -> None:
        self._program, self._stub, self._receive = program, stub, receive
        self._followers, self._around, self._compiled = followers, around, compiled
        self._place = 0
        self.begun = program.stage == 0
        self.received: list[Tensor] = []
        self._stands_for: dict[int, Tensor] = {}
        self._stubs: list[Any] = []  # an id is unique only while its tensor lives
        for follower in followers.values():
            follower.begin()

    def call(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        if self.begun:
            if name == self._program.ends_before:
                leaves = [self._stands_for.get(id(leaf), leaf) for leaf in tree_leaves((args, kwargs))]
                raise _Left([leaves[slot.places[0]] for slot in self._program.next_slots])
            if self._stands_for:
                args, kwargs = tree_map(lambda leaf: self._stands_for.get(id(leaf), leaf), (args, kwargs))
            return self._computed(name, forward, args, kwargs)
        if self._place == len(self._program.steps) or self._program.steps[self._place].name != name:
            raise _diverged(self._program, self._place, name)
        step = self._program.steps[self._place]
        self._place += 1
        if step.do in (Do.STUB, Do.DENSE):
            if name in self._followers:
                self._followers[name].stubbed(args, kwargs)
            return self._stub(step, forward, args, kwargs)
        if step.do is Do.BEGIN:
            leaves, spec = tree_flatten((args, kwargs))
            self.begun = True
            slots = self._program.slots
            stubs = [leaves[slot.places[0]] for slot in slots]
            self.received = self._receive([Blank.of(stub) for stub in stubs])
            for slot, stub, value in zip(slots, stubs, self.received, strict=True):
                value.requires_grad_(slot.needs_grad and torch.is_grad_enabled())
                self._stands_for[id(stub)] = value
                for place in slot.places:
                    leaves[place] = value
            self._stubs = stubs
            args, kwargs = tree_unflatten(leaves, spec)
        return self._computed(name, forward, args, kwargs)

    def _computed(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        around, forward = self._around.get(name), self._compiled.get(name, forward)
        if around is None:
            return forward(*args, **kwargs)
        args, kwargs = around.enter(args, kwargs)
        try:
            output = forward(*args, **kwargs)
        except _Left as left:
            around.leave(left.values)
            raise
        around.leave(output)
        return output


class StageShapes:
    """Output shapes of modules, from one run without data for each kind of arguments."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._device = device
        self._known: dict[Any, tuple[Outline, Mapping[str, int]]] = {}
        self.is_running = False

    def stub(self, step: StageCall, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Return a substitute for a module's output, and count the random draws that the call would have made."""
        name = step.name
        leaves, spec = tree_flatten((args, kwargs))
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        seen: dict[int, int] = {}
        described: list[Any] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                described.append((Blank.of(leaf), seen.setdefault(id(leaf), place)))
            else:
                described.append(leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf))
        modes = self._modules[name].training, torch.is_grad_enabled(), autocast
        key = name, modes, str(spec), tuple(described)
        known = self._known.get(key)
        if known is None:
            module = self._modules[name]
            self.is_running = True
            try:
                value_free = ValueFree(self._device)
                with value_free.in_place(module, {}):
                    given = value_free.fakes_of(leaves)
                    args, kwargs = tree_unflatten(given, spec)
                    with value_free.running(), DrawCounter(self._names) as counter:
                        output = forward(*args, **kwargs)
            except DataDependentOutputException as error:
                raise JobError(
                    given=f"module {name}, whose forward reads a number off a tensor, in a pipeline",
                    conflict="another stage computes the module: here the shapes of its outputs are known, and no "
                    "values",
                    remedy="write layout.pipeline = 1, or a forward that keeps the number in a tensor",
                ) from error
            finally:
                self.is_running = False
            known = self._known[key] = Outline.of(output, given), counter.counts
        outline, draws = known
        output, scope = outline.filled(leaves, step.do is Do.DENSE), active_scope()
        if draws and scope is not None:
            scope.pass_over(draws)
        return output


class Stages:
    """Stages of one model; `firsts` are the modules with which stages after the first begin.

    This rank runs some stages. The model has no data at construction, and later data for the names in `holds` of the
    stages that this rank runs.
    """

    def __init__(self, model: nn.Module, device: torch.device, followers: Mapping[str, Follower]) -> None:
        self._model, self._device, self._followers = model, device, followers
        self._shapes = StageShapes(model, device)
        self._handler: Callable[..., Any] | None = None
        self._programs: dict[Any, list[StageProgram]] = {}
        self._sizes = {n: t.numel() * t.itemsize for n, t in (*model.named_parameters(), *model.named_buffers())}
        self.firsts: list[str] = []
        self.holds: list[set[str]] = []
        self.cuts: list[tuple[Slot, ...]] = []  # what crosses from each stage to the next, in the traced batch
        self.around: dict[str, Around] = {}  # by module name
        self._compiled: dict[str, Forward] = {}
        self.forwards: dict[str, Forward] = {}  # the modules' own forwards, by module name
        self._blocks = [block.name for block in repeated_blocks(model) if block.children is None]
        for name, module in model.named_modules():  # every forward passes through `_call`; forward keeps its name
            self.forwards[name] = module.forward
            module.forward = functools.partial(self._call, name, module.forward)

    @classmethod
    def build(
        cls,
        model: nn.Module,
        function: Function,
        batch: Any,
        *,
        num_stages: int,
        split: Sequence[str] = (),
        device: torch.device | None = None,
        followers: Mapping[str, Follower] | None = None,
    ) -> Stages:
        """Cut a model into stages.

        Args:
            model: model without data.
            function: the loss.
            batch: a batch, for shapes only.
            num_stages: number of stages.
            split: first module of each stage after the first; by default automatic.
            device: device of the computation; by default the CPU.
            followers: modules to notify of stubbed calls, by name.

        Raises: PlanError if the model cannot be cut so; UserCodeError if it cannot be traced.
        """
        stages = cls(model, device or torch.device("cpu"), followers or {})
        trace = stages.traced(function, batch)
        refused: list[str] = []
        while True:
            stages.firsts = chosen(model, without(trace, refused), split, num_stages)
            stage_programs = programs(trace, stages.firsts)
            try:
                stages.check(function, batch, stage_programs)
                break
            except LeakError as error:
                if split:
                    raise leak(error, model, trace) from None
                refused.append(error.begins)
        stages.cuts = [program.next_slots for program in stage_programs[:-1]]
        stages.holds = holds(trace, stages.firsts, stages._sizes)
        stages._programs[function, model.training, torch.is_grad_enabled()] = stage_programs
        return stages

    def __deepcopy__(self, memo: Any) -> Stages:
        return self

    # ------------------------------------------------------------------------------------------------ forwards

    def _call(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if self._handler is None or self._shapes.is_running:
            return forward(*args, **kwargs)
        return self._handler(name, forward, args, kwargs)

    def compile(self, compiled: Callable[[str, Forward], Forward]) -> list[str]:
        """Replace the forwards of the model's blocks by those that `compiled` returns; return the blocks' names.

        Blocks within which a stage begins are excluded. The replacement applies only on the stage that computes the
        block.
        """

        def unwatched(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
            with self._handling(None):
                return forward(*args, **kwargs)

        names = [name for name in self._blocks if not any(first.startswith(f"{name}.") for first in self.firsts)]
        self._compiled = {name: functools.partial(unwatched, compiled(name, self.forwards[name])) for name in names}
        return names

    @contextlib.contextmanager
    def _handling(self, handler: Callable[..., Any] | None) -> Iterator[None]:
        before, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = before

    def is_before(self) -> bool:
        """Return True if a forward is in modules before its stage. Their outputs are meaningless."""
        run = getattr(self._handler, "__self__", None)
        return self._shapes.is_running or (isinstance(run, _StageRun) and not run.begun)

    def forward(self, stage: int, function: Function, batch: Any, receive: Receive) -> Passed:
        """Run one stage's part of `function(model, batch)`; a stage after the first begins with a call of `receive`."""
        program = self._program(function, batch)[stage]
        run = _StageRun(
            program, self._shapes.stub, receive, self._followers, around=self.around, compiled=self._compiled
        )
        try:
            with self._handling(run.call):
                result = function(self._model, batch)
        except _Left as left:
            return Passed(run.received, left.values)
        if not run.begun or program.ends_before is not None:
            raise _diverged(program, len(program.steps) - 1, "its end")
        return Passed(run.received, [], result)

    def blanks(self, stage: int, function: Function, batch: Any) -> list[Blank]:
        """Return blanks of the values that a stage would receive, without computing the values."""

        def stop(blanks: list[Blank]) -> list[Tensor]:
            expected.extend(blanks)
            raise _Left([])

        expected: list[Blank] = []
        self.forward(stage, function, batch, stop)
        return expected

    def slots(self, stage: int, function: Function, batch: Any) -> list[bool]:
        """Return, for each value that a stage receives, whether it has a gradient."""
        return [slot.needs_grad for slot in self._program(function, batch)[stage].slots]

    @contextlib.contextmanager
    def recomputing(self, stage: int, function: Function, batch: Any, received: list[Tensor]) -> Iterator[None]:
        """Return the context of a backward: a forward that it recomputes starts from the stage's received values."""
        program = self._program(function, batch)[stage]
        stubs = {step.name for step in program.steps if step.do in (Do.STUB, Do.DENSE)}

        def call(name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
            if name in stubs and any(p.is_meta for p in self._model.get_submodule(name).parameters()):
                raise JobError(
                    given=f"a stage that begins at {program.steps[-1].name}, within what torch.utils.checkpoint "
                    f"computes again: {name} is before it",
                    conflict="that part is on another rank",
                    remedy='leave checkpoint out and write memory.recompute = "full", or call it within the forward of '
                    "a block",
                )
            if program.slots and name == program.steps[-1].name:
                leaves, spec = tree_flatten((args, kwargs))
                for slot, value in zip(program.slots, received, strict=True):
                    for place in slot.places:
                        leaves[place] = value
                args, kwargs = tree_unflatten(leaves, spec)
            around, forward = self.around.get(name), self._compiled.get(name, forward)
            with around.again() if around is not None else contextlib.nullcontext():
                return forward(*args, **kwargs)

        with self._handling(call):
            yield

    # ------------------------------------------------------------------------------------------------ programs

    def _program(self, function: Function, batch: Any) -> list[StageProgram]:
        key = function, self._model.training, torch.is_grad_enabled()
        if key not in self._programs:
            trace = self.traced(function, batch)
            stage_programs = programs(trace, self.firsts)
            try:
                self.check(function, batch, stage_programs)
            except LeakError as error:
                raise leak(error, self._model, trace) from None
            self._programs[key] = stage_programs
        return self._programs[key]

    def traced(self, function: Function, batch: Any, kind: Callable[..., StageTracer] = StageTracer) -> StageTrace:
        """Return the trace of the function's calls in time. Raises: UserCodeError if it does not run without data."""
        value_free = ValueFree(self._device)
        try:
            with value_free.in_place(self._model, _users(function)) as named:
                names = {id(fake): name for name, fake in reversed(named.items())}
                tracer = kind(names, self._sizes, {n for n, _ in self._model.named_parameters()})
                given = value_free.fakes_of(batch)
                with value_free.running(), tracer.running(), self._handling(tracer.call):
                    function(self._model, given)
        except Exception as error:
            if isinstance(error, ShoalError) and not isinstance(error, UserCodeError):
                raise
            raised = error.__cause__ or error if isinstance(error, UserCodeError) else error
            if raised_in_derivative(raised):
                raise JobError(
                    given="a pipeline of a job that differentiates the model within its loss, a metric or its forward",
                    conflict="each stage has a part of the graph, and a derivative within the loss needs the whole",
                    remedy="write layout.pipeline = 1",
                ) from error
            raise JobError(
                given="a pipeline of this model",
                conflict=f"run without data, to see what is computed when, it raised {type(raised).__name__}: "
                + (str(raised).strip().splitlines() or [""])[0][:300],
                remedy="let the model's code not depend on the values of tensors (mixtures of experts in Transformers: "
                'experts_implementation="batched_mm"), or use layout.pipeline = 1',
            ) from error
        return tracer.trace

    def check(self, function: Function, batch: Any, stage_programs: list[StageProgram]) -> None:
        """Run each stage without data and check that no output depends on a stub. Raises: LeakError."""
        for program in stage_programs[1:]:
            value_free = ValueFree(self._device)
            try:
                with value_free.in_place(self._model, _users(function)) as named:
                    watch = StubWatch(named)

                    def empty(blanks: list[Blank]) -> list[Tensor]:
                        return [blank.empty() for blank in blanks]

                    run = _StageRun(program, watch.stub, empty, self._followers, around={}, compiled={})
                    watch.follow(run)
                    given = value_free.fakes_of(batch)
                    try:
                        with value_free.running(), watch, self._handling(watch.call):
                            result = tree_leaves(function(self._model, given))
                    except _Left as left:
                        result = left.values
            except DataDependentOutputException as error:
                raise JobError(
                    given="a pipeline of this model",
                    conflict="a module compares numbers of tensors, or a stage ends while a module has other "
                    "parameters than before its forward (LoRA on target_parameters replaces them in each forward)",
                    remedy="use layout.pipeline = 1, or adapters on target_modules",
                ) from error
            watch.judge(program.steps[-1].name, result)


def _users(function: Function) -> dict[str, object]:
    return {"loss": getattr(function, "function", function)}  # a LossPair's own function


def _diverged(program: StageProgram, place: int, name: str) -> UserCodeError:
    expected = program.steps[place].name if 0 <= place < len(program.steps) else program.ends_before
    return UserCodeError(
        given=f"stage {program.stage} of a pipeline",
        conflict=f"the model called {name!r} where it had called {expected!r} when it was cut",
        remedy="let the order of the model's calls not depend on the data, or use layout.pipeline = 1",
    )


def places(model: nn.Module, function: Function, batch: Any) -> tuple[str, ...]:
    """Return the modules before which a model can be cut into stages, in the order of their calls.

    The rule is the engine's own. `function`: the loss. `batch`: for shapes only. Nothing is computed, so the model may
    be without data. The modules' forwards remain wrapped, as in a pipeline.
    Raises: UserCodeError if the function does not run without data, and thus in no pipeline.
    """
    stages, names = Stages(model, torch.device("cpu"), {}), []
    trace = shared_trace(stages, model, function, batch)
    for call in candidates(model, trace):
        # An argument with a use after the call may bypass the cut: only a trial shows whether it does.
        used = max((trace.lives[key][1] for key in call.argument_ids & trace.lives.keys()), default=0)
        with contextlib.suppress(LeakError):
            if used > call.exit:
                stages.check(function, batch, programs(trace, [call.name]))
            names.append(call.name)
    return tuple(names)


def shared_trace(stages: Stages, model: nn.Module, function: Function, batch: Any) -> StageTrace:
    """Return the trace. It runs one of several equal blocks if they are known to be equal, else all."""
    forwards = {id(model.get_submodule(name).forward): forward for name, forward in stages.forwards.items()}
    with contextlib.suppress(ShoalError):
        return stages.traced(function, batch, functools.partial(RepeatTracer, model, forwards))
    return stages.traced(function, batch)
