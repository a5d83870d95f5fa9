"""Construction of a profile from traces at several batch sizes; each amount is linear in the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from shoal.parallel.blocks.recompute import KEPT_NAMES
from shoal.planner.profile.division import ACCUMULATING, CutParameters, divide
from shoal.planner.profile.operators import KernelCost, costs
from shoal.planner.profile.optimizers import OptimizerCost
from shoal.planner.profile.trace import OperatorEvent, OperatorTrace, StorageRef
from shoal.planner.profile.values import (
    Amount,
    Body,
    Exchange,
    Operation,
    OperationKind,
    Phase,
    Profile,
    TensorCut,
    Unit,
    Weight,
)

# Bytes and FLOPs are whole numbers, so a deviation beyond rounding means that the amount is not linear.
_TOLERANCE = 1e-6
# Operators with results that selective recomputation saves.
_SELECTED = {f"aten.{name}" for name in KEPT_NAMES} | {"shoal_profiling.attention"}


def assembled(
    model: nn.Module,
    traces: Sequence[OperatorTrace],
    division: CutParameters,
    optimizer: OptimizerCost,
    *,
    sample_bytes: int,
    notes: Sequence[str] = (),
) -> Profile:
    """Build the profile from traces of one model at different numbers of samples."""
    fit, first = Fit([trace.samples for trace in traces]), traces[0]
    of_weights = [weight_events(trace) for trace in traces]
    divided = [divide(trace, division, places) for trace, places in zip(traces, of_weights, strict=True)]
    by_region: dict[int, list[tuple[Kernel, ...]]] = {}
    for same in zip(*map(kernels, traces, of_weights), strict=True):
        by_region.setdefault(same[0].event.region, []).append(same)
    operations: dict[int, list[Operation]] = {}
    for region, alike in by_region.items():
        for same in alike:
            cuts = divided[0].cuts.get(same[0].place, ())
            cut = cuts[min(same[0].number, len(cuts) - 1)] if cuts else TensorCut.NONE
            operations.setdefault(region, []).append(operation(fit, same, cut, first.regions[region].block))
    exchanges: dict[int, list[Exchange]] = {}
    for sent in zip(*(d.sent for d in divided), strict=True):
        amount = fit("an exchange", *(s.num_bytes for s in sent))
        exchanges.setdefault(sent[0].region, []).append(Exchange(sent[0].kind, sent[0].phase, amount))

    # Each block and each region between blocks with operations is a unit. The others belong to the unit before them.
    numbers = [r for r, region in enumerate(first.regions) if region.block or r in operations]
    homes = {
        r: max((k for k in numbers if k <= r), default=numbers[0] if numbers else 0) for r in range(len(first.regions))
    }
    names = {number: _name(first, number) for number in numbers}
    weights: dict[int, list[Weight]] = {number: [] for number in numbers}
    for name, parameter in model.named_parameters():
        if name in first.used:
            home = homes[first.used[name]]
        else:  # no operator uses the parameter: it belongs to its block, or to the last unit
            blocks = ((number, first.regions[number].block) for number in numbers)
            home = next((number for number, block in blocks if block and name.startswith(f"{block}.")), max(numbers))
        dim = division.dims.get(name)
        weights[home].append(Weight(name, tuple(parameter.shape), parameter.itemsize, parameter.requires_grad, dim))
    users: dict[str, set[int]] = {}
    for event in first.forward:
        for ref in event.inputs:
            used = first.parameters.get(ref.key)
            if used is not None:
                users.setdefault(used, set()).add(homes[event.region])

    crossing = [crossings(trace) for trace in traces]
    known: dict[object, Body] = {}  # bodies of equal content are one object
    units: list[Unit] = []
    incoming = Amount()
    for number in numbers:
        like, block = first.regions[number].like, first.regions[number].block
        source = number if like is None else like
        outgoing = fit("what is handed on", *(c[number] for c in crossing))
        key = (
            tuple(operations.get(source, ())),
            tuple(replace(w, name=_short(w.name, block)) for w in weights[number]),
            tuple(exchanges.get(source, ())),
            incoming,
            outgoing,
            block is not None,
        )
        units.append(Unit(names[number], known.setdefault(key, Body(*key))))
        incoming = outgoing

    # The fewest heads of any attention, fused or as batched products around a softmax.
    fused = [
        e.inputs[0].shape[-3] for e in first.events if e.name.endswith(".attention") and len(e.inputs[0].shape) > 3
    ]
    mixing = {e.module for e in first.events if "softmax" in e.name}
    plain = [e.inputs[0].shape[0] // first.samples for e in first.events if e.name == "aten.bmm" and e.module in mixing]
    bent = [f"not linear in the samples: {what}" for what in dict.fromkeys(fit.bent)]
    saved = ((s.num_bytes for s in trace.saved if s.key in trace.constants) for trace in traces)
    return Profile(
        tuple(units),
        sample_bytes=sample_bytes,
        state_bytes_per_element=optimizer.state_bytes_per_element,
        optimizer_passes=optimizer.passes,
        optimizer_launches=optimizer.launches,
        tied=tuple((name, names[other]) for name, where in users.items() for other in sorted(where - {min(where)})),
        heads=min((heads for heads in fused or plain if heads), default=None),
        notes=(*notes, *bent, *((optimizer.note,) if optimizer.note else ())),
        saved_batch=fit("the batch", *(float(sum(num_bytes)) for num_bytes in saved)),
    )


def _name(trace: OperatorTrace, region: int) -> str:
    """Return the name of a block, or the place between blocks, of a region."""
    block = trace.regions[region].block
    if block is not None:
        return block
    before = next((r.block for r in reversed(trace.regions[:region]) if r.block), None)
    after = next((r.block for r in trace.regions[region:] if r.block), None)
    if before is None:
        return f"before {after}" if after is not None else ""
    return f"after {before}" if after is None else f"between {before} and {after}"


def _short(name: str, block: str | None) -> str:
    """Return a module's name relative to its block."""
    if not block:
        return name
    return "" if name == block else name.removeprefix(f"{block}.")


