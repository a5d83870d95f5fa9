"""Captured steps: one CUDA graph with a step's forward, backward, sums and update, which later steps replay.

A step that is queued before the previous step is read (`late_reads`) needs nothing from the host, so a graph can
repeat it. Inputs that change from step to step are in tensors that are filled before a replay: the batch, the digest of
sample ids, the learning rates, the mask flag and the seeds of the grains' generators. Warm-up, capture and trial are
masked steps, which change nothing. Steps of another shape are queued without the graph. If no step can be captured, the
run reports the reason and queues all steps without a graph. Decision 0057.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shoal.data.loader import Microbatch
from shoal.errors import JobError, PlanError, text_of
from shoal.jobs.job import Progress
from shoal.numerics import device_reads
from shoal.numerics.captured_draws import CapturedScope, NotCapturableError
from shoal.numerics.generators import all_generators
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.precision import LossScale
from shoal.parallel.base import NUM_SUMS, SAMPLES, TOTAL, WEIGHT, Flags, QueuedSums
from shoal.plans.grains import Grain
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import FetchedStep, ForwardBackward, StepRunner, UnreadStep, no_gradient
from shoal.training.update.optimizer_step import maskable

if TYPE_CHECKING:
    from shoal.training.loop.trainer import TrainingParts

# Eager runs before a capture, in which torch chooses kernels and allocates memory. torch's notes recommend this number.
_WARM_UPS = 3
# A replay runs the kernels of the warm-up on the same numbers. Only sums of undefined order may differ, by about 1e-6.
# A wrong mask or an input that is not filled causes far larger differences. A false alarm only costs the graph.
_TRIAL_TOLERANCE = 1e-4
# Limits that end the use of a graph: consecutive steps of other shapes, captures, slow steps before the first capture.
_MOST_OTHERS, _MOST_CAPTURES, _MOST_SLOW = 32, 4, 8


@dataclass(frozen=True)
class StepShape:
    """Properties of a step that are fixed at its capture. The graph replays only steps with equal properties."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # (shape, strides, dtype) of each tensor; other leaves unchanged
    grains: tuple[Grain, ...]
    policy: MicrobatchPolicy
    scale: LossScale
    settings: tuple[Any, ...]  # of the optimizer, except the graph's inputs; `training` and `requires_grad` flags


@dataclass(frozen=True)
class LaunchedStep:
    """Step with all operations queued. `masks_next`: bool []. `numbers`: the vector from `QueuedSums.packed`."""

    step: UnreadStep
    rate: float
    masks_next: Tensor
    numbers: Tensor


