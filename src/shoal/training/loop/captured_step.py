"""Captured steps: one CUDA graph with a step's forwards, backwards, sums and update, which later steps replay.

A step that is queued before the previous step is read (`late_reads`) needs nothing from the host, so a graph can
repeat it. Inputs that change from step to step are in tensors that are filled before a replay: the batches, the digests
of sample ids, the loss scale, the learning rates, the mask flag and the seeds of the grains' generators. Warm-up,
capture and trial are masked steps, which change nothing. Steps of another shape are queued without the graph.

The sums of several ranks, and the exchange of ZeRO-1, are in the graph. The ranks agree on the next step from host to
host after the replay is queued. They capture and replay together: a reason of one rank is every rank's. If no step can
be captured, the run reports the reason and queues all steps without a graph. Decision 0057.
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shoal.data.loader import Microbatch
from shoal.distributed.failures import as_shoal_error, is_lost_peer
from shoal.distributed.mesh import NO_ROW
from shoal.errors import JobError, PlanError, text_of
from shoal.numerics import device_reads
from shoal.numerics.captured_draws import CapturedScope, NotCapturableError
from shoal.numerics.generators import all_generators
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.precision import LossScale
from shoal.parallel.base import NUM_SUMS, SAMPLES, TOTAL, WEIGHT, Flags, QueuedSums
from shoal.plans.grains import Grain
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import (
    FetchedStep,
    ForwardBackward,
    LoadedMicrobatch,
    StepRunner,
    UnreadStep,
    no_gradient,
)
from shoal.training.update.optimizer_step import maskable

if TYPE_CHECKING:
    from shoal.training.loop.trainer import TrainingParts

# Eager runs before a capture, in which torch chooses kernels and allocates memory. torch's notes recommend this number.
_WARM_UPS = 3
# A replay runs the kernels of the warm-up on the same numbers. Only sums of undefined order may differ, by about 1e-6.
# A wrong mask or an input that is not filled causes far larger differences. A false alarm only costs the graph.
TRIAL_TOLERANCE = 1e-4
# Limits that end the use of a graph: consecutive steps of other shapes, captures, slow steps before the first capture.
_MOST_OTHERS, _MOST_CAPTURES, _MOST_SLOW = 32, 4, 8


@dataclass(frozen=True)
class StepShape:
    """Properties of a step that are fixed at its capture. The graph replays only steps with equal properties."""

    # For each microbatch its structure, its leaves and its grains. Of a tensor: shape, strides and dtype.
    microbatches: tuple[tuple[TreeSpec, tuple[Any, ...], tuple[Grain, ...]], ...]
    policy: MicrobatchPolicy
    settings: tuple[Any, ...]  # of the optimizer, except the graph's inputs; `training` and `requires_grad` flags


@dataclass(frozen=True)
class LaunchedStep:
    """Step with all operations queued. `numbers`: the vector from `QueuedSums.packed`.

    `masks_next`: float32 [], 1.0 if the next step must change nothing.
    """

    step: UnreadStep
    masks_next: Tensor
    numbers: Tensor


class StepGraph:
    """CUDA graph for the steps of one shape, with its input tensors. Its memory is that of one microbatch at a time."""

    def __init__(self, parts: TrainingParts, shape: StepShape, loaded: Sequence[LoadedMicrobatch]) -> None:
        self.shape, self._parts = shape, parts
        self._microbatches = [one.microbatch.without_batch() for one in loaded]
        device, optimizer = parts.mesh.device, parts.updater.optimizer
        self._leaves = [
            [
                torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in tree_leaves(one.batch())
            ]
            for one in loaded
        ]
        # The sums that are known to the host, for each microbatch; the factor of the losses; the learning rates.
        num_known = NUM_SUMS * len(loaded)
        self._numbers = torch.zeros(num_known + 1 + len(optimizer.param_groups), dtype=torch.float64, device=device)
        self._known, self._others = self._numbers[:num_known].view(-1, NUM_SUMS), self._numbers[num_known:]
        self._masked = torch.ones((), device=device)
        scoped = self._microbatches if shape.policy.randomness == "scoped" else []
        self._draws = [CapturedScope(parts.job.seed, one.grains, device, parts.computer.names) for one in scoped]
        self._recording: Recording | None = None
        self._errors = list[Exception]()  # of this rank's passes, while other ranks sum
        self._lasting = [tensor.detach() for tensor in lasting_tensors(parts)]  # their memory must not be reused
        self._addresses = addresses(self._lasting)
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._trained: tuple[Tensor, Tensor | None] | None = None  # the first pair with a gradient

    @property
    def outputs(self) -> tuple[Tensor, Tensor, QueuedSums]:
        """Outputs of the replayed step: packed numbers, whether the next step is masked (float32 []), and the sums."""
        assert self._recording is not None
        numbers, masks_next, sums, failures = self._recording.outputs
        return numbers, masks_next, QueuedSums(sums, failures, None)

    def fits(self) -> bool:
        """Return True if parameters, buffers, optimizer state and buckets are still at the captured addresses."""
        return addresses(lasting_tensors(self._parts)) == self._addresses

    def fill(self, loaded: Sequence[LoadedMicrobatch], scale: LossScale, masked: Tensor | bool) -> None:
        """Copy the inputs of the next step into the graph: samples, seeds, loss scale, learning rates, mask flag."""
        numbers = []
        for one, leaves in zip(loaded, self._leaves, strict=True):
            for own, leaf in zip(leaves, tree_leaves(one.batch()), strict=True):
                if isinstance(own, Tensor):
                    own.copy_(leaf)
            numbers += [0.0, 0.0, one.microbatch.num_samples, 1.0, *one.microbatch.words]
        rates = [float(group["lr"]) for group in self._parts.updater.optimizer.param_groups]
        numbers += [scale.factor(self._parts.job.global_batch), *rates]
        device_reads.send(torch.tensor(numbers, dtype=torch.float64), self._numbers)
        if not isinstance(masked, Tensor):
            self._masked.fill_(masked)
        elif masked is not self._masked:
            self._masked.copy_(masked)
        for draws in self._draws:
            draws.seed(loaded[0].microbatch.step)

    def capture(self, recorder: Recorder, fill: Callable[[], None]) -> None:
        """Capture a masked step with the inputs from `fill`, and compare a trial replay with the warm-up.

        Raises: NotCapturableError, also for another rank's reason; errors of the model and the loss.
        Collective: all ranks, as some steps, with a JSON gather after each.
        """
        results: tuple[Tensor, ...] = ()
        agreed = functools.partial(together, self._parts, self._errors)
        for number in range(_WARM_UPS):
            first = number == 0
            with agreed():
                fill()
                before = all_generators()
                # Under a dispatch mode torch.compile compiles nothing: then the capture itself has to find what fails.
                is_free = first or (self._parts.computer.regions.names and self._parts.computer.regions.enabled)
                results = recorder.warm_up(self.body, contextlib.nullcontext() if is_free else CaptureRules())
                if not (first and self._draws) and all_generators() != before:
                    raise NotCapturableError("it draws random numbers outside of torch's functions")
        with agreed():
            if not self.fits():
                raise NotCapturableError("its forward puts other tensors in the place of buffers")
            if any(results[-1].tolist()):
                raise NotCapturableError("other parameters have gradients than in the last step")
            fill()
            self._recording = recorder.record(self.body)
            self._gradients = [(p, p.grad) for p in self._parts.parameters]
            self._trained = next((pair for pair in self._gradients if pair[1] is not None), None)
        with agreed():
            fill()
            self._recording.replay()
            numbers, _, sums = self.outputs
            pairs = zip(
                *(np.concatenate(sums.unpacked(read.cpu().numpy())) for read in (results[0], numbers)), strict=True
            )
            if not all(a == b or math.isclose(a, b, rel_tol=TRIAL_TOLERANCE) or (a != a and b != b) for a, b in pairs):
                raise NotCapturableError("a trial of the graph gave other numbers than the step itself")

    def replay(self) -> None:
        """Replay the step that was filled in. Gradients are in `parameter.grad` as after the capture."""
        assert self._recording is not None
        self._recording.replay()
        if self._trained is not None and self._trained[0].grad is not self._trained[1]:  # a step ran without the graph
            for parameter, gradient in self._gradients:
                parameter.grad = gradient

    def close(self) -> None:
        """Free the recording."""
        if self._recording is not None:
            self._recording.close()

    def body(self) -> tuple[Tensor, ...]:
        """Compute the step on the device. Return packed numbers, the next step's mask, sums and failures.

        A replay repeats only the tensor operations. All other Python code runs in the capture alone. The ranks' rows do
        not travel with the sums: the ranks agree from host to host, while the device computes.
        """
        parts, flags = self._parts, Flags()
        narrow = self._others.float()
        passes = ForwardBackward(parts, narrow[0])
        try:
            passes.begin(self._microbatches[0].step)
            for place, (microbatch, leaves) in enumerate(zip(self._microbatches, self._leaves, strict=True)):
                spec, passes.sums_of = self.shape.microbatches[place][0], functools.partial(self._sums, place)
                with (
                    parts.computer.precision.products(),
                    self._draws[place] if self._draws else contextlib.nullcontext(),
                ):
                    total, weight = parts.computer.loss(tree_unflatten(leaves, spec))
                    if not total.requires_grad:
                        raise no_gradient(1.0)
                    passes.add(microbatch, total, weight, last=place == len(self._leaves) - 1)
                parts.buffers.restore()
        except Exception as error:
            if parts.mesh.world_size == 1 or is_lost_peer(error):
                raise
            self._errors.append(error)
            flags = Flags(errors=1)  # the other ranks wait for this rank's sums
        queued = passes.queue(flags, NO_ROW)
        rates = narrow[1:].unbind() if parts.job.schedule is not None else None
        step = functools.partial(parts.updater.stepper.queue_step, rates=rates, captures=True)
        norms = parts.updater.queue(queued, self._masked, self._others[0], step)
        if parts.buffers.names:
            parts.buffers.queue_assign(queued.sums[NUM_SUMS:], queued.sums[SAMPLES].round(), self._masked == 0)
        return queued.packed(self._masked, norms), self._masked, queued.sums, queued.failures

    def _sums(self, place: int, total: Tensor, weight: Tensor | float, buffers: Tensor) -> Tensor:
        """Return the terms that `microbatch_sums` returns, from the numbers that were filled in."""
        sums = torch.cat([self._known[place], buffers])
        sums[TOTAL].copy_(total)
        if isinstance(weight, Tensor):
            sums[WEIGHT].copy_(weight.detach())
        else:
            sums[WEIGHT].fill_(weight)
        return sums


class CapturedStep:
    """Graph of a run's steps, which may be constructed and dropped before any step.

    `why_not`: why no step is captured, or None; the same ranks have a reason. `note`, if given, receives it once.
    """

    why_not: str | None = None

    def __init__(
        self, parts: TrainingParts, runner: StepRunner, recorder: Recorder, note: Callable[[str], None] | None = None
    ) -> None:
        self._parts, self._runner, self._note, self._recorder = parts, runner, note, recorder
        self._graph: StepGraph | None = None
        self._modules = list(parts.model.modules())
        self._num_others = self._num_captures = self._num_slow = 0
        self.read_at_once()

    def read_at_once(self, *, is_slow: bool = False, never: bool = False) -> None:
        """Give up the graph if each step is read before the next one is queued, for a reason that does not pass.

        `is_slow`: the last step took long. `never`: no step of this run is queued, whatever the reason.
        """
        parts, optimizer = self._parts, self._parts.updater.optimizer
        if is_slow:
            self._num_slow += 1
            if self._num_slow >= _MOST_SLOW and not self._num_captures:
                self._refuse("steps take so long that each is read before the next one")
        elif parts.mesh.through_host:
            self._refuse("ranks that share a GPU exchange tensors through the host")
        elif parts.observer.always_looks:
            self._refuse("each step is looked at")
        elif parts.clock.is_listened_to:
            self._refuse("its steps are traced")
        elif parts.callbacks.always_at_once:
            self._refuse("a callback wants each step before the next one begins: give it `at_once`")
        elif not maskable(optimizer):
            kernels = "no kernels of torch's that a number on the device masks, for these parameters and settings"
            write = "write torch.optim.SGD, Adam or AdamW with their default kernels, and float32 parameters"
            self._refuse(f"{type(optimizer).__name__} has {kernels}: {write}")
        elif parts.sharded_model.hooks.by_name:
            self._refuse(f"Python calls the hook on the gradient of {next(iter(parts.sharded_model.hooks.by_name))}")
        elif never or not (parts.strategy.queues and parts.loader.looks_ahead):
            self._refuse("steps of this job are read before the next one is queued")

    @property
    def fits(self) -> bool:
        """True unless other code has replaced tensors of the graph."""
        return self._graph is None or self._graph.fits()

    def drop(self) -> None:
        """Free the graph. Call it before the process group ends; a later step may be captured again."""
        if self._graph is not None:
            self._graph.close()
        self._graph = None

    def queue(self, fetched: FetchedStep, scale: LossScale, masked: Tensor | None) -> LaunchedStep | None:
        """Replay a step and fetch the next step's samples. Return None if the step must be queued without the graph.

        `masked`: float32 [], 1.0 if the previous step masks this step.
        Collective: all ranks, an all-gather of a number: all ranks replay the step, or none.
        """
        if self.why_not is not None:
            return None
        parts, data = self._parts, fetched.data
        loaded = list[LoadedMicrobatch]()
        try:
            for one in fetched.microbatches(parts.computer.precision.inputs) if fetched.error is None else ():
                if loaded:  # a plain copy would wait for the previous step
                    one.batch = self._runner.transfer.start(one.microbatch.batch)
                loaded.append(one)
        except Exception as error:
            fetched.error = as_shoal_error(error)
        shape = self._shape([one.microbatch for one in loaded])
        if self._graph is not None:
            fits = self._graph.shape == shape
        else:
            fits = sum(grain.size for grain in parts.order.grains(fetched.step)) == parts.job.global_batch
        if parts.mesh.all_gather([float(fits and bool(loaded) and fetched.error is None)]).all():
            self._num_others = 0
            if self._graph is None:
                self._graph = self._captured(shape, loaded, scale)
        else:
            self._num_others += 1
            if self._num_others >= _MOST_OTHERS:
                self._refuse(f"{_MOST_OTHERS} steps in a row were of other shapes or settings than the captured one")
            fits = False
        graph = self._graph if fits else None
        if graph is None:
            if loaded and data is not None:
                following = iter([one.microbatch for one in loaded[1:]])
                fetched.first, fetched.data = loaded[0], replace(data, microbatches=following)
            return None
        parts.clock.mark("host_to_device")
        graph.fill(loaded, scale, masked if masked is not None else False)
        seen = [one.microbatch.without_batch() for one in loaded]
        loaded.clear()
        parts.clock.mark("other")
        parts.updater.num_begun += 1
        graph.replay()
        numbers, masks_next, sums = graph.outputs
        following_step = self._runner.fetch(fetched.step + 1)
        passes = ForwardBackward(parts, scale.factor(parts.job.global_batch))
        step = UnreadStep(passes, seen, following_step, None, None, sums=sums)
        return LaunchedStep(step, masks_next, numbers)

    def _shape(self, microbatches: Sequence[Microbatch]) -> StepShape:
        """Return the shape of a step with these microbatches and the current settings."""
        parts = self._parts
        inputs = ("params", "initial_lr") if parts.job.schedule is None else ("params", "initial_lr", "lr")
        groups = parts.updater.optimizer.param_groups
        settings = [(name, value) for g in groups for name, value in g.items() if name not in inputs]
        settings += [("compiled", parts.computer.regions.enabled)]
        settings += [("training", module.training) for module in self._modules]
        settings += [("requires_grad", parameter.requires_grad) for parameter in parts.model.parameters()]
        structures = []
        for one in microbatches:
            leaves, spec = tree_flatten(one.batch)
            kinds = [(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            structures.append((spec, tuple(kinds), one.grains))
        return StepShape(tuple(structures), parts.computer.computation, tuple(settings))

    def _captured(self, shape: StepShape, loaded: Sequence[LoadedMicrobatch], scale: LossScale) -> StepGraph | None:
        """Capture a step, or refuse with the reason. Collective: as `StepGraph.capture`."""
        parts, step = self._parts, loaded[0].microbatch.step
        self._num_captures += 1
        try:
            with contextlib.ExitStack() as stack:
                with together(parts):
                    if self._num_captures > _MOST_CAPTURES:
                        raise NotCapturableError("parameters, buffers or optimizer state are replaced again and again")
                    leaves = [leaf for _, leaves, _ in shape.microbatches for leaf in leaves]
                    odd = next(
                        (leaf for leaf in leaves if not isinstance(leaf, tuple | int | float | str | None)), None
                    )
                    if odd is not None:
                        raise NotCapturableError(f"a batch has a {type(odd).__name__} in it: use tensors and numbers")
                    if shape.policy.randomness == "opaque":
                        raise NotCapturableError("the model draws at random in ways that cannot be told apart by grain")
                    graph = StepGraph(parts, shape, loaded)
                    stack.enter_context(unchanged(parts))
                stack.enter_context(parts.clock.paused())
                graph.capture(self._recorder, lambda: graph.fill(loaded, scale, True))
        except Exception as error:  # an error of the model recurs in the ordinary step, which reports it
            if is_out_of_memory(error):
                torch.cuda.empty_cache()
            self._refuse(reason_of(error, parts.model))
            return None
        if self._num_captures == 1 and self._note is not None:
            self._note(f"execution.cuda_graph: steps are replayed from step {step + 1} on")
        return graph

    def _refuse(self, reason: str) -> None:
        if self.why_not is None and self._note is not None:
            self._note(f"execution.cuda_graph: no graph, and steps are queued one operation after the other: {reason}")
        self.why_not = self.why_not or reason
        self.drop()


def reason_of(error: BaseException, model: nn.Module) -> str:
    """Return why a step cannot be captured, on one line, with the module whose code has raised and its line."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, NotCapturableError):
        link = link.__cause__ or link.__context__
    first_line = (text_of(error).strip().splitlines() or [""])[0][:200]
    reason, place = str(link) if link is not None else f"{type(error).__name__}: {first_line}", ""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    for frame, line in traceback.walk_tb((link or error).__traceback__):
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None and Path(frame.f_code.co_filename) != Path(nn.modules.module.__file__):
            place = f" (in {name}, {Path(frame.f_code.co_filename).name}:{line})"
    return reason + place