# ------------------------------------------------------------------------------------------------------------ kernels


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
    # Bytes that autograd saves at each event, without the batch and buffers.
    places: dict[int, int] = {}
    for place, event in enumerate(trace.events):
        if not event.is_backward and event.name != "stand_in" and (event.node not in places or not event.is_view):
            places.setdefault(event.node, place)
            if trace.events[places[event.node]].is_view:
                places[event.node] = place
    saved_bytes: dict[int, float] = {}
    for saved in trace.saved:
        if saved.key not in trace.constants:
            place = places.get(saved.node, min(saved.place, len(trace.events) - 1))
            saved_bytes[place] = saved_bytes.get(place, 0.0) + saved.num_bytes
    selected = selected_bytes(trace)
    result = []
    for place, event in enumerate(trace.events):
        own, saves = costs(event), saved_bytes.get(place, 0.0)
        if not own and saves:
            own = [KernelCost(launches=0)]
        for number, cost in enumerate(own):
            phase = Phase.FORWARD
            if event.is_backward:
                is_late = cost.of_weight or place in of_weights
                phase = Phase.BACKWARD_WEIGHT if is_late else Phase.BACKWARD_INPUT
            both = (0.0, 0.0) if number else (saves, selected.get(place, 0.0))
            result.append(Kernel(event, place, number, cost, phase, *both))
    return result


