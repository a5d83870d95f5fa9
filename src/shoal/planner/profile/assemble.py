"""Construction of a profile from traces at several batch sizes; each amount is linear in the samples.

Divided tensors are followed from storage to storage. A storage divided along one of its axes is identified by that
axis' span of strides, [stride, stride * size). In any view of the storage, the dim that covers the span is divided; if
several do, the outermost one is, as with heads. A product over a divided dim gives partial sums ("terms"). Sums of
terms are terms too. They are all-reduced once, where another operator reads them, however many products they combine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from shoal.parallel.blocks.recompute import KEPT_NAMES
from shoal.parallel.experts.blocks import ExpertBlock
from shoal.planner.profile.operators import PRODUCTS, KernelCost, OptimizerCost, costs
from shoal.planner.profile.trace import OperatorEvent, OperatorTrace, StorageRef
from shoal.planner.profile.values import (
    Amount,
    Body,
    Dispatch,
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
# Linear operators: applied to partial sums they give partial sums.
_LINEAR = frozenset(f"aten.{name}" for name in ("add", "add_", "sub", "sub_", "neg", "_to_copy", "clone", "mul", "div"))
# Operators between a computed weight gradient and `.grad`: sums for tied weights, casts after autocast.
ACCUMULATING = frozenset(("aten.add", "aten.add_", "aten._to_copy", "aten.clone"))
_SUMS = frozenset(
    f"aten.{name}" for name in ("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm", "norm")
)
# Statistics over a dim: how many numbers the ranks exchange for each row.
_STATISTICS = {
    "aten._log_softmax": 2,
    "aten._softmax": 2,
    "aten._log_softmax_backward_data": 1,
    "aten._softmax_backward_data": 1,
    "aten.native_layer_norm": 2,
    "aten.native_layer_norm_backward": 2,
    "shoal_profiling.rms_norm": 1,
    "shoal_profiling.rms_norm_backward": 1,
}
_NUMBER_BYTES = 4
# Sequence parallelism never divides these: they read or write a table, or the whole exchanged tensor.
_NEVER = frozenset(("aten.embedding", "aten.embedding_dense_backward", "aten.convolution"))


def assembled(
    model: nn.Module,
    traces: Sequence[OperatorTrace],
    division: CutParameters,
    optimizer: OptimizerCost,
    *,
    sample_bytes: int,
    notes: Sequence[str] = (),
    experts: Sequence[ExpertBlock] = (),
) -> Profile:
    """Build the profile from traces of one model at different numbers of samples. `experts`: its mixtures."""
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
            built = operation(fit, same, cut, first.regions[region].block)
            is_inside = any(f"{same[0].event.module}.".startswith(f"{of.name}.") for of in experts)
            operations.setdefault(region, []).append(replace(built, of_experts=is_inside))
    dispatches: dict[int, list[Dispatch]] = {}
    for of in experts:
        of_traces = [rows for trace in traces if (rows := rows_sent(trace, of)) is not None]
        if len(of_traces) == len(traces):
            amount = fit("rows of experts", *(rows.num_bytes for rows in of_traces))
            dispatches.setdefault(of_traces[0].region, []).append(Dispatch(amount, of.count, of_traces[0].chosen))
    exchanges: dict[int, list[Exchange]] = {}
    for sent in zip(*(d.sent for d in divided), strict=True):
        amount = fit("an exchange", *(s.num_bytes for s in sent))
        exchanges.setdefault(sent[0].region, []).append(Exchange(sent[0].kind, sent[0].phase, amount))

    # Each block and each region between blocks with operations is a unit. The others belong to the unit before them.
    numbers = [r for r, region in enumerate(first.regions) if region.block or r in operations]
    homes = {
        r: max((k for k in numbers if k <= r), default=numbers[0] if numbers else 0) for r in range(len(first.regions))
    }
    blocks = [region.block for region in first.regions]
    names: dict[int, str] = {}  # of a block, or of the place between blocks
    for number in numbers:
        before = next((block for block in reversed(blocks[:number]) if block), None)
        after = next((block for block in blocks[number:] if block), None)
        place = f"before {after}" if after is not None else ""
        if before is not None:
            place = f"after {before}" if after is None else f"between {before} and {after}"
        names[number] = blocks[number] or place
    weights: dict[int, list[Weight]] = {number: [] for number in numbers}
    stacked = {name for of in experts for name in of.parameters}
    for name, parameter in model.named_parameters():
        if name in first.used:
            home = homes[first.used[name]]
        else:  # no operator uses the parameter: it belongs to its block, or to the last unit
            within = (number for number in numbers if blocks[number] and name.startswith(f"{blocks[number]}."))
            home = next(within, max(numbers))
        dim = division.dims.get(name)
        own = tuple(parameter.shape), parameter.itemsize, parameter.requires_grad, dim, name in stacked
        weights[home].append(Weight(name, *own))
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
            tuple(dispatches.get(source, ())),
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
        optimizer_products=optimizer.products,
        optimizer_whole=optimizer.whole,
        tied=tuple((name, names[other]) for name, where in users.items() for other in sorted(where - {min(where)})),
        heads=min((heads for heads in fused or plain if heads), default=None),
        notes=(*notes, *bent, *((optimizer.note,) if optimizer.note else ())),
        saved_batch=fit("the batch", *(float(sum(num_bytes)) for num_bytes in saved)),
    )


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


class RowsSent(NamedTuple):
    """Rows of a mixture of experts in one trace: their bytes, their region, and the experts that compute a token."""

    num_bytes: float
    region: int
    chosen: int


def rows_sent(trace: OperatorTrace, experts: ExpertBlock) -> RowsSent | None:
    """Return the rows that the first product of each expert reads in the forward; None if the experts are not traced.

    Of a ModuleList each expert has its own first product.
    """
    inside = (e for e in trace.forward if e.module == experts.name or e.module.startswith(f"{experts.name}."))
    products = [e for e in inside if e.name in PRODUCTS or e.name == "aten._grouped_mm"]
    if not products:
        return None
    if experts.listed:
        firsts: dict[str, OperatorEvent] = {}
        for event in products:
            firsts.setdefault(event.module.removeprefix(f"{experts.name}.").partition(".")[0], event)
        products = list(firsts.values())
    else:
        products = products[:1]
    region, home = products[0].region, experts.name.rpartition(".")[0]
    num_bytes = float(sum(event.inputs[PRODUCTS.get(event.name, (0,))[0]].num_bytes for event in products))
    choices = [e for e in trace.forward if e.region == region and e.name == "aten.topk" and e.module.startswith(home)]
    return RowsSent(num_bytes, region, choices[-1].outputs[0].shape[-1] if choices else 1)


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
    sizes: dict[str, Any] = {name: line(name) for name in ("m", "n", "k", "batch")} if is_product else {}
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
        reread_bytes=line("reread_bytes"),
        **sizes,
    )


# ------------------------------------------------------------------------------------------------- tensor parallelism


@dataclass(frozen=True)
class CutParameters:
    """Parameters that tensor parallelism cuts, {name: dim}, and the names whose layers gather their outputs at once."""

    dims: Mapping[str, int] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()


class Sent(NamedTuple):
    """Collective in one trace: its kind, the region and phase that it follows, and the whole tensor's bytes."""

    kind: str
    region: int
    phase: Phase
    num_bytes: float


