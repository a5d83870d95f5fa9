"""Seconds of one stage for one microbatch: its units' operations, and the exchanges inside of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.planner.predict.collective_time import Network, RankGroup
from shoal.planner.predict.roofline import NO_COST, Cost, DeviceModel, Share, total
from shoal.planner.predict.stage_split import Counts
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import Body, Operation, OperationKind, Phase


class Pass(NamedTuple):
    """Forward or backward pass over a unit or a stage: seconds by term."""

    work: Cost = NO_COST
    again: Cost = NO_COST  # the forward repeated
    tensor: float = 0.0
    context: float = 0.0

    def plus(self, other: Pass) -> Pass:
        """Both, one after the other."""
        work, again = self.work.plus(other.work), self.again.plus(other.again)
        return Pass(work, again, self.tensor + other.tensor, self.context + other.context)

    def times(self, count: int) -> Pass:
        """Multiple of this pass."""
        return Pass(self.work.times(count), self.again.times(count), self.tensor * count, self.context * count)

    @property
    def device_seconds(self) -> float:
        """Seconds of a pass on the device: exchanges and its work wait for each other."""
        return self.work.device + self.again.device + self.tensor + self.context

    @property
    def seconds(self) -> float:
        """Seconds of a pass: the host runs beside the device."""
        return max(self.device_seconds, self.work.host + self.again.host)


NO_PASS = Pass()


@dataclass(frozen=True)
class Passes:
    """Three passes of a microbatch: forward, backward, and gradients of weights, which may be put off."""

    forward: Pass = NO_PASS
    backward_input: Pass = NO_PASS
    backward_weight: Pass = NO_PASS

    def plus(self, other: Passes) -> Passes:
        """Both, one after the other."""
        return Passes(
            self.forward.plus(other.forward),
            self.backward_input.plus(other.backward_input),
            self.backward_weight.plus(other.backward_weight),
        )

    def times(self, count: int) -> Passes:
        """Multiple of these passes."""
        return Passes(self.forward.times(count), self.backward_input.times(count), self.backward_weight.times(count))

    @cached_property
    def backward(self) -> Pass:
        """Both parts of the backward as one."""
        return self.backward_input.plus(self.backward_weight)

    @cached_property
    def forward_seconds(self) -> float:
        """Seconds of the forward."""
        return self.forward.seconds

    @cached_property
    def backward_seconds(self) -> float:
        """Seconds of the backward."""
        return self.backward.seconds

    @cached_property
    def weight_seconds(self) -> float:
        """Seconds of the gradients of weights, within the backward."""
        return self.backward_weight.seconds

    @property
    def device_seconds(self) -> float:
        """Forward and backward, on the device: of several units the sum of theirs."""
        return self.forward.device_seconds + self.backward.device_seconds

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


class BodyWork(NamedTuple):
    """Costs of one unit that no recomputation changes: operators, calls of exchanges and exchanges by phase.

    `selected`: the operators that selective recomputation repeats; `added`: adding gradients to those before.
    """

    operators: dict[Phase, Cost]
    selected: Cost
    calls: dict[Phase, Cost]
    tensor: dict[Phase, float]
    context: float
    added: Cost


class StageCosts:
    """Costs of bodies on one device under one program, each computed once for each share of a sample."""

    def __init__(self, computer: DeviceModel, network: Network, program: Program) -> None:
        self.computer, self._network, self._program = computer, network, program
        self._known: dict[tuple[int, Share, str, bool], Passes] = {}
        self._stages: dict[tuple[Counts, Share, str, bool], Passes] = {}
        self._operators: dict[tuple[int, float, int, bool], tuple[dict[Phase, Cost], Cost]] = {}
        self._work: dict[tuple[int, Share], BodyWork] = {}
        self._places: dict[int, tuple[dict[Phase, list[int]], list[int]]] = {}  # of operations, by body

    def stage(self, counts: Counts, share: Share, recompute: str, adds: bool) -> Passes:
        """The passes of the units of a stage together; `adds`: to the gradients of microbatches before."""
        key = counts, share, recompute, adds
        if key not in self._stages:
            total = Passes()
            for body, count in counts:
                total = total.plus(self.body(body, share, recompute, adds).times(count))
            self._stages[key] = total
        return self._stages[key]

    def body(self, body: Body, share: Share, recompute: str, adds: bool) -> Passes:
        """The passes of one unit."""
        share = share.of(body, self._program.divides_ends)
        key = id(body), share, recompute, adds
        if key not in self._known:
            self._known[key] = self._passes(body, share, recompute, adds)
        return self._known[key]

    def _passes(self, body: Body, share: Share, recompute: str, adds: bool) -> Passes:
        key = id(body), share
        if key not in self._work:
            self._work[key] = self._work_of(body, share)
        work = self._work[key]
        operators, calls, tensor = work.operators, work.calls, work.tensor
        again = NO_COST
        if body.repeated and recompute != "none":
            full = recompute == "full"
            again = operators[Phase.FORWARD].plus(calls[Phase.FORWARD]) if full else work.selected
        repeats = bool(again.device) and recompute == "full"
        backward = tensor[Phase.BACKWARD_INPUT]
        return Passes(
            Pass(operators[Phase.FORWARD].plus(calls[Phase.FORWARD]), NO_COST, tensor[Phase.FORWARD], work.context),
            Pass(
                operators[Phase.BACKWARD_INPUT].plus(calls[Phase.BACKWARD_INPUT]),
                again,
                backward + tensor[Phase.FORWARD] if repeats else backward,
                work.context * (2 if repeats else 1),
            ),
            Pass(
                operators[Phase.BACKWARD_WEIGHT].plus(work.added if adds else NO_COST),
                NO_COST,
                tensor[Phase.BACKWARD_WEIGHT],
            ),
        )

    def _work_of(self, body: Body, share: Share) -> BodyWork:
        same = id(body), share.local_samples, share.tensor, share.sequence
        if same not in self._operators:
            costs = self.computer.each(body, share)
            if id(body) not in self._places:
                operations = body.operations
                phases = {phase: [i for i, o in enumerate(operations) if o.phase is phase] for phase in Phase}
                self._places[id(body)] = phases, self._selected(operations)
            phases, selected = self._places[id(body)]
            operators = {phase: total([costs[i] for i in own]) for phase, own in phases.items()}
            self._operators[same] = operators, total([costs[i] for i in selected])
        return BodyWork(
            *self._operators[same],
            {phase: self._calls(body, share, phase) for phase in Phase},
            {phase: self._tensor(body, share, phase) for phase in Phase},
            self._context(body, share),
            self._added(body, share),
        )

    def _added(self, body: Body, share: Share) -> Cost:
        """Adding the gradients to those of the microbatches before: one read of each, one write."""
        held = self._program.gradient_bytes
        weights = [w for w in body.weights if w.trainable]
        num_bytes = sum(w.numel_of(share.tensor) * (w.itemsize + 2 * (held or w.itemsize)) for w in weights)
        device = self.computer.device
        seconds = self.computer.moved(num_bytes, self.computer.held.at(share.local_samples))
        return Cost(seconds + len(weights) * device.launch_seconds, len(weights) * device.dispatch_seconds)

    def _selected(self, operations: Sequence[Operation]) -> list[int]:
        """The places of the operations that selective recomputation computes again."""
        forward = [(i, o) for i, o in enumerate(operations) if o.phase is Phase.FORWARD]
        if self._program.selective == "products":  # the others are cheap, and computed again
            return [i for i, o in forward if o.kind is OperationKind.MEMORY]
        if self._program.selective == "alternate_products":
            products = [i for i, o in forward if o.kind is OperationKind.MATMUL]
            return [*(i for i, o in forward if o.kind is OperationKind.MEMORY), *products[1::2]]
        # Between the scores and their product with the values.
        places = [n for n, (_, o) in enumerate(forward) if o.kind is OperationKind.MATMUL and o.batch.per_sample]
        if places:
            return [i for i, _ in forward[places[0] : places[-1] + 1]]
        return [i for i, o in forward if o.kind is OperationKind.ATTENTION]

    def _tensor(self, body: Body, share: Share, phase: Phase) -> float:
        if share.tensor == 1:
            return 0.0
        group, total = self.tensor_group(share), 0.0
        computer, samples = self.computer, share.local_samples
        for exchange in (one for one in body.exchanges if one.phase is phase):
            num_bytes = exchange.bytes.at(samples)
            if computer.device.kind == "cpu":  # a sum is of a copy, slices are put together by one
                total += computer.moved(2 * num_bytes, computer.held.at(samples))
            for kind in exchange.kinds(share.sequence):
                total += self._network.asked(share.all_reduce, kind, num_bytes, group)
        return self._shown(total, share.tensor)

    def _shown(self, seconds: float, degree: int) -> float:
        """Exposed seconds of an exchange among so many ranks."""
        if not self._program.overlaps_exchanges:
            return seconds
        return seconds / degree + self._program.contention * seconds * (1 - 1 / degree)

    def _calls(self, body: Body, share: Share, phase: Phase) -> Cost:
        """The host's time for starting a unit's exchanges."""
        if share.tensor == 1:
            return NO_COST
        count = sum(exchange.phase is phase for exchange in body.exchanges) * (2 if share.sequence else 1)
        return Cost(0.0, count * self._program.call_seconds)

    def tensor_group(self, share: Share) -> RankGroup:
        """Neighbouring ranks: the tensor axis is the innermost."""
        return self._network.group(share.tensor, 1)

    def _context(self, body: Body, share: Share) -> float:
        """Two all_to_alls over the heads for each attention: queries, keys and values together, and the output."""
        if share.context == 1:
            return 0.0
        group, total = self._network.group(share.context, share.tensor), 0.0
        for operation in body.operations:
            if operation.kind is OperationKind.ATTENTION and operation.phase is Phase.FORWARD:
                for amount in (operation.read_bytes, operation.written_bytes):
                    total += self._network.seconds("all_to_all", amount.at(share.local_samples) / share.tensor, group)
        return self._shown(total, share.context)
