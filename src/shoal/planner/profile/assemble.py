"""Construction of a profile from traces at several batch sizes; each amount is linear in the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.planner.profile import recurrent
from shoal.planner.profile.events import OperatorEvent, OperatorTrace, StorageRef
from shoal.planner.profile.operators import KernelCost, costs
from shoal.planner.profile.selected import selected_bytes
from shoal.planner.profile.values import (
    NOTHING,
    Amount,
    Body,
    Exchange,
    Operation,
    OperationKind,
    Phase,
    TensorCut,
    Unit,
    Weight,
)

# Bytes and FLOPs are whole numbers, so a deviation beyond rounding means that the amount is not linear.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Kernel:
    """One kernel of a traced event, with the bytes that autograd saves there."""

    event: OperatorEvent
    place: int
    number: int  # index among the event's kernels
    cost: KernelCost
    phase: Phase
    saved_bytes: float
    selected_bytes: float


def kernels(trace: OperatorTrace, of_weights: set[int]) -> list[Kernel]:
    """Return the kernels of a trace in order.

    `of_weights`: indices of the backward events that lead only to gradients of weights.
    """
    saved = _saved(trace)
    selected = selected_bytes(trace)
    found = []
    for place, event in enumerate(trace.events):
        own = recurrent.costs(event) if "lstm" in event.name else costs(event)
        kept = saved.get(place, 0.0)
        if not own and kept:
            own = [KernelCost(launches=0)]
        for number, cost in enumerate(own):
            first = number == 0
            phase = Phase.FORWARD
            if event.is_backward:
                late = cost.of_weight or place in of_weights
                phase = Phase.BACKWARD_WEIGHT if late else Phase.BACKWARD_INPUT
            found.append(
                Kernel(
                    event,
                    place,
                    number,
                    cost,
                    phase,
                    kept if first else 0.0,
                    selected.get(place, 0.0) if first else 0.0,
                )
            )
    return found


def _saved(trace: OperatorTrace) -> dict[int, float]:
    """Map each event's index to the bytes that autograd saves there, without the batch and buffers."""
    places: dict[int, int] = {}
    for place, event in enumerate(trace.events):
        if not event.is_backward and event.name != "stand_in" and (event.node not in places or not event.is_view):
            places.setdefault(event.node, place)
            if trace.events[places[event.node]].is_view:
                places[event.node] = place
    found: dict[int, float] = {}
    for saved in trace.saved:
        if saved.key not in trace.constants:
            place = places.get(saved.node, min(saved.place, len(trace.events) - 1))
            found[place] = found.get(place, 0.0) + saved.num_bytes
    return found


def saved_of_batch(trace: OperatorTrace) -> float:
    """Return the bytes of the batch and of buffers that autograd saves."""
    return float(sum(saved.num_bytes for saved in trace.saved if saved.key in trace.constants))


# --------------------------------------------------------------------------------------------------------- crossings


def crossings(trace: OperatorTrace) -> dict[int, float]:
    """Map each region to the bytes of activations that pass from regions up to it to later ones, each storage once."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    for event in trace.forward:
        for ref in event.inputs:
            if ref.key in made and ref.key not in trace.constants:
                last[ref.key] = max(last.get(ref.key, 0), event.region)
                if event.region > made[ref.key]:
                    size[ref.key] = max(size.get(ref.key, 0), ref.num_bytes)
        for ref in event.outputs:
            made.setdefault(ref.key, event.region)
    return {
        region: float(sum(size.get(key, 0) for key, start in made.items() if start <= region < last.get(key, -1)))
        for region in range(len(trace.regions))
    }


# -------------------------------------------------------------------------------------------------------------- fits


class Fit:
    """Straight lines through the values of two traces; `bent` names the amounts that a third trace contradicts."""

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples
        self.bent: list[str] = []

    def __call__(self, what: str, *values: float) -> Amount:
        """Return the line through `values` at `self.samples`; add `what` to `bent` if a third value disagrees."""
        (a, b), (x, y) = self.samples[:2], values[:2]
        slope = (y - x) / (b - a)
        fixed = x - slope * a
        for number, value in zip(self.samples[2:], values[2:], strict=True):
            if abs(fixed + slope * number - value) > _TOLERANCE * max(1.0, abs(value)) + 1.0:
                self.bent.append(what)
        return Amount(fixed, slope)


def operation(fit: Fit, same: Sequence[Kernel], cut: TensorCut, block: str | None) -> Operation:
    """Return the operation that one kernel is in all traces, with its module named relative to the block."""
    first = same[0]
    event, cost = first.event, first.cost
    where = f"{event.name} in {event.module or 'the model'}"

    def line(name: str) -> Amount:
        return fit(f"{name} of {where}", *(getattr(k.cost, name) for k in same))

    sizes = {name: line(name) for name in ("m", "n", "k")} if cost.kind is not OperationKind.MEMORY else {}
    if cost.kind is not OperationKind.MEMORY:
        sizes["batch"] = line("batch")
    return Operation(
        event.name.removeprefix("shoal_profiling."),
        _short(event.module, block),
        cost.kind,
        first.phase,
        flops=line("flops"),
        read_bytes=line("read_bytes"),
        written_bytes=line("written_bytes"),
        saved_bytes=fit(f"kept of {where}", *(k.saved_bytes for k in same)),
        selected_bytes=fit(f"kept of {where}", *(k.selected_bytes for k in same)),
        launches=cost.launches,
        dtype=_dtype(event, cost),
        cut=cut,
        window=cost.window,
        winograd=cost.winograd,
        rows=cost.rows,
        **sizes,
    )


def _short(name: str, block: str | None) -> str:
    """Return a module's name relative to its block."""
    if not block:
        return name
    return "" if name == block else name.removeprefix(f"{block}.")


def _dtype(event: OperatorEvent, cost: KernelCost) -> str:
    refs: list[StorageRef] = event.inputs if cost.kind is not OperationKind.MEMORY else [*event.outputs, *event.inputs]
    return next((r.dtype for r in refs if r.floating), refs[0].dtype if refs else "float32")


@dataclass
class Piece:
    """Region of a trace before it becomes a unit; its operations name their modules relative to the block."""

    name: str
    block: str | None
    operations: tuple[Operation, ...]
    exchanges: tuple[Exchange, ...] = ()
    weights: list[Weight] = field(default_factory=list)
    input_bytes: Amount = NOTHING
    output_bytes: Amount = NOTHING


class Bodies:
    """Set of unit bodies that makes bodies of equal content one object."""

    def __init__(self) -> None:
        self._known: dict[object, Body] = {}

    def unit(self, piece: Piece) -> Unit:
        """Return the unit for a region, with the existing body if an equal one is known."""
        body = Body(
            piece.operations,
            tuple(replace(w, name=_short(w.name, piece.block)) for w in piece.weights),
            piece.exchanges,
            piece.input_bytes,
            piece.output_bytes,
            repeated=piece.block is not None,
        )
        key = (body.operations, body.weights, body.exchanges, body.input_bytes, body.output_bytes, body.repeated)
        return Unit(piece.name, self._known.setdefault(key, body))
