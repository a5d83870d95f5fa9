"""Profiles: a model, a loss and batches in; what a step computes, moves and keeps out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.plan.plan import PrecisionSection
from shoal.planner.profile import Amount, Cut, Profile, Weight
from shoal.profiling.assemble import Bodies, Fit, Kernel, Piece, crossings, kernels, operation, saved_of_batch
from shoal.profiling.events import Trace
from shoal.profiling.optimizers import Update, update
from shoal.profiling.tracing import Loss, Setting, Tracer

# Numbers of samples that are traced: two give the line, the third tells whether it is one. One sample is no good, its
# dim of size 1 being a special case for strides, broadcasts and batch statistics. The others serve losses that take
# only even or larger batches.
SAMPLES = ((2, 3, 5), (4, 6, 10), (8, 16, 24))

# A model that looks at numbers is run with them, if it is no larger than this.
_REAL_BYTES = 1 << 30

Tensors = Callable[[nn.Module], dict[str, int]]


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
    """The profile of `loss(model, batch(n))`, traced on fake tensors of n samples, without weights or numbers.

    model: a module, or builds one. loss: (model, batch) -> (total, weight). precision: float32 where None.
    device: the type of device whose kernels and autocast are meant, "cuda" or "cpu". by_grain: dropout as shoal's
    engine draws it. tensor: which parameters tensor parallelism cuts, {name: dim}; found where None.
    optimizer: parameters -> optimizer. Raises: what the model, the loss or the batch raises.
    """
    setting = Setting(precision or PrecisionSection(), device, by_grain)
    tracer, traces = _traced(model, loss, batch, setting)
    found = update(optimizer, tracer.model, tracer.mode, device) if optimizer is not None else Update()
    return assembled(tracer, traces, found, sample_bytes(batch))


def _traced(
    model: nn.Module | Callable[[], nn.Module], loss: Loss, batch: Callable[[int], Any], setting: Setting
) -> tuple[Tracer, list[Trace]]:
    """Traces without numbers; of a model that looks at them, and is small enough, with them."""
    tracer: Tracer | None = None
    try:
        tracer = Tracer(model, loss, setting)
        return tracer, several(tracer, batch)
    except Exception:
        held = model if isinstance(model, nn.Module) else (tracer.model if tracer is not None else None)
        if held is not None and sum(p.nbytes for p in held.parameters()) > _REAL_BYTES:
            raise
        if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()):
            raise
        with contextlib.suppress(Exception):
            tracer = Tracer(model, loss, replace(setting, with_values=True))
            return tracer, several(tracer, batch)
        raise


def several(tracer: Tracer, batch: Callable[[int], Any]) -> list[Trace]:
    """Traces of two or three numbers of samples, operator by operator alike. Raises: what the first of them raises."""
    error: Exception | None = None
    for numbers in SAMPLES:
        try:
            traces = [tracer.trace(batch, samples) for samples in numbers]
        except Exception as caught:
            error = error or caught
            continue
        alike = [t for t in traces if [e.name for e in t.events] == [e.name for e in traces[-1].events]]
        if len(alike) >= 2:
            return alike
    raise error or ValueError("the model computes otherwise for each number of samples")


def sample_bytes(batch: Callable[[int], Any]) -> int:
    """Bytes that the loader hands over for one sample."""
    few, more = ([leaf for leaf in tree_leaves(batch(n)) if isinstance(leaf, Tensor)] for n in (2, 4))
    return round((sum(t.nbytes for t in more) - sum(t.nbytes for t in few)) / 2)


def assembled(tracer: Tracer, traces: Sequence[Trace], found: Update, num_bytes: int) -> Profile:
    """The profile of traces of one model."""
    fit = Fit([trace.samples for trace in traces])
    first = traces[0]
    pieces, homes = _pieces(fit, traces)
    tied = _weights(tracer.model, first, pieces, homes)
    bodies = Bodies()
    notes = ["computed with numbers, because the model looks at them"] if tracer.with_values else []
    notes += [f"not linear in the samples: {what}" for what in dict.fromkeys(fit.bent)]
    trainable = [p for p in tracer.model.parameters() if p.requires_grad]
    return Profile(
        tuple(bodies.unit(pieces[home]) for home in sorted(pieces)),
        sample_bytes=num_bytes,
        state_bytes_per_element=found.state_bytes_per_element,
        optimizer_passes=found.passes,
        optimizer_launches=found.launches,
        buffer_elements=sum(b.numel() for b in tracer.model.buffers()),
        tied=tied,
        heads=_heads(first),
        notes=(*notes, *((found.note,) if found.note else ())),
        saved_batch=fit("the batch", *(saved_of_batch(t) for t in traces)),
    )


def _pieces(fit: Fit, traces: Sequence[Trace]) -> tuple[dict[int, Piece], dict[int, int]]:
    """Regions that do something, by number; and in which of them each region's parameters are."""
    first = traces[0]
    ran = [kernels(trace) for trace in traces]
    by_region: dict[int, list[list[Kernel]]] = {}
    for same in zip(*ran, strict=True):
        by_region.setdefault(same[0].event.region, []).append(list(same))
    made = {region: tuple(operation(fit, same, Cut.NONE) for same in runs) for region, runs in by_region.items()}
    crossing = [crossings(trace) for trace in traces]
    kept = [r for r, region in enumerate(first.regions) if region.block or made.get(r)]
    pieces: dict[int, Piece] = {}
    incoming = Amount()
    for number, region in enumerate(first.regions):
        if number not in kept:
            continue
        block = region.block
        source = number if region.like is None else region.like
        operations = made.get(source, ())
        if region.like is not None:
            old, new = first.regions[region.like].block, block
            assert old is not None and new is not None
            operations = tuple(replace(o, module=new + o.module.removeprefix(old)) for o in operations)
        outgoing = fit("what is handed on", *(c[number] for c in crossing))
        pieces[number] = Piece(_name(first, number), block, operations, input_bytes=incoming, output_bytes=outgoing)
        incoming = outgoing
    homes = {r: max((k for k in kept if k <= r), default=kept[0] if kept else 0) for r in range(len(first.regions))}
    return pieces, homes


def _name(trace: Trace, region: int) -> str:
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
    model: nn.Module, trace: Trace, pieces: dict[int, Piece], homes: dict[int, int]
) -> tuple[tuple[str, str], ...]:
    """Gives each parameter to the first unit that uses it; the pairs (name, another unit that does)."""
    last = max(pieces)
    for name, parameter in model.named_parameters():
        home = homes[trace.used[name]] if name in trace.used else _owner(name, pieces, last)
        pieces[home].weights.append(Weight(name, tuple(parameter.shape), parameter.itemsize, parameter.requires_grad))
    users: dict[str, set[int]] = {}
    for event in trace.events:
        if event.is_backward:
            break
        for ref in event.inputs:
            name = trace.parameters.get(ref.key)
            if name is not None:
                users.setdefault(name, set()).add(homes[event.region])
    return tuple((name, pieces[other].name) for name, where in users.items() for other in sorted(where - {min(where)}))


def _owner(name: str, pieces: dict[int, Piece], last: int) -> int:
    """Where a parameter that nothing uses is."""
    held = (r for r, piece in pieces.items() if piece.block and name.startswith(f"{piece.block}."))
    return next(held, last)


def _heads(trace: Trace) -> int | None:
    found = [
        e.inputs[0].shape[-3] for e in trace.events if e.name.endswith(".attention") and len(e.inputs[0].shape) > 3
    ]
    return min(found, default=None)
