"""Pipeline execution: this rank's stages, run for a step's microbatches in the order of a schedule.

A failure on one rank keeps the other ranks in step: the rest of the schedule runs with meaningless values, and the rank
raises the failure at the end.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.distributed.failures import is_lost_peer
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, new_group
from shoal.errors import PeerError
from shoal.parallel.base import Weights, backward_input, backward_weight, run_engine
from shoal.parallel.pipeline.stage_trace import Blank
from shoal.parallel.pipeline.stage_units import StageUnits
from shoal.parallel.pipeline.stages import Function, Stages
from shoal.plans.accounting.model_parallel import Crossing, Staged
from shoal.plans.schedule import Action, ActionKind, Actions, actions


class StageMessages:
    """Messages of the rank at index `place` in `ranks`. With P ranks, stage s is on ranks[s % P]."""

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        groups: dict[str, dist.ProcessGroup | None],
        *,
        through_host: bool = False,
    ) -> None:
        self._ranks, self.place, self._groups, self._through_host = list(ranks), place, groups, through_host
        self.num_ranks = len(self._ranks)
        self._pending: deque[tuple[Any, Tensor]] = deque()
        self._here: dict[tuple[str, int, int], list[Tensor]] = {}

    @classmethod
    def open(
        cls,
        every: Sequence[Sequence[int]],
        rank: int,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
        *,
        through_host: bool = False,
    ) -> StageMessages:
        """Return the messages of this rank's stages. `every`: the ranks of each pipeline of the run.

        `through_host`: whether messages are copies in the host's memory, since Gloo sends no tensor of a GPU.
        Each direction has its own group: over NCCL, messages between two ranks of one group wait for each other, even
        in opposite directions. Collective: all ranks, four new groups per pipeline.
        """
        mine = next((ranks for ranks in every if rank in ranks), (rank,))
        several = [ranks for ranks in every if len(ranks) > 1]
        ways = ("forward", "forward around", "backward", "backward around")
        groups = {way: new_group(several, timeout) for way in ways}
        return cls(mine, list(mine).index(rank), groups, through_host=through_host)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the messages."""
        return [group for group in self._groups.values() if group is not None]

    def send(self, way: str, stage: int, microbatch: int, values: Sequence[Tensor]) -> None:
        """Send `values` to a stage in the direction `way` ("forward" or "backward")."""
        to = stage % self.num_ranks
        if to == self.place:
            self._here[way, stage, microbatch] = [value.detach() for value in values]
            return
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()
        group = self._group(way, self.place, to)
        for value in values:
            whole = value.detach().contiguous()
            whole = whole.cpu() if self._through_host else whole
            work = dist.isend(whole, self._ranks[to], group=group)
            self._pending.append((work, whole))  # keeps the tensor alive until it is sent

    def receive(self, way: str, stage: int, microbatch: int, blanks: Sequence[Blank]) -> list[Tensor]:
        """Wait for the values that the neighbour in direction `way` sent to `stage`.

        `blanks`: their shapes and dtypes.
        """
        source = (stage - 1 if way == "forward" else stage + 1) % self.num_ranks
        if source == self.place:
            return self._here.pop((way, stage, microbatch))
        group = self._group(way, source, self.place)
        values = [blank.empty() for blank in blanks]
        for value in values:
            if self._through_host:
                there = torch.empty_like(value, device="cpu")
                dist.recv(there, self._ranks[source], group=group)
                value.copy_(there)
            else:
                dist.recv(value, self._ranks[source], group=group)
        return values

    def _group(self, way: str, source: int, to: int) -> dist.ProcessGroup | None:
        straight = to == source + 1 if way == "forward" else to == source - 1
        return self._groups[way if straight else f"{way} around"]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the pipeline's ranks. Collective: the ranks of the pipeline, one all-reduce."""
        if self.num_ranks > 1:
            dist.all_reduce(values, group=self._groups["forward"])
        return values

    def finish(self) -> None:
        """Wait until all messages are sent."""
        while self._pending:
            self._pending.popleft()[0].wait()
        self._here.clear()