@contextlib.contextmanager
def together(parts: TrainingParts, errors: list[Exception] | None = None) -> Iterator[None]:
    """Raise on every rank if the body raises on any. Collective: all ranks.

    The gather is also the barrier around a capture that NCCL needs. `errors`: further errors of this rank so far, which
    are removed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if errors:
        error = error or errors[0]
        errors.clear()
    if parts.mesh.world_size > 1:
        reasons = parts.mesh.gather_json(None if error is None else reason_of(error, parts.model))
        other = next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None), None)
        if other is not None:
            raise NotCapturableError(other) from error
    if error is not None:
        raise error


@contextlib.contextmanager
def unchanged(parts: TrainingParts) -> Iterator[None]:
    """Restore parameters, buffers and optimizer state if the body of the context raises."""
    tensors = lasting_tensors(parts)
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except Exception:
        with contextlib.suppress(JobError):  # a buffer of another shape: the ordinary step reports it
            parts.buffers.restore()
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        raise


def lasting_tensors(parts: TrainingParts) -> list[Tensor]:
    """Return the tensors that outlive a step: parameters, buffers, the optimizer's state and gradient buckets."""
    states = parts.updater.optimizer.state.values()
    state = [value for own in states for value in own.values() if isinstance(value, Tensor)]
    return [*parts.model.parameters(), *parts.model.buffers(), *state, *parts.strategy.gradient_memory()[0]]