class StepGraph:
    """CUDA graph for the steps of one shape, with its input tensors."""

    def __init__(self, parts: TrainingParts, shape: StepShape, microbatch: Microbatch, leaves: Sequence[Any]) -> None:
        self.shape, self._parts, self._microbatch = shape, parts, microbatch.without_batch()
        device, groups = parts.mesh.device, len(parts.updater.optimizer.param_groups)
        self._leaves = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        self._numbers = torch.zeros(NUM_SUMS + groups, dtype=torch.float64, device=device)
        self._masked = torch.ones((), dtype=torch.bool, device=device)
        self._draws = CapturedScope(parts.job.seed, shape.grains, device)
        self._is_scoped = shape.policy.randomness == "scoped"
        self._factor = shape.scale.factor(parts.job.global_batch)
        self._recording: Recording | None = None
        self._lasting = [tensor.detach() for tensor in lasting_tensors(parts)]  # their memory must not be reused
        self._addresses = addresses(self._lasting)
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._known: tuple[Tensor, Tensor | None] | None = None  # the first pair with a gradient

    @property
    def outputs(self) -> tuple[Tensor, Tensor, QueuedSums]:
        """Outputs of the replayed step: packed numbers, whether the next step is masked (bool []), and the sums."""
        assert self._recording is not None
        numbers, masks_next, sums, failures = self._recording.outputs
        return numbers, masks_next, QueuedSums(sums, failures, None)

    def fits(self) -> bool:
        """Return True if parameters, buffers and optimizer state are still at the captured addresses."""
        return addresses(lasting_tensors(self._parts)) == self._addresses

    def fill(self, microbatch: Microbatch, leaves: Sequence[Any], masked: Tensor | bool) -> None:
        """Copy the inputs of the next step into the graph: samples, seeds, learning rates and the mask flag."""
        for own, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(leaf)
        rates = [float(group["lr"]) for group in self._parts.updater.optimizer.param_groups]
        numbers = [0.0, 0.0, microbatch.num_samples, 1.0, *microbatch.words, *rates]
        device_reads.send(torch.tensor(numbers, dtype=torch.float64), self._numbers)
        if isinstance(masked, Tensor):
            self._masked.copy_(masked)
        else:
            self._masked.fill_(masked)
        if self._is_scoped:
            self._draws.seed(microbatch.step)

    def capture(self, recorder: Recorder, fill: Callable[[], None]) -> None:
        """Capture a masked step with the inputs from `fill`, and compare a trial replay with the warm-up.

        Raises: NotCapturableError; errors of the model and the loss.
        """
        results: tuple[Tensor, ...] = ()
        for number in range(_WARM_UPS):
            fill()
            before, first = all_generators(), number == 0
            rules = contextlib.nullcontext() if first else CaptureRules(self._draws)
            results = recorder.warm_up(self.body, rules)
            if not (first and self._is_scoped) and all_generators() != before:
                raise NotCapturableError("it draws random numbers outside of torch's functions")
            self._draws.close()
        if not self.fits():
            raise NotCapturableError("its forward puts other tensors in the place of buffers")
        if any(results[-1].tolist()):
            raise NotCapturableError("other parameters have gradients than in the last step")
        fill()
        self._recording = recorder.record(self.body, self._draws)
        self._gradients = [(p, p.grad) for p in self._parts.parameters]
        self._known = next((pair for pair in self._gradients if pair[1] is not None), None)
        fill()
        self._recording.replay()
        pairs = zip(results[0].tolist(), self.outputs[0].tolist(), strict=True)
        if not all(a == b or math.isclose(a, b, rel_tol=_TRIAL_TOLERANCE) or (a != a and b != b) for a, b in pairs):
            raise NotCapturableError("a trial of the graph gave other numbers than the step itself")

    def replay(self) -> None:
        """Replay the step that was filled in. Gradients are in `parameter.grad` as after the capture."""
        assert self._recording is not None
        self._recording.replay()
        if self._known is not None and self._known[0].grad is not self._known[1]:  # a step ran without the graph
            for parameter, gradient in self._gradients:
                parameter.grad = gradient

    def close(self) -> None:
        """Free the recording."""
        if self._recording is not None:
            self._recording.close()

    def body(self) -> tuple[Tensor, ...]:
        """Compute the step on the device. Return packed numbers, the next step's mask, sums and failures.

        A replay repeats only the tensor operations. All other Python code runs in the capture alone.
        """
        parts, updater = self._parts, self._parts.updater
        passes = ForwardBackward(parts, self._factor, sums_of=self._sums)
        passes.begin(self._microbatch.step)
        with parts.precision.products(), self._draws if self._is_scoped else contextlib.nullcontext():
            total, weight = parts.computer.loss(tree_unflatten(self._leaves, self.shape.spec))
            if not total.requires_grad:
                raise no_gradient(1.0)
            passes.add(self._microbatch, total, weight, last=True)
        parts.buffers.restore()
        queued = parts.strategy.queue(Flags(), NUM_SUMS + parts.buffers.num_values, [])
        good, norm = updater.prepare(queued, (queued.failures == 0).all() & ~self._masked, self.shape.scale)
        rates = self._numbers[NUM_SUMS:].float().unbind() if parts.job.schedule is not None else None
        updater.stepper.capture_step(good, rates)
        parts.buffers.queue_assign(queued.sums[NUM_SUMS:], queued.sums[SAMPLES].round(), good)
        return queued.packed(good, norm), ~good, queued.sums, queued.failures

    def _sums(self, total: Tensor, weight: Tensor | float, buffers: Tensor) -> Tensor:
        """Return the terms that `microbatch_sums` returns, from the numbers that were filled in."""
        sums = torch.cat([self._numbers[:NUM_SUMS], buffers])
        sums[TOTAL].copy_(total)
        if isinstance(weight, Tensor):
            sums[WEIGHT].copy_(weight.detach())
        else:
            sums[WEIGHT].fill_(weight)
        return sums


