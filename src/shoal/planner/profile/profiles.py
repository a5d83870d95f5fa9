"""Profiling of a job, or of a model with a loss and batches: computation, traffic and saved activations of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.source import MapSource, small_batch, training_data
from shoal.errors import ShoalError, UserCodeError
from shoal.jobs.job import Job
from shoal.numerics.generators import generators_kept
from shoal.numerics.operators import is_strided, replace_leaves, tensors_in
from shoal.numerics.outputs import microbatch_loss
from shoal.parallel.experts.blocks import expert_blocks
from shoal.parallel.model.adapters import adapted
from shoal.parallel.model.deferred_init import deferred
from shoal.parallel.model.value_free import construction, twin
from shoal.parallel.tensor.heads import is_lost
from shoal.parallel.tensor.layers import kind, output_dim, output_dims
from shoal.parallel.tensor.plan import decide, follow
from shoal.planner.profile.assemble import CutParameters, assembled
from shoal.planner.profile.operators import OptimizerCost, update
from shoal.planner.profile.trace import Loss, Model, OperatorTrace, OperatorTracer
from shoal.planner.profile.values import Profile
from shoal.plans.plan import Plan, PrecisionSection
from shoal.training.setup.job_model import lazy_names, whole, with_grains

# Numbers of samples to trace: two determine the line, the third checks it. One sample is unsuitable, because a dim of
# size 1 is a special case for strides, broadcasts and batch statistics. The later tuples serve losses that accept
# only even or larger batches.
SAMPLES = ((2, 3, 5), (4, 6, 10), (8, 16, 24))

# A model that reads tensor values is run with real numbers if it is not larger than this.
_REAL_BYTES = 1 << 30

# A class of undivided modules gets a note if it has more than this share of all parameters.
_MUCH = 0.05

# Widths and heads need to be divisible only by the smallest possible degree.
_DEGREE = 2

Tensors = Callable[[nn.Module], Mapping[str, int] | CutParameters]


def profile_job(job: Job, plan: Plan | None = None, *, device: str = "cuda", tensor: Tensors | None = None) -> Profile:
    """Return the profile of a job in a plan's precision on one type of device.

    The function reads one grain of training data. All traced batches have the length of that grain's longest sample.
    Raises: UserCodeError if the job's model, loss or data raise an error, or cannot be traced.
    """
    plan = plan if plan is not None else Plan()
    try:
        job = with_grains(job)
        batch = Batches(job)

        def make() -> nn.Module:
            return adapted(job.model())  # type: ignore[no-any-return]

        def of(model: Model) -> Profile:
            return profile(
                model,
                microbatch_loss(job),
                batch,
                precision=plan.precision,
                device=device,
                by_grain=True,
                tensor=tensor,
                optimizer=job.optimizer,
            )

        outline = outlined(make)
        if lazy_names(outline):  # parameters whose shapes only a forward determines
            with generators_kept():
                return of(whole(make(), job))
        try:
            return of(make)
        except Exception as error:
            if not is_small(outline):
                raise  # drawing its initial weights alone would take minutes
            try:
                model, _ = deferred(make, job.seed)  # for constructors that read tensor values
            except Exception:
                raise error from None
            return of(model)
    except ShoalError:
        raise
    except Exception as error:
        raise UserCodeError(
            given="one grain of the job's samples, for a trace of its model and loss",
            conflict=f"{type(error).__name__}: {str(error).strip()}",
            remedy="train a step with `shoal run JOB --steps 1`; where that works, model or loss may compute other "
            "operators for other samples, which cannot be planned, or shoal's trace is at fault: please report it",
        ) from error


class Batches:
    """Source of batches of any number of samples, built from one grain of a job."""

    def __init__(self, job: Job) -> None:
        data = training_data(job)
        self._source = data.source
        if isinstance(self._source, MapSource):
            self._rows = min(len(self._source), job.grain_size)
            self._one = self._fetch(self._rows)
        else:
            self._one = small_batch(data.source, data.collate)
            self._rows = 2

    def __call__(self, samples: int) -> Any:
        """Return a batch of `samples` samples."""
        tensors = tensors_in(self._one)
        if tensors and all(is_strided(t) and t.ndim and t.shape[0] == self._rows for t in tensors):
            rows = torch.arange(samples) % self._rows
            return replace_leaves(self._one, Tensor, lambda leaf: leaf[rows])
        return self._fetch(samples)

    def _fetch(self, samples: int) -> Any:
        assert isinstance(self._source, MapSource)
        return self._source.fetch([np.arange(samples) % len(self._source)], [0])


def profile(
    model: Model,
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
        by_grain: True if dropout is drawn as shoal's engine does.
        tensor: Returns the parameters that tensor parallelism cuts, {name: dim}; defaults to shoal's own choice.
        optimizer: parameters -> optimizer.

    Raises: errors of the model, the loss or the batch.
    """
    tracer, traces = _traced(model, loss, batch, precision or PrecisionSection(), device=device, by_grain=by_grain)
    cost = update(optimizer, tracer.model, tracer.mode, device) if optimizer is not None else OptimizerCost()
    notes: tuple[str, ...] = ()
    try:
        outline, like = shortened(model, traces[0])
        cut = as_engine(outline, loss, batch(2)) if tensor is None else tensor(outline)
        division = spread(cut if isinstance(cut, CutParameters) else CutParameters(cut), like)
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")[:200]
        division = CutParameters()
        notes = (f"what tensor parallelism cuts is not known: {type(error).__name__}: {text}",)
    few, more = (sum(t.nbytes for t in tensors_in(batch(n))) for n in (2, 4))
    read = ["computed with numbers, because the model looks at them"] if tracer.values == "all" else []
    experts = expert_blocks(tracer.model)
    size = round((more - few) / 2)
    result = assembled(tracer.model, traces, division, cost, sample_bytes=size, notes=read, experts=experts)
    tables = (
        f"{name}: predicted with a dense gradient of {num_bytes / 1e6:,.0f} MB; on data ranks it is sparse, and its "
        "memory and traffic grow with the rows that a step touches"
        for name, num_bytes in tracer.tables.items()
    )
    divided = {*division.dims, *(name for block in experts for name in block.parameters)}
    alone = _undivided(tracer.model, divided) if division.dims else ()
    return replace(result, notes=(*result.notes, *notes, *tables, *alone))


