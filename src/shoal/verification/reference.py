"""Reference implementation of a step on one process, in float64 or in the plan's precision.

It shares with the engine only what defines the training: order, grains and their randomness, and the job's functions.
It shares no means of computation: no buckets, no strategy, no collective, no updater.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.checkpoint.state import load_model, load_optimizer, model_tensors, optimizer_state
from shoal.checkpoint.whole_optimizer import (
    OWN_RATE,
    evaluated_weights,
    make_states_dense,
    parts,
    rated,
    step_optimizer,
    with_modes,
)
from shoal.data.loader import DataRank, MapLoader, Microbatch
from shoal.data.order import Order
from shoal.data.source import MapSource
from shoal.errors import ShoalError
from shoal.jobs.job import Job, Progress
from shoal.numerics.buffer_rules import defined_rules
from shoal.numerics.checksum import bits_checksum
from shoal.numerics.expert_balance import balanced_routers, move_biases
from shoal.numerics.generators import generators_kept, seed_everything
from shoal.numerics.no_trace import copy_of
from shoal.numerics.operators import real_numel
from shoal.numerics.precision import Precision, converted, numbers, wide
from shoal.parallel.base import run_backward
from shoal.parallel.blocks.narrow_products import in_precision
from shoal.parallel.model.parameter_hooks import ParameterHooks
from shoal.plans.grains import random_key
from shoal.training.microbatch.coupling import compare as coupling
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import LossComputer
from shoal.training.observe.trace.recorder import ForwardRecorder
from shoal.training.observe.trace.traces import MicrobatchTrace, StepTrace, identical, state_by_key
from shoal.training.update.closure import needs_closure
from shoal.training.update.job_optimizer import Parameters, build_optimizer
from shoal.training.update.lr_schedule import Schedule
from shoal.verification.whole_batch import requests

_MOST_PARTS_BYTES = 2 << 30
# Number of layers, spread evenly over the model, that are computed in float64 one at a time.
NUM_LAYERS = 8


@dataclass(frozen=True)
class ReferenceVariant:
    """Variant of the reference step that differs only in rounding.

    order: of the microbatches: 1 forwards, -1 backwards, k > 1 every k-th first. fused: microbatches as in the plan,
    else grain by grain. threads: number for torch's kernels, which divide their sums by it. halves: linear layers in
    parts, as ranks of a tensor axis compute them. rounded: the seed of the roundings in `Rounded`.
    """

    name: str
    order: int = 1
    fused: bool = False
    threads: int = 1
    halves: bool = False
    rounded: int | None = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Compute as this variant does within the context."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        halves = Halves() if self.halves else contextlib.nullcontext()
        rounded = Rounded(self.rounded) if self.rounded is not None else contextlib.nullcontext()
        try:
            with halves, rounded:
                yield
        finally:
            torch.set_num_threads(threads)


@dataclass
class Computed:
    """Result of a reference step.

    `contributions`: gradients of each rank's grains, divided by the step's weight. `parts`: gradients of single
    microbatches of a fused variant, as far as they fit. Both are empty if all samples share their batch norms.
    """

    trace: StepTrace
    contributions: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    parts: dict[tuple[int, tuple[int, ...]], dict[str, Tensor]] = field(default_factory=dict)  # by rank and grains
    whole_batch: frozenset[str] = frozenset()  # buffers with the value that one forward of the whole batch leaves
    magnitudes: dict[str, float] = field(default_factory=dict)  # sum over microbatches of the norms of their gradients


class Reference:
    """Copy of the job's model and optimizer on one process, in one precision."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        precision: Precision,
        *,
        source: MapSource,
        order: Order,
        num_ranks: int,
        sparse: Collection[str] = (),
    ) -> None:
        """Prepare model and optimizer. `model`: the job's model on the CPU, which the reference changes.

        `sparse`: names of the parameters of which the optimizer gets sparse gradients.
        """
        self._job, self._precision, self._source, self._order = job, precision, source, order
        self._num_ranks, self._sparse = num_ranks, sparse
        self.model = in_precision(model, precision).to(precision.device)
        self._hooks = ParameterHooks(self.model)
        self._parameters = Parameters(self.model)
        self._optimizer = build_optimizer(job.optimizer, self._parameters)
        self.needs_closure = needs_closure(self._optimizer)
        self._rates = [float(group["lr"]) for group in rated(parts(self._optimizer).values())]
        schedule = job.schedule
        self._scheduled = schedule.rates(self._optimizer) if isinstance(schedule, Schedule) else None
        self.model.train()
        self.forward = ForwardRecorder(self.model)  # its hooks are removed by `forward.close()`
        self._forward_writes = False  # whether a forward has written a parameter
        self._rewrites = False  # whether a backward writes buffers, by recomputation
        self._written: set[str] = set()  # names of the buffers that forwards change
        self._touched: dict[str, Tensor] = {}  # rows of the last step's sparse gradients, ascending

    def step(
        self, number: int, before: StepTrace, facts: StepTrace, computation: MicrobatchPolicy, way: ReferenceVariant
    ) -> Computed:
        """Compute step `number` from the state `before`; only the loss factor comes from the parallel run's `facts`."""
        self.set_state(before, optimizer=True)
        computer = LossComputer(self._job, self.model, self._precision, computation)
        trace = StepTrace(number, factor=facts.factor)
        result = Computed(trace)

        def again() -> Tensor:
            """Set the mean gradient of the step at the parameters' present values; return the loss."""
            own = Computed(StepTrace(number, factor=facts.factor))
            with torch.enable_grad(), generators_kept():
                with way.applied():
                    sums, _ = self._accumulate(computer, way, own)
                _give(self._parameters, self._mean_gradient(own, sums), self._touched)
            return torch.tensor(own.trace.loss, dtype=torch.float64)

        with way.applied():
            sums, buffers = self._accumulate(computer, way, result)
            whole = self._of_whole_batch(computer, number)
        result.whole_batch = frozenset(whole)
        gradients = self._mean_gradient(result, sums)
        if not trace.weight:
            trace.skipped = "weightless"
        elif not math.isfinite(trace.norm) or not math.isfinite(trace.loss):
            trace.skipped = "nonfinite"
        else:
            self._apply(trace, gradients, again)
            with torch.no_grad():
                for name, buffer in self._changing():
                    value = (buffers | whole).get(name)
                    if value is not None:
                        is_whole = not (buffer.is_floating_point() or buffer.is_complex()) and value.is_floating_point()
                        buffer.copy_(value.round() if is_whole else value)
            move_biases(balanced_routers(self.model))
        _capture(trace, self.model, self._optimizer)
        return result

    def update(self, before: StepTrace, parallel: StepTrace, computation: MicrobatchPolicy) -> StepTrace:
        """Return the state after an optimizer step from `before` with the parallel run's own clipped gradients.

        Parameters that a forward writes (clamped ones, a teacher) are written first, by a forward of one grain.
        """
        self.set_state(before, optimizer=True)
        if self._forward_writes:
            computer = LossComputer(self._job, self.model, self._precision, computation)
            _, grain = self.microbatches(parallel.step, ReferenceVariant("one grain"), 1)[0]
            start = {name: b.detach().clone() for name, b in self.model.named_buffers()}
            with computer.scope(grain):
                computer.loss(self._precision.inputs(grain.batch))
            self._restore(start)
        trace = StepTrace(parallel.step)
        self._apply(trace, parallel.phase("clipping"))
        _capture(trace, self.model, self._optimizer)
        return trace

    def microbatches(self, number: int, way: ReferenceVariant, per_microbatch: int) -> list[tuple[int, Microbatch]]:
        """Return the (rank, microbatch) pairs of a step in the variant's order."""
        pairs = []
        whole = self._job.batch_norm == "batch"  # all samples share their batch norms
        num_ranks = 1 if whole else self._num_ranks
        for rank in range(num_ranks):
            loader = MapLoader(self._source, self._order, DataRank(rank, num_ranks), 0, pin_memory=False)
            loader.seek(number, self._job.num_grains if whole else per_microbatch if way.fused else 1)
            pairs += [(rank, microbatch) for microbatch in loader.step(number).microbatches]
        if way.order == -1:
            pairs.reverse()
        elif way.order > 1:
            pairs = [pair for start in range(way.order) for pair in pairs[start :: way.order]]
        return pairs

    def _accumulate(
        self, computer: LossComputer, way: ReferenceVariant, result: Computed
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run forward and backward of every microbatch; each starts from the buffers before the step.

        Returns the sums of the gradients, and the means of the buffers that changed.
        """
        trace = result.trace
        self.forward.fingerprints = {}
        self._touched = {}
        self._written = set(computer.computation.buffers)
        start = {name: b.detach().clone() for name, b in self._changing()}
        sums: dict[str, Tensor] = {}
        buffers = {name: torch.zeros_like(wide(b)) for name, b in start.items()}
        changed: set[str] = set()
        samples = 0
        size = sum(map(real_numel, self._parameters)) * 4
        microbatches = self.microbatches(trace.step, way, computer.computation.effective_grains)
        request = None
        if self._job.outputs is not None:
            request = requests(computer, [microbatch for _, microbatch in microbatches], lambda: self._restore(start))
        for rank, microbatch in microbatches:
            marks = {name: bits_checksum([p]) for name, p in self.model.named_parameters()} if not trace.parts else {}
            batch = self._precision.inputs(microbatch.batch)
            self.model.zero_grad(set_to_none=True)
            self.forward.begin(microbatch, batch)
            with computer.scope(microbatch):
                total, weight = computer.loss(batch if request is None else request(microbatch, batch))
                self.forward.end()
                before = {name: buffer.detach().clone() for name, buffer in self._changing()}
                if total.requires_grad:  # else the microbatch has no weight
                    run_backward(total * trace.factor)
                # After the backward, which writes buffers again if the job recomputes the module that writes them.
                after = {name: buffer.detach().clone() for name, buffer in self._changing()}
            self._rewrites |= any(not identical(before[name], value) for name, value in after.items())
            if any(marks[name] != bits_checksum([p]) for name, p in self.model.named_parameters() if name in marks):
                self._forward_writes = True
            grains = tuple(g.index for g in microbatch.grains)
            ids = tuple(tuple(ids.tolist()) for ids in microbatch.ids)
            trace.parts.append(MicrobatchTrace(rank, grains, ids, float(total.detach()), float(weight)))
            for name, parameter in self._parameters.named:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                if gradient.is_sparse:
                    if name in self._sparse:
                        rows = gradient._indices()[0]
                        self._touched[name] = torch.cat([self._touched.get(name, rows[:0]), rows]).unique()
                    gradient = gradient.to_dense()
                gradient = gradient.to(torch.promote_types(gradient.dtype, self._precision.reduce))
                sums[name] = sums[name] + gradient if name in sums else gradient.clone()
                result.magnitudes[name] = result.magnitudes.get(name, 0.0) + float(numbers(gradient).norm())
                if self._job.batch_norm == "batch":  # the gradient of all ranks' samples together
                    continue
                own = result.contributions.setdefault(rank, {})
                own[name] = own[name] + gradient if name in own else gradient.clone()
                if way.fused and size * (len(result.parts) + 1) <= _MOST_PARTS_BYTES:
                    result.parts.setdefault((rank, grains), {})[name] = gradient.clone()
            for name, value in after.items():
                if name in changed or not identical(value, start[name]):
                    changed.add(name)
                buffers[name] += wide(value) * microbatch.num_samples
            self._restore(start)
            samples += microbatch.num_samples
        trace.forward = dict(self.forward.fingerprints)
        return sums, {name: buffers[name] / max(1, samples) for name in changed}

    def _of_whole_batch(self, computer: LossComputer, step: int) -> dict[str, Tensor]:
        """Return the buffers that one forward of the whole batch leaves, except those with a rule from torch.

        The backward also runs if it writes buffers. Means are skipped if a module mixes samples or if the randomness is
        opaque.
        """
        computation, defined = computer.computation, defined_rules(self.model)
        rules = {name: rule for name, rule in computation.rules if name not in defined}
        if computation.randomness == "opaque" or not computation.fuse:
            rules = {name: rule for name, rule in rules.items() if rule != "mean"}
        if not rules:
            return {}
        start = {name: b.detach().clone() for name, b in self._changing()}
        loader = MapLoader(self._source, self._order, DataRank(0, 1), 0, pin_memory=False)
        loader.seek(step, self._order.num_grains)
        for microbatch in loader.step(step).microbatches:
            with computer.scope(microbatch):
                try:
                    with torch.set_grad_enabled(self._rewrites):
                        total, _ = computer.loss(self._precision.inputs(microbatch.batch))
                except ShoalError:  # the loss itself differentiates
                    self._restore(start)
                    again = microbatch.read(microbatch.grains, microbatch.ids)
                    total, _ = computer.loss(self._precision.inputs(again.batch))
                if self._rewrites and total.requires_grad:
                    run_backward(total)
        values = {name: buffer.detach().clone() for name, buffer in self._changing() if name in rules}
        self._restore(start)
        return values

    def _changing(self) -> list[tuple[str, Tensor]]:
        """Return the buffers, and the parameters without gradient that a forward writes."""
        parameters = ((name, p) for name, p in self.model.named_parameters() if name in self._written)
        return [*self.model.named_buffers(), *parameters]

    @torch.no_grad()
    def _restore(self, start: Mapping[str, Tensor]) -> None:
        """Restore changing tensors, also if a forward has replaced a buffer by a tensor of another dtype."""
        for name, buffer in self._changing():
            if name not in start:
                continue
            if buffer.dtype == start[name].dtype:
                buffer.copy_(start[name])
            else:
                home, _, key = name.rpartition(".")
                self.model.get_submodule(home)._buffers[key] = start[name].clone()

    def _mean_gradient(self, result: Computed, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean gradients after hooks and clipping; set the trace's loss, weight and norm."""
        trace, job = result.trace, self._job
        trace.weight = math.fsum(part.weight for part in trace.parts)
        total = math.fsum(part.total for part in trace.parts)
        trace.loss = total / trace.weight if trace.weight else math.nan
        scale = 1.0 / (trace.weight * trace.factor) if trace.weight else 0.0
        mean = {name: g * scale for name, g in sums.items()}
        result.contributions = {r: _scaled(own, scale) for r, own in result.contributions.items()}
        result.parts = {key: _scaled(own, scale) for key, own in result.parts.items()}
        result.magnitudes = {name: value * abs(scale) for name, value in result.magnitudes.items()}
        trace.tensors |= {f"reduction/{name}": g for name, g in mean.items()}
        if trace.weight:  # the hooks on parameters change the mean gradient
            hooked = {name: p for name, p in self._parameters.named if name in self._hooks.by_name and name in mean}
            for name, parameter in hooked.items():
                parameter.grad = mean[name].to(parameter.device, parameter.dtype, copy=True)
            self._hooks.call(hooked, random_key(job.seed, "hooks", trace.step))
            after = {name: p.grad.to(mean[name]) for name, p in hooked.items() if p.grad is not None}
            mean = {name: after.get(name, g) for name, g in mean.items() if name not in hooked or name in after}
        trace.norm = math.sqrt(math.fsum(float(numbers(g).square().sum()) for g in mean.values()))
        share = min(1.0, job.clip_norm / (trace.norm + 1e-6)) if job.clip_norm is not None else 1.0
        clipped = {name: gradient * share for name, gradient in mean.items()}
        if job.clip_value is not None:
            clipped = {name: g.clamp(-job.clip_value, job.clip_value) for name, g in clipped.items()}
        return clipped

    def _apply(
        self, trace: StepTrace, gradients: Mapping[str, Tensor], again: Callable[[], Tensor] | None = None
    ) -> None:
        """Set the learning rates and step the optimizer with these gradients.

        `again`: computes the loss and sets the gradients, for an optimizer that needs a closure.
        """
        job = self._job
        _give(self._parameters, gradients, self._touched)
        named = [(name, p.grad) for name, p in self._parameters.named if p.grad is not None]
        trace.tensors |= {f"clipping/{name}": g.to_dense() if g.is_sparse else g.clone() for name, g in named}
        before = sum(g.size for s in range(trace.step) for g in self._order.grains(s))
        progress = Progress(trace.step, self._order.num_steps, before)
        if self._scheduled is not None:
            self._scheduled.set(progress)
        else:
            multiplier = float(job.schedule(progress)) if job.schedule is not None else 1.0
            for group, rate in zip(rated(parts(self._optimizer).values()), self._rates, strict=True):
                if OWN_RATE in group:
                    continue
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * multiplier)
                else:
                    group["lr"] = rate * multiplier
        seed_everything(random_key(job.seed, "optimizer", trace.step))
        step_optimizer(self._optimizer, again if self.needs_closure else None)
        if self._touched:
            make_states_dense(self._optimizer)

    def loss_of_grains(self) -> tuple[float, float, str]:
        """Return the first step's loss of all grains together, the sum of their own losses, and why these differ."""
        loader = MapLoader(self._source, self._order, DataRank(0, 1), 0, pin_memory=False)
        loader.seek(0, self._order.num_grains)
        (whole,) = loader.step(0).microbatches
        policy = MicrobatchPolicy.of(self._job, 1)
        computer = LossComputer(self._job, self.model, self._precision, policy)
        start = {name: buffer.detach().clone() for name, buffer in self._changing()}

        def loss(microbatch: Microbatch) -> tuple[float, float]:
            self._restore(start)
            with computer.grain_scope(microbatch):
                total, weight = computer.loss(self._precision.inputs(copy_of(microbatch.batch)))
            return float(total.detach()), float(weight)

        with torch.enable_grad():  # the loss may differentiate
            itemsize = self._precision.parameters.itemsize
            together, apart, coupled = coupling(self.model, loss, whole, whole.split(), itemsize)
        self._restore(start)
        return together[0], math.fsum(total for total, _ in apart), coupled

    def set_state(self, state: StepTrace, *, optimizer: bool = False) -> None:
        """Load a trace's parameters and buffers into the model, and the state into the optimizer if requested."""
        kind = self._precision.parameters
        values = {**state.phase("buffers"), **state.parameters}
        load_model(self.model, {k: converted(v, kind) for k, v in values.items()})
        if optimizer:
            saved = {k: v if k.endswith("/step") else converted(v, kind) for k, v in state.optimizer_tensors.items()}
            load_optimizer(self._optimizer, self.model, saved, state.optimizer)

    @contextlib.contextmanager
    def evaluated(self, state: StepTrace) -> Iterator[None]:
        """Give the model the weights to evaluate after a step that has left `state`."""
        modes = with_modes(self._optimizer)
        self.set_state(state, optimizer=bool(modes))
        with evaluated_weights(self._optimizer) if modes else contextlib.nullcontext():
            yield