class CapturedStep:
    """Graph of a run's steps, which may be constructed and dropped before any step.

    `why_not`: why no step is captured, or None. `note`, if given, receives the same reason once.
    """

    why_not: str | None = None

    def __init__(
        self, parts: TrainingParts, runner: StepRunner, recorder: Recorder, note: Callable[[str], None] | None = None
    ) -> None:
        self._parts, self._runner, self._note, self._recorder = parts, runner, note, recorder
        self._graph: StepGraph | None = None
        self._modules = list(parts.model.modules())
        self._num_others = self._num_captures = self._num_slow = 0

    def read_at_once(self, *, is_slow: bool = False) -> None:
        """Record a step that is read before the next one is queued. Give up the graph if the reason is permanent."""
        parts, optimizer = self._parts, self._parts.updater.optimizer
        if is_slow:
            self._num_slow += 1
            if self._num_slow >= _MOST_SLOW and not self._num_captures:
                self._refuse("steps take so long that each is read before the next one")
        elif parts.observer.looks:
            if parts.observer.always_looks:
                self._refuse("each step is looked at")
        elif parts.callbacks.always_at_once:
            self._refuse("a callback wants each step before the next one begins")
        elif not maskable(optimizer):
            kernels = "no kernels of torch's that a number on the device masks"
            self._refuse(f"{type(optimizer).__name__} has {kernels}, for these parameters and settings")
        else:
            self._refuse("steps of this job are read before the next one is queued")

    @property
    def replays(self) -> bool:
        """True if a step is captured, so that steps of its shape are replayed."""
        return self._graph is not None

    def drop(self) -> None:
        """Free the graph. Call it before the process group ends; a later step may be captured again."""
        if self._graph is not None:
            self._graph.close()
        self._graph = None

    def begin(self) -> None:
        """Prepare for queued steps: drop the graph if other code has replaced its tensors."""
        if self._graph is not None and not self._graph.fits():
            self.drop()

    def queue(
        self, fetched: FetchedStep, scale: LossScale, progress: Progress, masked: Tensor | None
    ) -> LaunchedStep | None:
        """Replay a step and fetch the next step's samples. Return None if the step must be queued without the graph.

        `masked`: bool [], whether the previous step masks this step. Raises: UserCodeError from the schedule.
        """
        data, first = fetched.data, fetched.first
        if self.why_not is not None or fetched.error is not None or data is None or first is None:
            return None
        parts, microbatch = self._parts, first.microbatch
        if data.num_microbatches != 1:
            self._refuse(f"a step is {data.num_microbatches} microbatches")
            return None
        rate = parts.updater.stepper.set_rates(progress)  # a schedule may also change what the graph fixes
        parts.clock.mark("host_to_device")
        leaves, spec = tree_flatten(first.batch())
        optimizer = parts.updater.optimizer
        inputs = ("params", "initial_lr") if parts.job.schedule is None else ("params", "initial_lr", "lr")
        settings = [(name, value) for g in optimizer.param_groups for name, value in g.items() if name not in inputs]
        settings += [("training", module.training) for module in self._modules]
        settings += [("requires_grad", parameter.requires_grad) for parameter in parts.model.parameters()]
        shape = StepShape(
            spec,
            tuple([(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]),
            microbatch.grains,
            parts.computer.computation,
            scale,
            tuple(settings),
        )
        if self._graph is not None and self._graph.shape == shape:
            self._num_others = 0
        elif self._graph is None and microbatch.num_samples == parts.job.global_batch:
            self._graph = self._captured(shape, microbatch, leaves)
        else:
            self._num_others += 1
            if self._num_others >= _MOST_OTHERS:
                self._refuse(f"{_MOST_OTHERS} steps in a row were of other shapes or settings than the captured one")
            return None
        graph = self._graph
        if graph is None:
            return None
        fetched.first = None  # otherwise its batch stays in memory until the step's end
        graph.fill(microbatch, leaves, masked if masked is not None else False)
        del leaves
        parts.clock.mark("other")
        parts.updater.num_begun += 1
        graph.replay()
        numbers, masks_next, sums = graph.outputs
        following = self._runner.fetch(fetched.step + 1)
        passes = ForwardBackward(parts, scale.factor(parts.job.global_batch))
        step = UnreadStep(passes, [microbatch.without_batch()], following, None, None, sums=sums)
        return LaunchedStep(step, rate, masks_next, numbers)

    def _captured(self, shape: StepShape, microbatch: Microbatch, leaves: Sequence[Any]) -> StepGraph | None:
        self._num_captures += 1
        try:
            if self._num_captures > _MOST_CAPTURES:
                raise NotCapturableError("parameters, buffers or optimizer state are replaced again and again")
            odd = next((leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | None)), None)
            if odd is not None:
                raise NotCapturableError(f"a batch has a {type(odd).__name__} in it")
            if shape.policy.by_position and self._parts.mesh.device.type == "cpu":
                raise NotCapturableError("it draws random numbers on the host")
            if self._parts.clock.is_listened_to:
                raise NotCapturableError("its steps are traced")
            graph = StepGraph(self._parts, shape, microbatch, leaves)
            with self._parts.clock.paused(), unchanged(self._parts):
                graph.capture(self._recorder, lambda: graph.fill(microbatch, leaves, True))
        except Exception as error:  # an error of the model recurs in the ordinary step, which reports it
            if is_out_of_memory(error):
                torch.cuda.empty_cache()
            link: BaseException | None = error
            while link is not None and not isinstance(link, NotCapturableError):
                link = link.__cause__ or link.__context__
            first_line = (text_of(error).strip().splitlines() or [""])[0][:200]
            self._refuse(str(link) if link is not None else f"{type(error).__name__}: {first_line}")
            del link  # else its traceback keeps this frame, and the frames of the forward, with their tensors
        else:
            if self._num_captures == 1 and self._note is not None:
                self._note(f"execution.cuda_graph: steps are replayed from step {microbatch.step + 1} on")
            return graph
        return None

    def _refuse(self, reason: str) -> None:
        if self.why_not is None and self._note is not None:
            self._note(f"execution.cuda_graph: no graph, and steps are queued one operation after the other: {reason}")
        self.why_not = self.why_not or reason
        self.drop()


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
    """Return the tensors that outlive a step: parameters, buffers and the optimizer's state."""
    states = parts.updater.optimizer.state.values()
    state = [value for own in states for value in own.values() if isinstance(value, Tensor)]
    return [*parts.model.parameters(), *parts.model.buffers(), *state]


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
    """Context that refuses operations which a replay cannot repeat: reads, values of the host, unseeded draws.

    `draws`: the scope that seeds random operations before each replay. Backwards in a device's thread are checked too.
    """

    def __init__(self, draws: CapturedScope) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise NotCapturableError("it reads a number off the device, as item(), float() and bool() do")
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            raise NotCapturableError(f"shapes depend on values: {func.overloadpacket}")
        if torch.Tag.nondeterministic_seeded in func.tags and not self._is_repeated(func, args, kwargs):
            raise NotCapturableError(f"it draws random numbers that are no grain's: {func.overloadpacket}")
        result = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.lift_fresh and not result.is_cpu:  # torch.tensor(..., device=...)
            raise NotCapturableError("it makes tensors of the device from numbers of the host")
        devices = {t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
        if len(devices) > 1:
            raise NotCapturableError(f"it brings values of the host to the device, or back: {func.overloadpacket}")
        return result

    def _is_repeated(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return True if a random operation draws nothing, or draws from a generator seeded before each replay."""
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if named.get("dropout_p") == 0.0 or self._draws.drawing is not None:
            return True
        own = named.get("generator")  # may be another Python object for one of the scope's generators
        return own is not None and own.initial_seed() in {g.initial_seed() for g in self._draws.all_generators}


class Recorder(ABC):
    """Interface for the capture of a function's operations on a device."""

    @abstractmethod
    def warm_up(self, body: Body, rules: contextlib.AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        """Call a function without a capture, under `rules`, to finish work that only a first call does."""

    @abstractmethod
    def record(self, body: Body, draws: CapturedScope) -> Recording:
        """Capture a warmed-up function. Its outputs have values only after a replay. Raises: errors of the body."""


class CudaRecorder(Recorder):
    """Recorder with CUDA graphs. Both methods use a side stream, as torch's notes on CUDA semantics require."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def warm_up(self, body: Body, rules: contextlib.AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream), rules:
            outputs = body()
        now.wait_stream(self._stream)
        return outputs

    def record(self, body: Body, draws: CapturedScope) -> Recording:
        graph = torch.cuda.CUDAGraph()
        for generator in draws.all_generators:
            graph.register_generator_state(generator)
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
    given = "execution.cuda_graph = true, with {}"
    if device.type not in RECORDERS:
        raise PlanError(
            given=given.format(f"the device {device.type}"),
            conflict="a step is captured in a CUDA graph, which is a CUDA device's",
            remedy="write execution.cuda_graph = false, or use a CUDA device",
        )
    if not mapped:
        raise PlanError(
            given=given.format("a stream of samples"),
            conflict="a step is replayed before the previous step is read, and a stream cannot be read so far ahead",
            remedy="write execution.cuda_graph = false, or give the samples as a map-style dataset",
        )
