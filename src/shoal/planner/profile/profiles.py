"""Profiling of a model with a loss and batches: the computation, memory traffic and saved activations of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from shoal.numerics.operators import tensors_in
from shoal.parallel.tensor.layers import kind
from shoal.planner.profile.assemble import Bodies, Fit, Kernel, Piece, crossings, kernels, operation, saved_of_batch
from shoal.planner.profile.division import CutParameters, divide
from shoal.planner.profile.engine_pairs import as_engine, outlined, shortened, spread
from shoal.planner.profile.events import OperatorTrace
from shoal.planner.profile.optimizers import OptimizerCost, update
from shoal.planner.profile.phases import weight_events
from shoal.planner.profile.tracing import Loss, OperatorTracer, Setting
from shoal.planner.profile.values import Amount, Exchange, Profile, TensorCut, Weight
from shoal.plans.plan import PrecisionSection

# Numbers of samples to trace: two determine the line, the third checks it. One sample is unsuitable, because a dim of
# size 1 is a special case for strides, broadcasts and batch statistics. The later tuples serve losses that accept
# only even or larger batches.
SAMPLES = ((2, 3, 5), (4, 6, 10), (8, 16, 24))

# A model that reads tensor values is run with real numbers if it is not larger than this.
_REAL_BYTES = 1 << 30

# A class of undivided modules gets a note if it has more than this share of all parameters.
_MUCH = 0.05

Tensors = Callable[[nn.Module], Mapping[str, int] | CutParameters]


def profile(
    model: nn.Module | Callable[[], nn.Module],
    loss: Loss,
    batch: Callable[[int], Any],
    *,
    precision: PrecisionSection | None = None,
    device: str = "cuda",
    by_grain: bool = False,
    tensor: Tensors | None = None,
    optimizer: Callable[[Any], Any] | None = None,
) -> Profile:
    """Return the profile of `loss(model, batch(n))`, traced on fake tensors without weights or numbers.

    Args:
        model: A module, or a function that builds one.
        loss: (model, batch) -> (total, weight).
        batch: Returns a batch of n samples.
        precision: Defaults to float32.
        device: Type of device whose kernels and autocast to trace, "cuda" or "cpu".
        by_grain: Whether dropout is drawn as shoal's engine does.
        tensor: Returns the parameters that tensor parallelism cuts, {name: dim}; defaults to shoal's own choice.
        optimizer: parameters -> optimizer.

    Raises: errors of the model, the loss or the batch.
    """
    setting = Setting(precision or PrecisionSection(), device, by_grain)
    tracer, traces = _traced(model, loss, batch, setting)
    found = update(optimizer, tracer.model, tracer.mode, device) if optimizer is not None else OptimizerCost()
    division, note = _division(tensor or (lambda outline: as_engine(outline, loss, batch(2))), model, traces[0])
    made = assembled(tracer, traces, division, found, sample_bytes(batch))
    return replace(made, notes=(*made.notes, *note, *_undivided(tracer.model, division)))


def _division(
    tensor: Tensors, model: nn.Module | Callable[[], nn.Module], trace: OperatorTrace
) -> tuple[CutParameters, tuple[str, ...]]:
    """Return the parameters that tensor parallelism cuts, and a note if they could not be determined."""
    try:
        outline, like = shortened(model, trace)
        found = tensor(outline)
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")[:200]
        return CutParameters(), (f"what tensor parallelism cuts is not known: {type(error).__name__}: {text}",)
    return spread(found if isinstance(found, CutParameters) else CutParameters(found), like), ()


def _undivided(model: nn.Module, division: CutParameters) -> tuple[str, ...]:
    """Return notes on modules of unknown classes with many undivided parameters, typically experts."""
    total = sum(p.numel() for p in model.parameters())
    held: Counter[str] = Counter()
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        own = (p for p in module._parameters.values() if p is not None and names[id(p)] not in division.dims)
        if kind(module) is None:
            held[type(module).__name__] += sum(p.numel() for p in own)
    return tuple(
        f"{name} is not divided by a tensor axis: {count:,} of {total:,} parameters"
        for name, count in held.items()
        if division.dims and count > _MUCH * total
    )


def _traced(
    model: nn.Module | Callable[[], nn.Module], loss: Loss, batch: Callable[[int], Any], setting: Setting
) -> tuple[OperatorTracer, list[OperatorTrace]]:
    """Trace the model without numbers or, if a small model reads tensor values, with numbers."""
    outline = outlined(model)
    ways = [setting, replace(setting, with_batch=True)]
    tries: list[tuple[nn.Module | Callable[[], nn.Module], Setting]] = [(model, way) for way in ways]
    if outline is not None and outline is not model:
        tries = [*((outline, way) for way in ways), *tries]
    if is_small(outline) and not (isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters())):
        tries.append((model, replace(setting, with_values=True)))
    errors: list[Exception] = []
    for given, how in tries:
        try:
            tracer = OperatorTracer(given, loss, how)
            return tracer, several(tracer, batch)
        except Exception as error:
            errors.append(error)
    raise errors[-2 if len(errors) == 3 else 0]


def is_small(outline: nn.Module | None) -> bool:
    """Check whether a model is small enough to run with real numbers; an unknown size counts as small."""
    return outline is None or sum(p.nbytes for p in outline.parameters()) <= _REAL_BYTES


def several(tracer: OperatorTracer, batch: Callable[[int], Any]) -> list[OperatorTrace]:
    """Return two or three traces at different numbers of samples with the same sequence of operators.

    Raises: the first error of the model, the loss or the batch.
    """
    error: Exception | None = None
    for numbers in SAMPLES:
        try:
            traces = [tracer.trace(batch, samples) for samples in numbers]
        except Exception as caught:
            if error is not None and str(caught) == str(error):
                break  # the error does not depend on the number of samples
            error = error or caught
            continue
        alike = [t for t in traces if [e.name for e in t.events] == [e.name for e in traces[-1].events]]
        if len(alike) >= 2:
            return alike
    raise error or ValueError("the model computes otherwise for each number of samples")


def sample_bytes(batch: Callable[[int], Any]) -> int:
    """Return the bytes that the loader delivers for one sample."""
    few, more = (tensors_in(batch(n)) for n in (2, 4))
    return round((sum(t.nbytes for t in more) - sum(t.nbytes for t in few)) / 2)


def assembled(
    tracer: OperatorTracer,
    traces: Sequence[OperatorTrace],
    division: CutParameters,
    found: OptimizerCost,
    num_bytes: int,
) -> Profile:
    """Build the profile from traces of one model."""
    fit = Fit([trace.samples for trace in traces])
    first = traces[0]
    pieces, homes = _pieces(fit, traces, division)
    tied = _weights(tracer.model, first, pieces, homes, division)
    bodies = Bodies()
    notes = ["computed with numbers, because the model looks at them"] if tracer.with_values else []
    notes += [f"not linear in the samples: {what}" for what in dict.fromkeys(fit.bent)]
    return Profile(
        tuple(bodies.unit(pieces[home]) for home in sorted(pieces)),
        sample_bytes=num_bytes,
        state_bytes_per_element=found.state_bytes_per_element,
        optimizer_passes=found.passes,
        optimizer_launches=found.launches,
        tied=tied,
        heads=_heads(first),
        notes=(*notes, *((found.note,) if found.note else ())),
        saved_batch=fit("the batch", *(saved_of_batch(t) for t in traces)),
    )


def _pieces(
    fit: Fit, traces: Sequence[OperatorTrace], division: CutParameters
) -> tuple[dict[int, Piece], dict[int, int]]:
    """Return the nonempty regions by number, and for each region the number of the piece with its parameters."""
    first = traces[0]
    late = [weight_events(trace) for trace in traces]
    ran = [kernels(trace, places) for trace, places in zip(traces, late, strict=True)]
    divided = [divide(trace, division, places) for trace, places in zip(traces, late, strict=True)]
    by_region: dict[int, list[list[Kernel]]] = {}
    for same in zip(*ran, strict=True):
        by_region.setdefault(same[0].event.region, []).append(list(same))

    def cut(kernel: Kernel) -> TensorCut:
        cuts = divided[0].cuts.get(kernel.place, ())
        return cuts[min(kernel.number, len(cuts) - 1)] if cuts else TensorCut.NONE

    made = {
        r: tuple(operation(fit, same, cut(same[0]), first.regions[r].block) for same in runs)
        for r, runs in by_region.items()
    }
    sent: dict[int, list[Exchange]] = {}
    for alike in zip(*(d.sent for d in divided), strict=True):
        amount = fit("an exchange", *(s.num_bytes for s in alike))
        sent.setdefault(alike[0].region, []).append(Exchange(alike[0].kind, alike[0].phase, amount))
    crossing = [crossings(trace) for trace in traces]
    kept = [r for r, region in enumerate(first.regions) if region.block or made.get(r)]
    pieces: dict[int, Piece] = {}
    incoming = Amount()
    for number, region in enumerate(first.regions):
        if number not in kept:
            continue
        block = region.block
        source = number if region.like is None else region.like
        outgoing = fit("what is handed on", *(c[number] for c in crossing))
        exchanges = tuple(sent.get(source, ()))
        pieces[number] = Piece(
            _name(first, number), block, made.get(source, ()), exchanges, input_bytes=incoming, output_bytes=outgoing
        )
        incoming = outgoing
    homes = {r: max((k for k in kept if k <= r), default=kept[0] if kept else 0) for r in range(len(first.regions))}
    return pieces, homes


def _name(trace: OperatorTrace, region: int) -> str:
    block = trace.regions[region].block
    if block is not None:
        return block
    before = next((r.block for r in reversed(trace.regions[:region]) if r.block), None)
    after = next((r.block for r in trace.regions[region:] if r.block), None)
    if before is None and after is None:
        return ""
    if before is None:
        return f"before {after}"
    return f"after {before}" if after is None else f"between {before} and {after}"


def _weights(
    model: nn.Module, trace: OperatorTrace, pieces: dict[int, Piece], homes: dict[int, int], division: CutParameters
) -> tuple[tuple[str, str], ...]:
    """Assign each parameter to the first unit that uses it; return pairs (name, another unit that uses it)."""
    last = max(pieces)
    for name, parameter in model.named_parameters():
        home = homes[trace.used[name]] if name in trace.used else _owner(name, pieces, last)
        pieces[home].weights.append(
            Weight(name, tuple(parameter.shape), parameter.itemsize, parameter.requires_grad, division.dims.get(name))
        )
    users: dict[str, set[int]] = {}
    for event in trace.forward:
        for ref in event.inputs:
            used = trace.parameters.get(ref.key)
            if used is not None:
                users.setdefault(used, set()).add(homes[event.region])
    return tuple((name, pieces[other].name) for name, where in users.items() for other in sorted(where - {min(where)}))


def _owner(name: str, pieces: dict[int, Piece], last: int) -> int:
    """Return the piece of a parameter that no operator uses."""
    held = (r for r, piece in pieces.items() if piece.block and name.startswith(f"{piece.block}."))
    return next(held, last)


def _heads(trace: OperatorTrace) -> int | None:
    """Return the fewest heads of any attention, fused or as batched products around a softmax."""
    fused = [
        e.inputs[0].shape[-3] for e in trace.events if e.name.endswith(".attention") and len(e.inputs[0].shape) > 3
    ]
    mixing = {e.module for e in trace.events if "softmax" in e.name}
    plain = [e.inputs[0].shape[0] // trace.samples for e in trace.events if e.name == "aten.bmm" and e.module in mixing]
    return min((heads for heads in fused or plain if heads), default=None)