# Returns, for a microbatch's number, a new context of its forward on a stage, which the backward enters again.
Scope = Callable[[int], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Work:
    """Functions that process the microbatches of one run.

    - `begins(microbatch)`: called before each forward of a stage.
    - `forwarded(microbatch, result)`: called after the forward, within its scope. On the last stage `result` is that of
      the function, and the call returns the tensor with a gradient; on other stages `result` is None.
    - `before_backward` and `backwarded`: called around each backward that computes weight gradients, with (microbatch,
      whether it is this rank's last).
    - `around`: context of each action of the schedule, including its messages.
    """

    function: Function
    batches: Sequence[Any]
    scope: Scope
    begins: Callable[[int], None]
    forwarded: Callable[[int, Any], Tensor | None]
    before_backward: Callable[[int, bool], None] = lambda microbatch, last: None
    backwarded: Callable[[int, bool], None] = lambda microbatch, last: None
    around: Callable[[Action], AbstractContextManager[None]] = lambda action: contextlib.nullcontext()


@dataclass
class _ForwardState:
    """State of a forward that its backward needs."""

    received: list[Tensor] = field(default_factory=list)
    needs_grad: list[bool] = field(default_factory=list)
    roots: list[GradientEdge | None] = field(default_factory=list)
    sent: list[Blank] = field(default_factory=list)
    total: Tensor | None = None
    scope: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    rest: Weights | None = None


@dataclass(eq=False)
class Pipeline:
    """Pipeline of one rank.

    `units`: this rank's stage parameters that are cut over the shard axis. `alone`: no other rank computes these stages
    with this one, so a failure here leaves the others in step. Otherwise a failure is raised at once, unless this rank
    has already sent and received all its messages.
    """

    stages: Stages
    messages: StageMessages
    schedule: str
    stages_per_rank: int
    device: torch.device
    units: StageUnits
    alone: bool = True
    _error: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.stages.around = dict(self.units.inner)
        self._num_stages = self.messages.num_ranks * self.stages_per_rank
        self.own_stages = list(range(self.messages.place, self._num_stages, self.messages.num_ranks))

    @property
    def used(self) -> dict[int, set[str]]:
        """The parameters and buffers that each stage on this rank uses."""
        return {stage: self.stages.holds[stage] for stage in self.own_stages}

    def staged(self, num_samples: int) -> Staged:
        """Return the stages for the planner's formulas. `num_samples`: size of the batch that was traced."""
        cuts = tuple(
            tuple(Crossing.of(s.blank.shape, s.blank.dtype.itemsize, num_samples, s.needs_grad) for s in slots)
            for slots in self.stages.cuts
        )
        used = {stage: frozenset(names) for stage, names in self.used.items()}
        halves = self.schedule == "zero_bubble" and self.messages.place > 0
        return Staged(tuple(self.own_stages), cuts, used, halves)

    def run(self, work: Work) -> None:
        """Run forward and backward of all microbatches; gradients are added to the parameters' `.grad`.

        Raises: a failure of this rank, after its messages for the others. Collective: the pipeline's ranks.
        """
        lists = actions(self.schedule, self.messages.num_ranks, self.stages_per_rank, len(work.batches))
        failure = self._run(work, lists[self.messages.place])
        if failure is not None:
            raise failure
        self.units.end()

    def _run(self, work: Work, own: Actions) -> Exception | None:
        """Run this rank's actions; return a failure after which the rank still served the others.

        Raises: other failures.
        """
        self._error = None
        states: dict[tuple[int, int], _ForwardState] = {}
        self.units.begin(own)
        lasts = [a for a in own if a.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)][-1:]
        for action in own:
            key = action.stage, action.microbatch
            with work.around(action), self.units.action(action):
                if action.kind is ActionKind.FORWARD:
                    states[key] = self._forward(work, action, action == own[-1])
                elif action.kind is ActionKind.BACKWARD_WEIGHT:
                    self._guarded(functools.partial(self._backward_weight, work, action, states[key], action in lasts))
                else:
                    self._backward(work, action, states[key], action in lasts)
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                del states[key]
        self.messages.finish()
        failure, self._error = self._error, None
        return failure

    def _guarded(self, act: Callable[[], Any], is_over: Callable[[], bool] = lambda: False) -> Any:
        """Call `act` unless this rank has failed, and store its failure.

        Raises: the failure if a peer is lost, or if other ranks wait for this stage.

        `is_over`: whether no message between stages is missing any more.
        """
        if self._error is not None:
            return None
        try:
            return act()
        except Exception as error:
            if is_lost_peer(error) or not (self.alone or is_over()):
                raise
            self._error = error
            return None

    # ------------------------------------------------------------------------------------------------ forward

    def _forward(self, work: Work, action: Action, ends: bool) -> _ForwardState:
        stage, m = action.stage, action.microbatch
        state = _ForwardState()
        received = False

        def receive(blanks: list[Blank]) -> list[Tensor]:
            nonlocal received
            values = self.messages.receive("forward", stage, m, blanks)
            received = True
            return values

        def act() -> list[Tensor]:
            state.scope = work.scope(m)
            work.begins(m)
            with state.scope:
                with self.units.forward(stage) as leave:
                    passed = self.stages.forward(stage, work.function, work.batches[m], receive)
                    leave(passed.values or passed.result)
                is_last = stage == self._num_stages - 1
                state.total = work.forwarded(m, passed.result if is_last else None)
            batch = work.batches[m]
            state.received, state.needs_grad = passed.received, self.stages.slots(stage, work.function, batch)
            state.sent = [Blank.of(value) for value in passed.values]
            if stage < self._num_stages - 1:
                pairs = zip(passed.values, self.stages.slots(stage + 1, work.function, batch), strict=True)
                state.roots = [get_gradient_edge(v) if needs and v.requires_grad else None for v, needs in pairs]
            return passed.values

        # An evaluation ends with the last stage: all messages of the others precede what this stage received.
        values = self._guarded(act, lambda: ends and received and stage == self._num_stages - 1)
        if values is None:
            if stage > 0 and not received:
                receive(self._blanks(work, stage, m))
            # The stage failed: it sends NaN, and stores the shapes for the backward.
            state.needs_grad = self.stages.slots(stage, work.function, work.batches[m])
            if stage > 0:
                state.received = [blank.filled() for blank in self._blanks(work, stage, m)]
            if stage < self._num_stages - 1:
                state.sent = self._blanks(work, stage + 1, m)
                state.roots = [None for _ in state.sent]
            values = [blank.filled() for blank in state.sent]
        if stage < self._num_stages - 1:
            self.messages.send("forward", stage + 1, m, values)
        return state

    def _blanks(self, work: Work, stage: int, m: int) -> list[Blank]:
        with work.scope(m):
            return self.stages.blanks(stage, work.function, work.batches[m])

    # ----------------------------------------------------------------------------------------------- backward

    def _backward(self, work: Work, action: Action, state: _ForwardState, last: bool) -> None:
        stage, m = action.stage, action.microbatch
        gradients: list[Tensor] = []
        if stage < self._num_stages - 1:
            wanted = self.stages.slots(stage + 1, work.function, work.batches[m])
            blanks = [blank for blank, needs in zip(state.sent, wanted, strict=True) if needs]
            arrived = iter(self.messages.receive("backward", stage, m, blanks))
            pairs = [(root, next(arrived)) for root, needs in zip(state.roots, wanted, strict=True) if needs]
            roots = [root for root, _ in pairs if root is not None]
            gradients = [gradient for root, gradient in pairs if root is not None]
        elif state.total is not None:
            roots, gradients = [get_gradient_edge(state.total)], [torch.ones_like(state.total)]
            state.total = None
        else:
            roots = []
        inputs = [value for value, needs in zip(state.received, state.needs_grad, strict=True) if needs]

        def act() -> list[Tensor | None]:
            if action.kind is ActionKind.BACKWARD:
                work.before_backward(m, last)
            with state.scope, self._again(work, action, state):
                if action.kind is ActionKind.BACKWARD:
                    run_engine(roots, gradients)
                    results: list[Tensor | None] = [value.grad for value in inputs]
                else:
                    given, state.rest = backward_input(roots, gradients, inputs, self.units.weights())
                    results = list(given)
            if action.kind is ActionKind.BACKWARD:
                work.backwarded(m, last)
            return results

        input_gradients = self._guarded(act)
        if stage > 0:
            if input_gradients is None:
                input_gradients = [torch.full_like(value, torch.nan) for value in inputs]
            sent = [torch.zeros_like(v) if g is None else g for v, g in zip(inputs, input_gradients, strict=True)]
            self.messages.send("backward", stage - 1, m, sent)
        state.roots = []

    def _backward_weight(self, work: Work, action: Action, state: _ForwardState, last: bool) -> None:
        assert state.rest is not None
        work.before_backward(action.microbatch, last)
        with state.scope, self._again(work, action, state):
            backward_weight(state.rest, self.units.turns(action.stage, state.rest.in_turn))
        work.backwarded(action.microbatch, last)

    def _again(self, work: Work, action: Action, state: _ForwardState) -> AbstractContextManager[None]:
        batch = work.batches[action.microbatch]
        return self.stages.recomputing(action.stage, work.function, batch, state.received)

    # --------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, function: Function, batch: Any, count: int = 2) -> list[float]:
        """Return the `count` numbers that a function computes, on every rank of the pipeline, without gradients.

        Raises: a failure of this rank; PeerError for one of another rank. Collective: the pipeline's ranks.
        """
        sums = torch.zeros(count + 1, dtype=torch.float64)

        def forwarded(_: int, result: Any) -> None:
            if result is not None:
                sums[:count] = torch.tensor([float(number) for number in result])

        work = Work(function, [batch], lambda _: contextlib.nullcontext(), lambda _: None, forwarded)
        with torch.no_grad():
            failure = self._run(work, tuple(Action(ActionKind.FORWARD, stage, 0) for stage in self.own_stages))
        sums[count] = failure is not None
        sums = self.messages.total(sums.to(self.device)).cpu()
        if failure is not None:
            raise failure
        if sums[count]:
            raise PeerError(
                given="this rank's stages of a pipeline",
                conflict="they are well, and another rank's failed",
                remedy="see what that rank says",
            )
        return sums[:count].tolist()