def _give(parameters: Parameters, gradients: Mapping[str, Tensor], touched: Mapping[str, Tensor]) -> None:
    """Set the parameters' gradients: sparse ones with the `touched` rows, and others."""
    for name, parameter in parameters.named:
        gradient = gradients[name].to(parameter.device, parameter.dtype) if name in gradients else None
        if gradient is not None and name in touched:
            rows = touched[name]
            gradient = torch.sparse_coo_tensor(
                rows[None], gradient[rows], gradient.shape, is_coalesced=True, check_invariants=False
            )
        parameter.grad = gradient


def _capture(trace: StepTrace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the state of model and optimizer into a trace, whose tensors move to the CPU."""
    tensors, trace.optimizer = optimizer_state(optimizer, model)
    trace.tensors |= state_by_key(model_tensors(model), dict(model.named_parameters()), tensors)
    trace.tensors = {k: v.detach().cpu() for k, v in trace.tensors.items()}


def _scaled(gradients: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return multiples of gradients on the CPU, where a trace's tensors are."""
    return {name: (gradient * scale).cpu() for name, gradient in gradients.items()}


class Halves(TorchFunctionMode):
    """Context in which linear layers add the products of two halves of their inputs, for each half of their outputs.

    So the sums over inputs in the forward, and over outputs in the backward, run in another order.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return _linear(*args, **given) if func is F.linear else func(*args, **given)


class Rounded(TorchFunctionMode):
    """Context that changes the gradient of each function's output by one unit in the last place, up or down.

    The rounding error of a sum is proportional to its terms. If the terms cancel, as for a bias before a batch norm,
    every order of the sum may give the same zero. Then the size of the terms shows only if the terms are rounded before
    the sum. This is Monte Carlo arithmetic (Parker, 1997) in the backward.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._signs = np.random.default_rng(seed)  # leaves the global generators of numpy and torch as they are

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in output if isinstance(output, tuple | list) else (output,):
            wrapped = not isinstance(leaf, Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(leaf)
            if not wrapped and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._round)
        return output

    def _round(self, gradient: Tensor) -> Tensor:
        if gradient.layout != torch.strided or gradient.is_nested:
            return gradient
        signs = torch.from_numpy(np.asarray(self._signs.integers(0, 2, tuple(gradient.shape)) * 2.0 - 1.0))
        return gradient * (1.0 + torch.finfo(gradient.dtype).eps * signs).to(gradient.device, gradient.dtype)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, columns = (-(-size // 2) for size in weight.shape)
    products = [
        F.linear(input[..., :columns], part[:, :columns]) + F.linear(input[..., columns:], part[:, columns:])
        for part in (weight[:rows], weight[rows:])
    ]
    out = torch.cat(products, -1)
    return out if bias is None else out + bias.to(out.dtype)


@dataclass
class _LayerCall:
    """First call of a layer, and the gradient of the layer's output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradient: Tensor | None = None


class SampledLayers:
    """Context that records inputs and gradients of some layers; `rounding` then computes each layer again alone."""

    def __init__(self, model: nn.Module) -> None:
        layers = {
            name: module
            for name, module in model.named_modules()
            if not list(module.children()) and any(p.requires_grad for p in module.parameters())
        }
        every = -(-len(layers) // NUM_LAYERS)
        self._layers = dict(list(layers.items())[::every])
        self._calls: dict[nn.Module, _LayerCall] = {}

    def __enter__(self) -> SampledLayers:
        self._handles = [layer.register_forward_hook(self._note, with_kwargs=True) for layer in self._layers.values()]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        out = _first(output)
        if layer not in self._calls and out is not None and out.requires_grad:
            call = self._calls[layer] = _LayerCall(*tree_map_only(Tensor, Tensor.detach, (args, kwargs)))
            out.register_hook(lambda gradient: setattr(call, "gradient", gradient.detach()))

    def rounding(self, precision: Precision) -> dict[str, float]:
        """Return by layer the largest relative distance of output and gradients from float64, one layer at a time."""
        distances = {}
        for name, layer in self._layers.items():
            call = self._calls.get(layer)
            if call is None or call.gradient is None:
                continue
            with torch.enable_grad():
                try:
                    wide = _computed(layer, call, None)
                except (RuntimeError, TypeError, NotImplementedError):  # not in float64
                    continue
                plain = _computed(layer, call, precision)
            sizes = [float(true.norm()) for true in wide]
            pairs = zip(plain, wide, sizes, strict=True)
            distances[name] = max(float((a.double() - b).norm()) / size if size else 0.0 for a, b, size in pairs)
        return distances


def _computed(layer: nn.Module, call: _LayerCall, precision: Precision | None) -> list[Tensor]:
    """Return output and gradients of a copy of the layer, in float64 if `precision` is None."""
    own = copy.deepcopy(layer)
    own.zero_grad(set_to_none=True)
    args, kwargs, gradient = call.args, call.kwargs, call.gradient
    assert gradient is not None
    if precision is None:
        own.double()
        args, kwargs, gradient = tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs, gradient)
        )
        out = _first(own(*args, **kwargs))
    else:
        with precision.products(), precision.autocast():
            out = _first(own(*args, **kwargs))
    assert out is not None
    out.backward(gradient)
    gradients = [p.grad for p in own.parameters() if p.grad is not None]
    return [out.detach(), *(g.to_dense() if g.is_sparse else g for g in gradients)]


def _first(output: Any) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