# ---------------------------------------------------------------------------------------------------- device graphs


# A function of tensors at fixed addresses. It returns tensors.
Body = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Recording:
    """Captured function. `replay` repeats its operations, which write their results into `outputs`."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]
    close: Callable[[], None] = lambda: None  # frees what the replays use


class CaptureRules(TorchDispatchMode):
    """Context that refuses operations which a replay cannot repeat: reads, values of the host, draws from generators.

    Backwards in a device's thread are checked too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise NotCapturableError(
                "it reads a number off the device, as item(), float() and bool() do: use torch.where, or a mask"
            )
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            raise NotCapturableError(f"shapes depend on values: {func.overloadpacket}; use a mask")
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs):
            raise NotCapturableError(f"it draws random numbers that are no grain's: {func.overloadpacket}")
        result = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.lift_fresh and not result.is_cpu:  # torch.tensor(..., device=...)
            raise NotCapturableError(
                "it makes tensors of the device from numbers of the host: make them once, as buffers"
            )
        devices = {t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
        if len(devices) > 1:
            raise NotCapturableError(
                f"it brings values of the host to the device, or back: {func.overloadpacket}; use buffers"
            )
        return result


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return bool(named.get("dropout_p") == 0.0)


class Recorder(ABC):
    """Interface for the capture of a function's operations on a device."""

    @abstractmethod
    def warm_up(self, body: Body, rules: contextlib.AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        """Call a function without a capture, under `rules`, to finish work that only a first call does."""

    @abstractmethod
    def record(self, body: Body) -> Recording:
        """Capture a warmed-up function. Its outputs have values only after a replay. Raises: errors of the body."""


class CudaRecorder(Recorder):
    """Recorder with CUDA graphs. Both methods use a side stream, as torch's notes on CUDA semantics require."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        # Gradient nodes that hooks keep since eager steps belong to the default stream, which torch 2.13 can override.
        override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
        if override is not None:
            override(True)

    def warm_up(self, body: Body, rules: contextlib.AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream), rules:
            outputs = body()
        now.wait_stream(self._stream)
        return outputs

    def record(self, body: Body) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # torch registers the device's global generator with every capture, and releases it only after a successful one.
        own = torch.cuda.default_generators[self._device.index or 0]
        state = own.get_state()
        try:
            # thread_local: other threads copy samples and checkpoints during the capture.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                outputs = body()
        except BaseException:
            with contextlib.suppress(Exception):
                own.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())
                own.set_state(state)
            raise
        return Recording(graph.replay, outputs, graph.reset)


# Recorder by type of device, for devices with graphs.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the addresses of tensors. A graph reads and writes memory by address."""
    return tuple([tensor.data_ptr() for tensor in tensors])


def refuse_uncapturable(device: torch.device, *, mapped: bool) -> None:
    """Refuse a device without graphs, and data that are not map-style. Raises: PlanError."""
    given = "--step graph or compiled-graph, or execution.cuda_graph = true, with {}"
    if device.type not in RECORDERS:
        raise PlanError(
            given=given.format(f"the device {device.type}"),
            conflict="a step is captured in a CUDA graph, which is a CUDA device's",
            remedy="write --step auto, or execution.cuda_graph = false in the plan, or use a CUDA device",
        )
    if not mapped:
        raise PlanError(
            given=given.format("a stream of samples"),
            conflict="a step is replayed before the previous step is read, and a stream cannot be read so far ahead",
            remedy="write --step eager, or execution.cuda_graph = false in the plan, or give a map-style dataset",
        )
