"""CUDA graphs of functions: warm-up, capture and replay, and refusal of operations that a replay cannot repeat."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.errors import PlanError
from shoal.numerics.captured_draws import CapturedScope, NotCapturableError

# A function of tensors at fixed addresses. It returns tensors.
Body = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Recording:
    """Captured function. `replay` repeats its operations, which write their results into `outputs`."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]


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
        """Check whether a random operation draws nothing, or draws from a generator seeded before each replay."""
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
        # thread_local: other threads copy samples and checkpoints during the capture.
        with (
            _generator_restored(self._device),
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            outputs = body()
        return Recording(graph.replay, outputs)


@contextlib.contextmanager
def _generator_restored(device: torch.device) -> Iterator[None]:
    """Release the device's global generator from the capture if the body of the context raises.

    torch registers this generator with every capture, and releases it only after a successful capture.
    """
    own = torch.cuda.default_generators[device.index or 0]
    state = own.get_state()
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            own.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
            own.set_state(state)
        raise


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
            conflict="a replay comes before the step in hand is read, and a stream has no step before that",
            remedy="write execution.cuda_graph = false, or give the samples as a map-style dataset",
        )