@dataclass
class DividedEvents:
    """Result of `divide`; `cuts` maps an event's index to one cut for each of its kernels."""

    cuts: dict[int, tuple[TensorCut, ...]] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)


# Strides [low, high), in elements, that the divided part of a storage covers, whatever the view.
Span = tuple[int, int]


class Along(NamedTuple):
    """Divided part of a dim: the factor of its index from `low` to `high`, as heads in a dim of samples x heads."""

    dim: int
    low: int
    high: int


def along(ref: StorageRef, dim: int) -> Along:
    """Return the whole dim as the divided part."""
    return Along(dim, 1, ref.shape[dim])


def span(ref: StorageRef, part: Along) -> Span:
    """Return the divided part's strides in the storage."""
    return ref.stride[part.dim] * part.low, ref.stride[part.dim] * part.high


def covers(ref: StorageRef, divided: Span | None) -> Along | None:
    """Return the outermost dim of the view that lies along a span, or None."""
    if divided is None:
        return None
    low, high = divided
    dims = [
        (step, Along(dim, max(1, low // step), min(size, -(-high // step))))
        for dim, (size, step) in enumerate(zip(ref.shape, ref.stride, strict=True))
        if size > 1 and step and step < high and step * size > low
    ]
    return max(dims)[1] if dims else None


def divide(trace: OperatorTrace, division: CutParameters, of_weights: set[int]) -> DividedEvents:
    """Determine how tensor parallelism divides each event, and which tensors the ranks exchange.

    `of_weights`: indices of the backward events that lead only to gradients of weights.
    """
    tensors = _DividedTensors(trace, division, of_weights)
    result = tensors.result
    on_terms: set[int] = set()
    for place, event in enumerate(trace.events):
        if event.is_view:
            continue
        if event.name in _LINEAR and tensors.has_only_terms(event):
            tensors.terms[event.outputs[0].key] = event.region, tensors.phase(place, event)
            on_terms.add(place)
            result.cuts[place] = _WHOLE
            continue
        for ref in event.inputs:
            tensors.exchange(ref)
        result.cuts[place] = _RULES.get(event.name, _local)(tensors, place, event)
    for ref in trace.gradients.values():
        tensors.exchange(ref, Phase.BACKWARD_WEIGHT)
    # Operators on whole activations as wide as the exchanged ones: sequence parallelism divides them.
    apart = _NEVER | PRODUCTS.keys()
    for place, cuts in result.cuts.items():
        event = trace.events[place]
        is_whole = place not in on_terms and cuts == _WHOLE and event.name not in apart
        if is_whole and any(tensors.is_stream(ref) for ref in (*event.inputs, *event.outputs)):
            result.cuts[place] = (TensorCut.SEQUENCE,)
    return result


class _DividedTensors:
    """The tensors that are divided or partial sums, after the events of a trace so far, and their exchanges."""

    def __init__(self, trace: OperatorTrace, division: CutParameters, of_weights: set[int]) -> None:
        self.trace, self.result = trace, DividedEvents()
        self.spans: dict[int, Span] = {}
        self.terms: dict[int, tuple[int, Phase]] = {}  # storage of partial sums: the region and phase that made it
        self.casts: dict[int, int] = {}  # storage of a cast weight: storage of the weight
        self._of_weights = of_weights
        self._widths: set[int] = set()  # of exchanged activations
        weights = {name: ref for name, ref in trace.weights.items() if name in division.dims}
        for name, ref in weights.items():
            self.spans[ref.key] = span(ref, along(ref, division.dims[name]))
        self._gathered = {trace.weights[name].key for name in division.gathered if name in weights}
        # Storages of cut parameters' gradients, also before accumulation or casts, with their divided spans.
        self._wanted = {
            trace.gradients[name].key: span(trace.gradients[name], along(trace.gradients[name], dim))
            for name, dim in division.dims.items()
            if name in trace.gradients
        }
        for event in reversed(trace.events):
            if not event.is_backward:
                break
            if not event.is_view and event.name in ACCUMULATING:
                part = self.wanted(event.outputs[0])
                for ref in event.inputs:
                    if part is not None and ref.shape == event.outputs[0].shape:
                        self._wanted.setdefault(ref.key, span(ref, part))

    def wanted(self, ref: StorageRef) -> Along | None:
        """Return the part along which a tensor must be divided because it becomes a cut parameter's gradient."""
        return covers(ref, self._wanted.get(ref.key))

    def dim(self, ref: StorageRef) -> int | None:
        """Return the dim along which a tensor is divided, or None."""
        part = covers(ref, self.spans.get(ref.key))
        return None if part is None else part.dim

    def mark(self, ref: StorageRef, part: Along | None) -> None:
        """Record that a tensor is divided along a part, unless it is None."""
        if part is not None:
            self.spans[ref.key] = span(ref, part)

    def take_over(self, ref: StorageRef, dim: int, source: StorageRef) -> None:
        """Divide dim `dim` of `ref` as `source` is divided."""
        part = covers(source, self.spans.get(source.key))
        if part is not None:
            self.mark(ref, part._replace(dim=dim))

    def phase(self, place: int, event: OperatorEvent) -> Phase:
        """Return the phase of an event."""
        if not event.is_backward:
            return Phase.FORWARD
        return Phase.BACKWARD_WEIGHT if place in self._of_weights else Phase.BACKWARD_INPUT

    def has_only_terms(self, event: OperatorEvent) -> bool:
        """Check whether a linear operator's operands are partial sums, so that its result is one."""
        tensors = [r for r in event.inputs if r.shape]
        if event.is_backward and event.name in ("aten.add", "aten.add_"):
            # Accumulated gradients: a whole one counts once, and the sum is exchanged.
            return any(r.key in self.terms for r in tensors)
        scaled = event.name in ("aten.mul", "aten.div") and len(tensors) > 1
        return bool(tensors) and not scaled and all(r.key in self.terms for r in tensors)

    def add_up(self, place: int, event: OperatorEvent) -> None:
        """Record that an event's results are partial sums."""
        for ref in event.outputs:
            self.terms[ref.key] = event.region, self.phase(place, event)

    def exchange(self, ref: StorageRef, phase: Phase | None = None) -> None:
        """Record the all_reduce of a tensor's partial sums, if it consists of partial sums."""
        origin = self.terms.pop(ref.key, None)
        if origin is not None:
            size = self.trace.sizes.get(ref.key, ref.num_bytes)
            self.result.sent.append(Sent("all_reduce", origin[0], phase or origin[1], float(size)))
            if origin[1] is Phase.FORWARD and len(ref.shape) > 1:
                self._widths.add(ref.shape[-1])

    def gather(self, place: int, event: OperatorEvent, ref: StorageRef) -> None:
        """Record the all_gather of a tensor, if it is divided."""
        if self.spans.pop(ref.key, None) is not None:
            size = float(self.trace.sizes.get(ref.key, ref.num_bytes))
            self.result.sent.append(Sent("all_gather", event.region, self.phase(place, event), size))

    def is_gathered(self, weight: StorageRef) -> bool:
        """Check whether a weight's layer gathers its output at once."""
        return self.casts.get(weight.key, weight.key) in self._gathered

    def is_stream(self, ref: StorageRef) -> bool:
        """Check whether a tensor is a whole activation as wide as an exchanged one."""
        wide = ref.floating and len(ref.shape) > 1 and ref.shape[-1] in self._widths
        return wide and ref.key not in self.trace.constants and ref.key not in self._wanted


# -------------------------------------------------------------------------------- rules: the cuts of an event's kernels

Cuts = tuple[TensorCut, ...]
_WHOLE: Cuts = (TensorCut.NONE,)


def _product(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    a, b = (event.inputs[i] for i in PRODUCTS[event.name])
    out = event.outputs[0]
    last = len(out.shape) - 1
    da, db = tensors.dim(a), tensors.dim(b)
    for dim, source in ((da, a), (db, b)):
        if dim is not None and dim < last - 1:
            tensors.take_over(out, dim, source)
            return (TensorCut.BATCH,)
    wanted = tensors.wanted(out)
    over_a, over_b = da == last, db == last - 1
    if wanted is not None and not (over_a and over_b):
        tensors.mark(out, wanted)
        return (TensorCut.M if wanted.dim == last - 1 else TensorCut.N,)
    if over_a and not over_b and tensors.casts.get(b.key, b.key) in tensors.trace.parameters:
        tensors.gather(place, event, a)
        return _WHOLE
    if over_a or over_b:
        tensors.add_up(place, event)
        return (TensorCut.K,)
    if da == last - 1:
        tensors.take_over(out, last - 1, a)
        return (TensorCut.M,)
    if db == last:
        tensors.take_over(out, last, b)
        if tensors.is_gathered(b):
            tensors.gather(place, event, out)
        return (TensorCut.N,)
    return _WHOLE


def _convolution(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    input, weight = event.inputs[:2]
    outer = 1 if event.arguments["transposed"] else 0
    di, dw = tensors.dim(input), tensors.dim(weight)
    grouped = event.arguments["groups"] > 1
    if di == 1 and dw == 1 - outer and not grouped:
        tensors.add_up(place, event)
        return (TensorCut.K,)
    if di == 1 and not (grouped and dw == outer):
        tensors.gather(place, event, input)
    if dw == outer:
        tensors.mark(event.outputs[0], along(event.outputs[0], 1))
        if tensors.is_gathered(weight):
            tensors.gather(place, event, event.outputs[0])
        return (TensorCut.BATCH,) if grouped else (TensorCut.N,)
    return _WHOLE


def _convolution_backward(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    input, weight = event.arguments["input"], event.arguments["weight"]
    outer = 1 if event.arguments["transposed"] else 0
    dw, grouped = tensors.dim(weight), event.arguments["groups"] > 1
    outputs = list(event.outputs)
    cuts: list[TensorCut] = []
    of_input, of_weight, of_bias = event.arguments["output_mask"]
    undivided = TensorCut.NONE if dw is None else TensorCut.BATCH if grouped else None
    if of_input:
        out = outputs.pop(0)
        if dw == outer and not grouped:
            tensors.terms[out.key] = event.region, Phase.BACKWARD_INPUT
            cuts.append(TensorCut.K)
        else:
            tensors.mark(out, along(out, 1) if dw is not None else None)
            cuts.append(undivided or TensorCut.N)
    if of_weight:
        out = outputs.pop(0)
        tensors.mark(out, None if dw is None else along(out, dw))
        cuts.append(undivided or (TensorCut.M if dw == outer else TensorCut.N))
    if of_bias:
        out = outputs.pop(0)
        tensors.mark(out, along(out, 0) if dw == outer else None)
        cuts.append(TensorCut.ALL if dw == outer else TensorCut.NONE)
    if tensors.dim(input) is not None and dw is None:
        tensors.spans.pop(input.key, None)
    return tuple(cuts)


def _embedding(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    dim = tensors.dim(event.inputs[0])
    if dim == 0:
        tensors.add_up(place, event)
        return _WHOLE
    out = event.outputs[0]
    tensors.mark(out, along(out, len(out.shape) - 1) if dim == 1 else None)
    return (TensorCut.ALL if dim == 1 else TensorCut.NONE,)


def _embedding_backward(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    wanted = tensors.wanted(event.outputs[0])
    tensors.mark(event.outputs[0], wanted)
    return (TensorCut.NONE if wanted is None else TensorCut.ALL,)


def _sum(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    ref, out = event.inputs[0], event.outputs[0]
    dim = tensors.dim(ref)
    if dim is None:
        return _WHOLE
    over = event.arguments.get("dim") or range(len(ref.shape))
    over = {d % len(ref.shape) for d in ([over] if isinstance(over, int) else over)}
    if dim in over:
        tensors.add_up(place, event)
    else:
        keeps = bool(event.arguments.get("keepdim"))
        tensors.take_over(out, dim if keeps else dim - sum(d < dim for d in over), ref)
    return (TensorCut.ALL,)


def _statistics(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    parameters = tensors.trace.parameters
    ref = next((r for r in event.inputs if tensors.dim(r) is not None and r.key not in parameters), None)
    if ref is not None:
        shape, own = event.arguments.get("normalized_shape"), event.arguments.get("dim")
        over = {own % len(ref.shape)} if isinstance(own, int) else {len(ref.shape) - 1}
        if isinstance(shape, list):
            over = {len(ref.shape) - 1 - i for i in range(len(shape))}
        if tensors.dim(ref) in over:
            rows = math.prod(ref.shape) // math.prod(ref.shape[d] for d in over)
            num_bytes = float(rows * _STATISTICS[event.name] * _NUMBER_BYTES)
            tensors.result.sent.append(Sent("all_reduce", event.region, tensors.phase(place, event), num_bytes))
    return _local(tensors, place, event)


def _loss(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    if tensors.dim(event.inputs[0]) is None:
        return _WHOLE
    tensors.terms[event.outputs[0].key] = event.region, Phase.FORWARD
    return (TensorCut.ALL,)


def _local(tensors: _DividedTensors, place: int, event: OperatorEvent) -> Cuts:
    """Divide the results of an operator on elements, heads or rows like its operands of the same shape."""
    cut = TensorCut.NONE
    for ref in event.inputs:
        dim = tensors.dim(ref)
        if dim is None:
            continue
        for out in (*event.outputs, *(event.inputs[i] for i in event.written)):
            at = _same_dim(ref, dim, out)
            if at is not None:
                cut = TensorCut.ALL
                if out.key not in tensors.spans:
                    tensors.take_over(out, at, ref)
    for out in event.outputs:
        if out.key not in tensors.spans:
            tensors.mark(out, tensors.wanted(out))
    if event.name == "aten._to_copy" and event.inputs[0].key in tensors.trace.parameters:
        tensors.casts[event.outputs[0].key] = event.inputs[0].key
    return (cut,)


def _same_dim(ref: StorageRef, dim: int, out: StorageRef) -> int | None:
    """Return the dim of `out` that corresponds to dim `dim` of `ref`, matched from the left, else from the right."""
    if out.shape[: dim + 1] == ref.shape[: dim + 1]:
        return dim
    if len(out.shape) == len(ref.shape) and out.shape[dim] == ref.shape[dim]:
        return dim
    at = dim - len(ref.shape) + len(out.shape)
    return at if 0 <= at < len(out.shape) and out.shape[at] == ref.shape[dim] else None


_RULES: dict[str, Callable[[_DividedTensors, int, OperatorEvent], Cuts]] = {
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.nll_loss_forward": _loss,
    "stand_in": lambda tensors, place, event: (),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_STATISTICS, _statistics),
}