def _undivided(model: nn.Module, divided: set[str]) -> tuple[str, ...]:
    """Return notes on modules of unknown classes with many parameters that neither tensor nor expert axis divides."""
    total = sum(p.numel() for p in model.parameters())
    counts: Counter[str] = Counter()
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        own = (p for p in module._parameters.values() if p is not None and names[id(p)] not in divided)
        if kind(module) is None:
            counts[type(module).__name__] += sum(p.numel() for p in own)
    return tuple(
        f"{name} is not divided by a tensor axis: {count:,} of {total:,} parameters"
        for name, count in counts.items()
        if count > _MUCH * total
    )


def _traced(
    model: Model, loss: Loss, batch: Callable[[int], Any], precision: PrecisionSection, **kernels: Any
) -> tuple[OperatorTracer, list[OperatorTrace]]:
    """Trace the model without numbers or, if a small model reads tensor values, with numbers."""
    outline = outlined(model)
    tries: list[tuple[Model, Any]] = [(model, "none"), (model, "integers")]
    if outline is not None and outline is not model:
        tries = [(outline, "none"), (outline, "integers"), *tries]
    if is_small(outline) and not (isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters())):
        tries.append((model, "all"))
    errors: list[Exception] = []
    for attempt, values in tries:
        try:
            tracer = OperatorTracer(attempt, loss, precision, values=values, **kernels)
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


# ----------------------------------------------------------------------------------------- what tensor parallelism cuts


