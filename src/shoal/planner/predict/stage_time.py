"""Seconds of one stage for one microbatch: the operations of its units and the exchanges within them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from shoal.planner.predict.collective_time import Network, RankGroup
from shoal.planner.predict.roofline import NO_COST, Cost, DeviceModel, total
from shoal.planner.predict.share import Share
from shoal.planner.predict.stage_split import Counts
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import Body, Operation, OperationKind, Phase


class Pass(NamedTuple):
    """Seconds by term of one forward or backward pass over a unit or stage, on the device and on its host."""

    work: float = 0.0
    again: float = 0.0  # recomputation of the forward
    tensor: float = 0.0
    context: float = 0.0
    host: float = 0.0
    host_again: float = 0.0

    def plus(self, other: Pass) -> Pass:
        """Return the sum of both passes, term by term."""
        return Pass(*map(add, self, other))

    @property
    def device_seconds(self) -> float:
        """Seconds of the pass on the device, where exchanges and work do not overlap."""
        return self.work + self.again + self.tensor + self.context

    @property
    def seconds(self) -> float:
        """Seconds of the pass: the larger of device and host seconds, since both run at the same time."""
        return max(self.device_seconds, self.host + self.host_again)


NO_PASS = Pass()


class Passes:
    """Passes of one microbatch: forward, backward of inputs, and backward of weights (which may be deferred)."""

    def __init__(self, forward: Pass, backward_input: Pass, backward_weight: Pass) -> None:
        """Derive `backward`, the sum of both backward parts. Its seconds include `weight_seconds`."""
        self.forward, self.backward_input, self.backward_weight = forward, backward_input, backward_weight
        self.backward = backward_input.plus(backward_weight)
        self.forward_seconds, self.backward_seconds = forward.seconds, self.backward.seconds
        self.weight_seconds = backward_weight.seconds
        self.seconds = self.forward_seconds + self.backward_seconds

    @property
    def device_seconds(self) -> float:
        """Seconds of forward and backward on the device. They add up over units."""
        return self.forward.device_seconds + self.backward.device_seconds


def together(parts: Sequence[tuple[Passes, int]]) -> Passes:
    """Return the sum of all passes, each times its number."""
    forward = _together([(one.forward, count) for one, count in parts])
    backward_input = _together([(one.backward_input, count) for one, count in parts])
    return Passes(forward, backward_input, _together([(one.backward_weight, count) for one, count in parts]))


def _together(parts: Sequence[tuple[Pass, int]]) -> Pass:
    whole: Sequence[float] = NO_PASS
    for one, count in parts:
        whole = [before + seconds * count for before, seconds in zip(whole, one, strict=True)]
    return Pass(*whole)


class BodyWork(NamedTuple):
    """Passes of one unit without recomputation, and the costs that recomputation adds.

    `adding`: backward of weights that accumulates into the gradients of earlier microbatches.
    `again`: cost of the repeated operations, by recomputation mode ("full" or "selective").
    """

    forward: Pass
    backward_input: Pass
    backward_weight: Pass
    adding: Pass
    again: dict[str, Cost]


class StageCosts:
    """Costs of bodies on one device under one program, cached by the share of a sample."""

    def __init__(self, computer: DeviceModel, network: Network, program: Program) -> None:
        self.computer, self._network, self._program = computer, network, program
        self._known: dict[tuple[int, Share, str, bool], Passes] = {}
        self._stages: dict[tuple[Counts, Share, str, bool], Passes] = {}
        self._operators: dict[tuple[int, float, int, bool], tuple[Cost, ...]] = {}
        self._work: dict[tuple[int, Share], BodyWork] = {}
        self._places: dict[int, list[list[int]]] = {}  # indices of operations by phase, by body

    def stage(self, counts: Counts, share: Share, recompute: str, adds: bool) -> Passes:
        """Return the summed passes of a stage. `adds`: gradients accumulate into those of earlier microbatches."""
        key = counts, share, recompute, adds
        found = self._stages.get(key)
        if found is None:
            parts = [(self.body(body, share, recompute, adds), count) for body, count in counts]
            found = self._stages[key] = together(parts)
        return found

    def body(self, body: Body, share: Share, recompute: str, adds: bool) -> Passes:
        """Return the passes of one unit. The arguments are those of `stage`."""
        share = share.of(body, self._program.divides_ends)
        key = id(body), share, recompute, adds
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._passes(body, share, recompute, adds)
        return found

    def _passes(self, body: Body, share: Share, recompute: str, adds: bool) -> Passes:
        work = self._work.get((id(body), share))
        if work is None:
            work = self._work[id(body), share] = self._work_of(body, share)
        forward, backward = work.forward, work.backward_input
        weights = work.adding if adds else work.backward_weight
        if not body.repeated or recompute == "none":
            return Passes(forward, backward, weights)
        again = work.again[recompute]
        tensor, context = backward.tensor, backward.context
        if again.device and recompute == "full":
            tensor, context = tensor + forward.tensor, context * 2
        return Passes(forward, Pass(backward.work, again.device, tensor, context, backward.host, again.host), weights)

    def _work_of(self, body: Body, share: Share) -> BodyWork:
        forward, backward, weights, selected = self._operators_of(body, share)
        forward = forward.plus(self._calls(body, share, Phase.FORWARD))
        backward = backward.plus(self._calls(body, share, Phase.BACKWARD_INPUT))
        tensor, context = [self._tensor(body, share, phase) for phase in Phase], self._context(body, share)
        return BodyWork(
            _pass(forward, tensor[0], context),
            _pass(backward, tensor[1], context),
            _pass(weights, tensor[2]),
            _pass(weights.plus(self._added(body, share)), tensor[2]),
            {"full": forward, "selective": selected},
        )

    def _operators_of(self, body: Body, share: Share) -> tuple[Cost, ...]:
        """Return the cost of a unit's operators by phase, and of the operators that "selective" repeats."""
        same = id(body), share.local_samples, share.tensor, share.sequence
        if same not in self._operators:
            costs, operations = self.computer.each(body, share), body.operations
            if id(body) not in self._places:
                phases = [[i for i, o in enumerate(operations) if o.phase is phase] for phase in Phase]
                self._places[id(body)] = [*phases, self._selected(operations)]
            self._operators[same] = tuple(total([costs[i] for i in own]) for own in self._places[id(body)])
        return self._operators[same]

    def _added(self, body: Body, share: Share) -> Cost:
        """Return the cost of gradient accumulation: both gradients are read and the sum is written."""
        held = self._program.gradient_bytes
        weights = [w for w in body.weights if w.trainable]
        num_bytes = sum(w.numel_of(share.tensor) * (w.itemsize + 2 * (held or w.itemsize)) for w in weights)
        device = self.computer.device
        seconds = self.computer.moved(num_bytes, self.computer.held.at(share.local_samples))
        return Cost(seconds + len(weights) * device.launch_seconds, len(weights) * device.dispatch_seconds)

    def _selected(self, operations: Sequence[Operation]) -> list[int]:
        """Return the indices of the operations that selective recomputation repeats."""
        forward = [(i, o) for i, o in enumerate(operations) if o.phase is Phase.FORWARD]
        if self._program.selective == "products":  # the other operations are cheap to repeat
            return [i for i, o in forward if o.kind is OperationKind.MEMORY]
        if self._program.selective == "alternate_products":
            products = [i for i, o in forward if o.kind is OperationKind.MATMUL]
            return [*(i for i, o in forward if o.kind is OperationKind.MEMORY), *products[1::2]]
        # all_but_attention: from the scores to their product with the values
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
            if computer.device.kind == "cpu":  # a sum works on a copy, and slices are joined by a copy
                total += computer.moved(2 * num_bytes, computer.held.at(samples))
            for kind in exchange.kinds(share.sequence):
                total += self._network.asked(share.all_reduce, kind, num_bytes, group)
        return self._shown(total, share.tensor)

    def _shown(self, seconds: float, degree: int) -> float:
        """Return the exposed seconds of an exchange among `degree` ranks."""
        if not self._program.overlaps_exchanges:
            return seconds
        return seconds / degree + self._program.contention * seconds * (1 - 1 / degree)

    def _calls(self, body: Body, share: Share, phase: Phase) -> Cost:
        """Return the host's cost of starting a unit's exchanges."""
        if share.tensor == 1:
            return NO_COST
        count = sum(exchange.phase is phase for exchange in body.exchanges) * (2 if share.sequence else 1)
        return Cost(0.0, count * self._program.call_seconds)

    def tensor_group(self, share: Share) -> RankGroup:
        """Return the group of a tensor axis. Its ranks are neighbours, since the axis is the innermost one."""
        return self._network.group(share.tensor, 1)

    def _context(self, body: Body, share: Share) -> float:
        """Return the exposed seconds of a unit's two all_to_alls over the heads per attention (inputs, output)."""
        if share.context == 1:
            return 0.0
        group, total = self._network.group(share.context, share.tensor), 0.0
        for operation in body.operations:
            if operation.kind is OperationKind.ATTENTION and operation.phase is Phase.FORWARD:
                for amount in (operation.read_bytes, operation.written_bytes):
                    total += self._network.seconds("all_to_all", amount.at(share.local_samples) / share.tensor, group)
        return self._shown(total, share.context)


def _pass(cost: Cost, tensor: float, context: float = 0.0) -> Pass:
    return Pass(work=cost.device, tensor=tensor, context=context, host=cost.host)
