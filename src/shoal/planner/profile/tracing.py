"""Tracing of one forward and backward of a model on fake tensors, which have shapes and no memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from shoal.numerics.grouped_autocast import cast_grouped_products
from shoal.numerics.isolation import YieldingHooks, without_modes
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.numerics.operators import tensors_in
from shoal.parallel.model.structure import repeated_blocks
from shoal.parallel.model.value_free import ValueFree, twin
from shoal.planner.profile.events import OperatorTrace, StorageRef
from shoal.planner.profile.kernels import as_on
from shoal.planner.profile.recording import OperatorRecorder
from shoal.planner.profile.stand_ins import StandIns
from shoal.plans.plan import PrecisionSection

Loss = Callable[[nn.Module, Any], Any]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """Settings of a traced step: `device` is the type whose kernels run; `by_grain` selects shoal's own dropout."""

    precision: PrecisionSection
    device: str = "cuda"
    by_grain: bool = False
    with_batch: bool = False  # integers of the batch keep their values, for models that read them
    with_values: bool = False  # all tensors have values, for models that read them


class OperatorTracer:
    """Tracer of one model, for any number of samples."""

    def __init__(self, model: nn.Module | Callable[[], nn.Module], loss: Loss, setting: Setting) -> None:
        self._loss, self._setting = loss, setting
        self.with_values = setting.with_values
        self._value_free = None if setting.with_values else ValueFree()
        self.mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._value_free is not None:
            self.mode = self._value_free.mode
        with self._quiet():
            self.model = self._own(model).train()
        self._named = dict(self.model.named_parameters())
        self._stand_ins = StandIns(repeated_blocks(self.model))

    def _own(self, model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        """Return the model to trace: a copy on fake tensors (or with values), in the parameters' dtype."""
        dtype = _DTYPES[self._setting.precision.parameters]
        if not isinstance(model, nn.Module):
            with self.mode:
                model = model()
            ours = all(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers()))
            if dtype == torch.float32 and (ours or self._value_free is None):
                return model
        value_free = self._value_free
        if value_free is None:
            return copy.deepcopy(model).to(dtype)
        with self.mode:
            return twin(model, lambda _, t: value_free.fake(t, dtype if dtype != torch.float32 else None))

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Silence torch's warnings and logs, which do not apply to a run, and restore the caller's random generator."""
        log = logging.getLogger("torch._subclasses.fake_tensor")
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                yield
        finally:
            log.setLevel(level)

    def trace(self, batch: Callable[[int], Any], samples: int) -> OperatorTrace:
        """Trace one forward and backward. Raises: errors of the batch, the model or the loss."""
        trace = OperatorTrace(samples)
        recorder = OperatorRecorder(trace)
        trace.parameters = {p.untyped_storage()._cdata: name for name, p in self._named.items()}
        buffers = {b.untyped_storage()._cdata for b in self.model.buffers()}
        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(recorder.before(name), prepend=True))
            handles.append(module.register_forward_hook(recorder.after))
        self._stand_ins.begin(recorder)
        try:
            with NoTrace(None, {"loss": self._loss}), self._quiet(), self._running(), self._kernels():
                given = self._input(batch(samples))
                of_batch = {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
                trace.constants = frozenset(of_batch | buffers | set(trace.parameters))
                hooks = YieldingHooks(recorder.pack, lambda saved: saved)
                with torch.enable_grad(), hooks, recorder:
                    with self._autocast():
                        total = _total(self._loss(self.model, given))
                    recorder.in_backward = True
                    total.backward()
            trace.weights = {name: StorageRef.of(p) for name, p in self._named.items()}
            trace.gradients = {name: StorageRef.of(p.grad) for name, p in self._named.items() if p.grad is not None}
        finally:
            self._stand_ins.recorder = None
            for handle in handles:
                handle.remove()
            for parameter in self._named.values():
                parameter.grad = None
        return trace

    def _kernels(self) -> contextlib.AbstractContextManager[Any]:
        setting = self._setting
        return contextlib.nullcontext() if setting.with_values else as_on(setting.device, setting.by_grain)

    def _running(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._value_free is None else self._value_free.running()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        precision = self._setting.precision
        if precision.compute == precision.parameters:
            return contextlib.nullcontext()
        cast_grouped_products()
        return torch.autocast("cpu", dtype=_DTYPES[precision.compute])

    def _input(self, batch: Any) -> Any:
        narrow = _DTYPES[self._setting.precision.parameters]

        def shown(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):  # a batch of a user's class, for example, to which a loss may add tensors
                with without_modes():
                    return copy_of(leaf)
            value_free, given = self._value_free, leaf
            if value_free is not None:
                given = value_free.fake_or_integers(leaf) if self._setting.with_batch else value_free.fake(leaf)
            return given.to(narrow) if given.is_floating_point() and narrow != torch.float32 else given

        return tree_map(shown, batch)


def _total(pair: Any) -> Tensor:
    total: Tensor = pair[0] if isinstance(pair, tuple | list) else pair
    return total if total.ndim == 0 else total.sum()
