"""Division of each operator of a trace under tensor parallelism, derived from the parameters that are cut.

Divided tensors are followed from storage to storage. A storage divided along one of its axes is identified by that
axis' span of strides, [stride, stride * size). In any view of the storage, the dim that covers the span is divided; if
several do, the outermost one is, as with heads. A product over a divided dim gives partial sums ("terms"). Sums of
terms are terms too. They are all-reduced once, where another operator reads them, however many products they combine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.planner.profile.events import OperatorEvent, OperatorTrace, StorageRef
from shoal.planner.profile.spans import Along, Span, along, covers, span
from shoal.planner.profile.values import Phase, TensorCut

# Linear operators: applied to partial sums they give partial sums.
_LINEAR = frozenset(f"aten.{name}" for name in ("add", "add_", "sub", "sub_", "neg", "_to_copy", "clone", "mul", "div"))
_PRODUCTS = {"aten.mm": (0, 1), "aten.bmm": (0, 1), "aten.addmm": (1, 2), "aten.baddbmm": (1, 2)}
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


@dataclass(frozen=True)
class CutParameters:
    """Parameters that tensor parallelism cuts, {name: dim}, and the names whose layers gather their outputs at once."""

    dims: Mapping[str, int] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sent:
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


def divide(trace: OperatorTrace, division: CutParameters, late: set[int]) -> DividedEvents:
    """Determine how tensor parallelism divides each event, and which tensors the ranks exchange.

    `late`: indices of the backward events that lead only to gradients of weights.
    """
    return _Follower(trace, division, late).run()


class _Follower:
    def __init__(self, trace: OperatorTrace, division: CutParameters, late: set[int]) -> None:
        self._trace, self._division, self._late = trace, division, late
        self._found = DividedEvents()
        self._spans: dict[int, Span] = {}
        self._terms: dict[int, tuple[int, Phase]] = {}  # storage of partial sums: the region and phase that made it
        self._widths: set[int] = set()
        self._on_terms: set[int] = set()
        self._casts: dict[int, int] = {}  # storage of a cast weight: storage of the weight
        names = {name: ref for name, ref in trace.weights.items() if name in division.dims}
        for name, ref in names.items():
            self._spans[ref.key] = span(ref, along(ref, division.dims[name]))
        self._gathered = {trace.weights[name].key for name in division.gathered if name in names}
        self._wanted = self._gradients()

    def _gradients(self) -> dict[int, Span]:
        """Map storages of cut parameters' gradients, also before accumulation or casts, to their divided spans."""
        gradients = self._trace.gradients
        found = {
            gradients[name].key: span(gradients[name], along(gradients[name], dim))
            for name, dim in self._division.dims.items()
            if name in gradients
        }
        for event in reversed(self._trace.events):
            if not event.is_backward:
                break
            if event.is_view or event.name not in ("aten.add", "aten.add_", "aten._to_copy", "aten.clone"):
                continue
            out = event.outputs[0]
            own = covers(out, found.get(out.key))
            for ref in event.inputs:
                if own is not None and ref.shape == out.shape:
                    found.setdefault(ref.key, span(ref, own))
        return found

    def run(self) -> DividedEvents:
        """Process all events in order and return their cuts and exchanges."""
        for place, event in enumerate(self._trace.events):
            if not event.is_view:
                self._found.cuts[place] = self._event(place, event)
        for ref in self._trace.gradients.values():
            if ref.key in self._terms:
                self._exchange(ref, Phase.BACKWARD_WEIGHT)
        self._between()
        return self._found

    def _event(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        if event.name not in _LINEAR or not self._all_terms(event):
            for ref in event.inputs:
                self._exchange(ref)
        elif event.inputs:
            region, phase = event.region, self._phase(place, event)
            self._terms[event.outputs[0].key] = (region, phase)
            self._on_terms.add(place)
            return (TensorCut.NONE,)
        rule = _RULES.get(event.name)
        if rule is None and event.name in _PRODUCTS:
            rule = _Follower._product
        return rule(self, place, event) if rule is not None else self._local(place, event)

    def _all_terms(self, event: OperatorEvent) -> bool:
        tensors = [r for r in event.inputs if r.shape]
        if event.is_backward and event.name in ("aten.add", "aten.add_"):
            # Accumulated gradients: a whole one counts once, and the sum is exchanged.
            return any(r.key in self._terms for r in tensors)
        scaled = event.name in ("aten.mul", "aten.div") and len(tensors) > 1
        return bool(tensors) and not scaled and all(r.key in self._terms for r in tensors)

    def _phase(self, place: int, event: OperatorEvent) -> Phase:
        if not event.is_backward:
            return Phase.FORWARD
        return Phase.BACKWARD_WEIGHT if place in self._late else Phase.BACKWARD_INPUT

    def _exchange(self, ref: StorageRef, phase: Phase | None = None) -> None:
        """Record the all_reduce of a tensor's partial sums, if it consists of partial sums."""
        made = self._terms.pop(ref.key, None)
        if made is not None:
            size = self._trace.sizes.get(ref.key, ref.num_bytes)
            self._found.sent.append(Sent("all_reduce", made[0], phase or made[1], float(size)))
            if made[1] is Phase.FORWARD and len(ref.shape) > 1:
                self._widths.add(ref.shape[-1])

    def _gather(self, place: int, event: OperatorEvent, ref: StorageRef) -> None:
        """Record the all_gather of a tensor, if it is divided."""
        if self._spans.pop(ref.key, None) is not None:
            size = float(self._trace.sizes.get(ref.key, ref.num_bytes))
            self._found.sent.append(Sent("all_gather", event.region, self._phase(place, event), size))

    def along(self, ref: StorageRef) -> Along | None:
        """Return the part of a dim along which a tensor is divided, or None."""
        return covers(ref, self._spans.get(ref.key))

    def dim(self, ref: StorageRef) -> int | None:
        """Return the dim along which a tensor is divided, or None."""
        found = self.along(ref)
        return None if found is None else found.dim

    def _mark(self, ref: StorageRef, found: Along | None) -> None:
        if found is not None:
            self._spans[ref.key] = span(ref, found)

    def _take_over(self, ref: StorageRef, dim: int, source: StorageRef) -> None:
        """Divide dim `dim` of `ref` as `source` is divided."""
        found = self.along(source)
        if found is not None:
            self._mark(ref, found._replace(dim=dim))

    def _add_up(self, place: int, event: OperatorEvent) -> None:
        for ref in event.outputs:
            self._terms[ref.key] = (event.region, self._phase(place, event))

    # ------------------------------------------------------------------------------------------------------- rules

    def _product(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        first, second = _PRODUCTS[event.name]
        a, b, out = event.inputs[first], event.inputs[second], event.outputs[0]
        last = len(out.shape) - 1
        da, db = self.dim(a), self.dim(b)
        for dim, source in ((da, a), (db, b)):
            if dim is not None and dim < last - 1:
                self._take_over(out, dim, source)
                return (TensorCut.BATCH,)
        wanted = covers(out, self._wanted.get(out.key))
        over_a, over_b = da == last, db == last - 1
        if wanted is not None and not (over_a and over_b):
            self._mark(out, wanted)
            return (TensorCut.M if wanted.dim == last - 1 else TensorCut.N,)
        if over_a and not over_b and self._is_weight(b):
            self._gather(place, event, a)
            return (TensorCut.NONE,)
        if over_a or over_b:
            self._add_up(place, event)
            return (TensorCut.K,)
        if da == last - 1:
            self._take_over(out, last - 1, a)
            return (TensorCut.M,)
        if db == last:
            self._take_over(out, last, b)
            if self._is_gathered(b):
                self._gather(place, event, out)
            return (TensorCut.N,)
        return (TensorCut.NONE,)

    def _is_weight(self, ref: StorageRef) -> bool:
        return self._casts.get(ref.key, ref.key) in self._trace.parameters

    def _is_gathered(self, ref: StorageRef) -> bool:
        return self._casts.get(ref.key, ref.key) in self._gathered

    def _convolution(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        input, weight = event.inputs[:2]
        outer = 1 if event.arguments["transposed"] else 0
        di, dw = self.dim(input), self.dim(weight)
        grouped = event.arguments["groups"] > 1
        if di == 1 and dw == 1 - outer and not grouped:
            self._add_up(place, event)
            return (TensorCut.K,)
        if di == 1 and not (grouped and dw == outer):
            self._gather(place, event, input)
        if dw == outer:
            self._mark(event.outputs[0], along(event.outputs[0], 1))
            if self._is_gathered(weight):
                self._gather(place, event, event.outputs[0])
            return (TensorCut.BATCH,) if grouped else (TensorCut.N,)
        return (TensorCut.NONE,)

    def _convolution_backward(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        input, weight = event.arguments["input"], event.arguments["weight"]
        outer = 1 if event.arguments["transposed"] else 0
        dw, grouped = self.dim(weight), event.arguments["groups"] > 1
        outputs = list(event.outputs)
        cuts: list[TensorCut] = []
        of_input, of_weight, of_bias = event.arguments["output_mask"]
        if of_input:
            made = outputs.pop(0)
            if dw == outer and not grouped:
                self._terms[made.key] = (event.region, Phase.BACKWARD_INPUT)
                cuts.append(TensorCut.K)
            else:
                self._mark(made, along(made, 1) if dw is not None else None)
                cuts.append(TensorCut.NONE if dw is None else TensorCut.BATCH if grouped else TensorCut.N)
        if of_weight:
            made = outputs.pop(0)
            self._mark(made, None if dw is None else along(made, dw))
            cuts.append(
                TensorCut.NONE
                if dw is None
                else TensorCut.BATCH
                if grouped
                else TensorCut.M
                if dw == outer
                else TensorCut.N
            )
        if of_bias:
            made = outputs.pop(0)
            self._mark(made, along(made, 0) if dw == outer else None)
            cuts.append(TensorCut.ALL if dw == outer else TensorCut.NONE)
        if self.dim(input) is not None and dw is None:
            self._spans.pop(input.key, None)
        return tuple(cuts)

    def _embedding(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        dim = self.dim(event.inputs[0])
        if dim == 0:
            self._add_up(place, event)
            return (TensorCut.NONE,)
        out = event.outputs[0]
        self._mark(out, along(out, len(out.shape) - 1) if dim == 1 else None)
        return (TensorCut.ALL if dim == 1 else TensorCut.NONE,)

    def _embedding_backward(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        out = event.outputs[0]
        wanted = covers(out, self._wanted.get(out.key))
        self._mark(out, wanted)
        return (TensorCut.NONE if wanted is None else TensorCut.ALL,)

    def _sum(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        ref, out = event.inputs[0], event.outputs[0]
        dim = self.dim(ref)
        if dim is None:
            return (TensorCut.NONE,)
        over = event.arguments.get("dim") or range(len(ref.shape))
        over = {d % len(ref.shape) for d in ([over] if isinstance(over, int) else over)}
        if dim in over:
            self._add_up(place, event)
        else:
            kept = bool(event.arguments.get("keepdim"))
            self._take_over(out, dim if kept else dim - sum(d < dim for d in over), ref)
        return (TensorCut.ALL,)

    def _statistics(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        ref = next((r for r in event.inputs if self.dim(r) is not None and r.key not in self._trace.parameters), None)
        if ref is not None:
            dim = self.dim(ref)
            shape = event.arguments.get("normalized_shape")
            own = event.arguments.get("dim")
            over = {own % len(ref.shape)} if isinstance(own, int) else {len(ref.shape) - 1}
            if isinstance(shape, list):
                over = {len(ref.shape) - 1 - i for i in range(len(shape))}
            if dim in over:
                rows = math.prod(ref.shape) // math.prod(ref.shape[d] for d in over)
                num_bytes = float(rows * _STATISTICS[event.name] * _NUMBER_BYTES)
                self._found.sent.append(Sent("all_reduce", event.region, self._phase(place, event), num_bytes))
        return self._local(place, event)

    def _loss(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        if self.dim(event.inputs[0]) is None:
            return (TensorCut.NONE,)
        self._terms[event.outputs[0].key] = (event.region, Phase.FORWARD)
        return (TensorCut.ALL,)

    def _stand_in(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        return ()

    def _local(self, place: int, event: OperatorEvent) -> tuple[TensorCut, ...]:
        """Divide the results of an operator on elements, heads or rows like its operands of the same shape."""
        cut = TensorCut.NONE
        for ref in event.inputs:
            dim = self.dim(ref)
            if dim is None:
                continue
            for out in (*event.outputs, *(event.inputs[i] for i in event.written)):
                at = _same_dim(ref, dim, out)
                if at is not None:
                    cut = TensorCut.ALL
                    if out.key not in self._spans:
                        self._take_over(out, at, ref)
        for out in event.outputs:
            wanted = covers(out, self._wanted.get(out.key))
            if wanted is not None and out.key not in self._spans:
                self._mark(out, wanted)
        if event.name == "aten._to_copy" and event.inputs[0].key in self._trace.parameters:
            self._casts[event.outputs[0].key] = event.inputs[0].key
        return (cut,)

    # ----------------------------------------------------------------------------------------------- between pairs

    def _between(self) -> None:
        """Mark operators on whole activations as wide as the exchanged ones, which sequence parallelism divides."""
        for place, cuts in self._found.cuts.items():
            event = self._trace.events[place]
            if place in self._on_terms:
                continue
            if cuts == (TensorCut.NONE,) and event.name not in _PRODUCTS and event.name not in _NEVER:
                refs = (*event.inputs, *event.outputs)
                if any(self._is_stream(ref) for ref in refs):
                    self._found.cuts[place] = (TensorCut.SEQUENCE,)

    def _is_stream(self, ref: StorageRef) -> bool:
        wide = ref.floating and len(ref.shape) > 1 and ref.shape[-1] in self._widths
        return wide and ref.key not in self._trace.constants and ref.key not in self._wanted


# Sequence parallelism never divides these: they read or write a table, or the whole exchanged tensor.
_NEVER = frozenset(("aten.embedding", "aten.embedding_dense_backward", "aten.convolution"))


def _same_dim(ref: StorageRef, dim: int, out: StorageRef) -> int | None:
    """Return the dim of `out` that corresponds to dim `dim` of `ref`, matched from the left, else from the right."""
    if out.shape[: dim + 1] == ref.shape[: dim + 1]:
        return dim
    if len(out.shape) == len(ref.shape) and out.shape[dim] == ref.shape[dim]:
        return dim
    at = dim - len(ref.shape) + len(out.shape)
    return at if 0 <= at < len(out.shape) and out.shape[at] == ref.shape[dim] else None


_RULES: dict[str, Callable[[_Follower, int, OperatorEvent], tuple[TensorCut, ...]]] = {
    "aten.convolution": _Follower._convolution,
    "aten.convolution_backward": _Follower._convolution_backward,
    "aten.embedding": _Follower._embedding,
    "aten.embedding_dense_backward": _Follower._embedding_backward,
    "aten.nll_loss_forward": _Follower._loss,
    "stand_in": _Follower._stand_in,
    **dict.fromkeys(_SUMS, _Follower._sum),
    **dict.fromkeys(_STATISTICS, _Follower._statistics),
}