def outlined(model: Model) -> nn.Module | None:
    """Return the model on the meta device, or None if its constructor reads tensor values."""
    if isinstance(model, nn.Module):
        return model
    try:
        with construction():
            return model()
    except Exception:
        return None


def shortened(model: Model, trace: OperatorTrace) -> tuple[nn.Module, dict[str, str]]:
    """Return the model on the meta device without repeated equal blocks, and {removed block: the first equal one}.

    Raises: ValueError if the model's constructor reads tensor values.
    """
    outline = twin(model, lambda _, t: t.detach().to("meta")) if isinstance(model, nn.Module) else outlined(model)
    if outline is None:
        raise ValueError("the model's constructor computes with values")
    like: dict[str, str] = {}
    for event in trace.events:
        region = trace.regions[event.region]
        if event.name != "stand_in" or event.is_backward or region.like is None or region.block is None:
            continue
        other = trace.regions[region.like].block
        passes = len(event.outputs) == 1 and event.inputs and event.inputs[0].shape == event.outputs[0].shape
        if passes and other is not None and other != region.block:
            like[region.block] = other
    for name, other in like.items():
        parent, _, key = name.rpartition(".")
        outline.get_submodule(parent)._modules[key] = _Pass(outline.get_submodule(other))
    return outline, like


class _Pass(nn.Module):
    """Replacement of a shape-preserving block: returns its input in the structure of `like`'s output."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self._output: list[Any] = []  # a list, so that copies of both modules still share it
        like.register_forward_hook(_OutputOf(self._output))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = tensors_in((args, kwargs))[0]
        return replace_leaves(self._output[-1], Tensor, lambda _: hidden)


class _OutputOf:
    """Forward hook that stores a module's last output."""

    def __init__(self, output: list[Any]) -> None:
        self._output = output

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output[:] = [output]


def spread(cut: CutParameters, like: dict[str, str]) -> CutParameters:
    """Extend a division to the blocks that equal the divided ones."""
    dims, gathered = dict(cut.dims), set(cut.gathered)
    for name, other in like.items():
        own = {key: f"{name}.{key.removeprefix(f'{other}.')}" for key in cut.dims if key.startswith(f"{other}.")}
        dims |= {new: cut.dims[key] for key, new in own.items()}
        gathered |= {new for key, new in own.items() if key in cut.gathered}
    return CutParameters(dims, frozenset(gathered))


def as_engine(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> CutParameters:
    """Return the parameters that shoal's tensor parallelism cuts, including layers outside of pairs.

    Layers outside of pairs gather their outputs at once, unless only the loss reads them.
    Raises: PlanError if nothing is cut, or if the loss of a large model reads tensor values; small ones run on zeros.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trace = follow(
        model.train(), loss, batch, lambda name: torch.zeros(tensors[name].shape), _DEGREE, most_bytes=_REAL_BYTES
    )
    decided = decide(model, trace, None, _DEGREE)
    names = {id(p): name for name, p in model.named_parameters()}
    dims: dict[str, int] = {}

    def cut(module: str, by: Mapping[str, int]) -> list[str]:
        own = model.get_submodule(module)._parameters
        cuts = {names[id(own[key])]: dim for key, dim in by.items() if own.get(key) is not None}
        dims.update({name: dim for name, dim in cuts.items() if name not in dims})
        return list(cuts)

    for candidate in (pair.candidate for pair in decided.pairs):
        for name in candidate.columns:
            cut(name, output_dims(model.get_submodule(name)))
        cut(candidate.row, {"weight": 1 - output_dim(model.get_submodule(candidate.row))})
    whole = []
    for name in (*decided.rows, *decided.gathered):
        weight, *_ = cut(name, output_dims(model.get_submodule(name)))
        if name in decided.gathered and not is_lost(name, model, trace):
            whole.append(weight)
    return CutParameters(dims, frozenset(whole))