def selected_bytes(trace: OperatorTrace) -> dict[int, float]:
    """Map each event's index to the bytes that selective recomputation saves: results of products and attention.

    Each storage counts once; the outputs of a block do not count. The engine does the same in
    `parallel.blocks.recompute`.
    """
    regions: dict[int, int] = {}  # by storage: the region that made it
    read_elsewhere: set[int] = set()
    for event in trace.forward:
        read_elsewhere.update(ref.key for ref in event.inputs if regions.get(ref.key, event.region) != event.region)
        for ref in event.outputs:
            regions.setdefault(ref.key, event.region)
    counted: set[int] = set()
    result: dict[int, float] = {}
    for place, event in enumerate(trace.forward):
        draws = event.arguments.get("dropout", event.arguments.get("dropout_p", 0.0))
        if event.name not in _SELECTED or draws:
            continue
        leaving = {ref.key for ref in event.outputs if ref.key in read_elsewhere and regions[ref.key] == event.region}
        new = [ref for ref in event.outputs if ref.key not in counted and ref.key not in leaving]
        counted.update(ref.key for ref in new)
        result[place] = float(sum(ref.num_bytes for ref in new))
    return result


def weight_events(trace: OperatorTrace) -> set[int]:
    """Return the indices of the backward events that lead only to gradients of weights, and so can be postponed.

    A tensor that an operator passes to an earlier region counts as the gradient of its own region's input, whatever the
    earlier region computes from it.
    """
    # Storages of weights' gradients, also before accumulation or casts.
    gradients = {ref.key for ref in trace.gradients.values()}
    for event in reversed(trace.events):
        if not event.is_backward:
            break
        if event.name in ACCUMULATING and any(o.key in gradients for o in event.outputs):
            gradients.update(i.key for i in event.inputs if i.numel == event.outputs[0].numel)
    result: set[int] = set()
    uses: dict[int, list[tuple[int, bool]]] = {}  # by storage: (region, leads to an input) of its readers
    for place in range(len(trace.events) - 1, -1, -1):
        event = trace.events[place]
        if not event.is_backward:
            break
        if event.is_view:
            continue
        results = {r.key for r in (*event.outputs, *(event.inputs[i] for i in event.written))}
        later = [use for key in results - gradients for use in uses.get(key, ())]
        onward = event.name == "stand_in" or any(region != event.region or leads for region, leads in later)
        if not onward:
            result.add(place)
        for ref in event.inputs:
            uses.setdefault(ref.key, []).append((event.region, onward))
    return result


def crossings(trace: OperatorTrace) -> dict[int, float]:
    """Map each region to the bytes of activations that pass from regions up to it to later ones, each storage once."""
    origin: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    for event in trace.forward:
        for ref in event.inputs:
            if ref.key in origin and ref.key not in trace.constants:
                last[ref.key] = max(last.get(ref.key, 0), event.region)
                if event.region > origin[ref.key]:
                    size[ref.key] = max(size.get(ref.key, 0), ref.num_bytes)
        for ref in event.outputs:
            origin.setdefault(ref.key, event.region)
    return {
        region: float(sum(size.get(key, 0) for key, start in origin.items() if start <= region < last.get(key, -1)))
        for region in range(len(trace.regions))
    }


# --------------------------------------------------------------------------------------------------------------- fits


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
    event, cost = same[0].event, same[0].cost
    where = f"{event.name} in {event.module or 'the model'}"

    def line(name: str) -> Amount:
        return fit(f"{name} of {where}", *(getattr(k.cost, name) for k in same))

    is_product = cost.kind is not OperationKind.MEMORY
    sizes = {name: line(name) for name in ("m", "n", "k", "batch")} if is_product else {}
    refs: list[StorageRef] = event.inputs if is_product else [*event.outputs, *event.inputs]
    return Operation(
        event.name.removeprefix("shoal_profiling."),
        _short(event.module, block),
        cost.kind,
        same[0].phase,
        flops=line("flops"),
        read_bytes=line("read_bytes"),
        written_bytes=line("written_bytes"),
        saved_bytes=fit(f"kept of {where}", *(k.saved_bytes for k in same)),
        selected_bytes=fit(f"kept of {where}", *(k.selected_bytes for k in same)),
        launches=cost.launches,
        dtype=next((r.dtype for r in refs if r.floating), refs[0].dtype if refs else "float32"),
        cut=cut,
        window=cost.window,
        winograd=cost.winograd,
        rows=cost.rows,
        **sizes,
    )
