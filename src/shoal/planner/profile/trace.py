"""Tracing of one forward and backward of a model on fake tensors, which have shapes and no memory.

A trace has one event per operator: the storages, their shapes, and the calling module. Only the first of equal blocks
is traced, and the others reuse its outputs, so a model of 80 equal layers traces as fast as one layer.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shoal.numerics.isolation import YieldingHooks, without_modes
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.numerics.operators import tensors_in
from shoal.numerics.precision import cast_grouped_products
from shoal.parallel.data.sparse_rows import sparse_parameters
from shoal.parallel.model.module_state import PLACES
from shoal.parallel.model.structure import repeated_blocks
from shoal.parallel.model.value_free import ValueFree, twin
from shoal.planner.profile.kernels import as_on
from shoal.plans.plan import PrecisionSection

Loss = Callable[[nn.Module, Any], Any]
Model = nn.Module | Callable[[], nn.Module]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Operators that read a tensor and compute nothing: even the device of a fake tensor is one. A loop that logs a number
# for each sample has as many as samples.
_NO_OPERATORS = (torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default)
# Sequence numbers from here on are AccumulateGrad's, which belongs to no call.
_NO_CALL = 2**63
# Parameters, buffers and submodules, which are compared by name and shape instead.
_PARTS = frozenset(("_parameters", "_buffers", "_modules"))
_SIMPLE = (int, float, bool, str, type(None), torch.dtype)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A tensor described as a view of a storage; `key` identifies the storage during the trace.

    `numel`, `num_bytes`: elements in memory and their bytes; an expanded dim counts once.
    """

    key: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    dtype: str
    floating: bool
    numel: int
    num_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> StorageRef:
        """Return the description of a strided tensor."""
        shape, stride, dtype = tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch.")
        numel, itemsize = math.prod(n for n, step in zip(shape, stride, strict=True) if step or n == 0), tensor.itemsize
        offset, floating = int(tensor.storage_offset()), tensor.is_floating_point()
        return cls(_key(tensor), shape, stride, offset, itemsize, dtype, floating, numel, numel * itemsize)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True, eq=False)
class OperatorEvent:
    """One call of an operator.

    `node`: sequence number of the autograd node that the call made or, in the backward, that it belongs to.
    `arguments`: all arguments by the schema's names, with tensors as `StorageRef`s.
    `written`: indices in `inputs` of the tensors that the call changes in place.
    `is_view`: True if the call only makes views of its inputs.
    """

    name: str  # "aten.mm"
    module: str
    region: int
    is_backward: bool
    node: int
    arguments: dict[str, Any]
    inputs: list[StorageRef]
    outputs: list[StorageRef]
    written: frozenset[int] = frozenset()
    is_view: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_view = not self.written and {o.key for o in self.outputs} <= {i.key for i in self.inputs}


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """Storage that autograd first saved for node `node`, before event `place` of the trace."""

    node: int
    key: int
    num_bytes: int
    region: int
    place: int


@dataclass(slots=True)
class ForwardRegion:
    """Part of the forward: one call of a block, or the operators between two such calls.

    `like`: the region of an equal block that was traced instead of this one, if any.
    """

    block: str | None = None
    like: int | None = None


@dataclass
class OperatorTrace:
    """Trace of one forward and backward over `samples` samples."""

    samples: int
    events: list[OperatorEvent] = field(default_factory=list)
    forward: list[OperatorEvent] = field(default_factory=list)  # the events before the backward
    saved: list[SavedStorage] = field(default_factory=list)
    regions: list[ForwardRegion] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)  # names by storage key
    constants: frozenset[int] = frozenset()  # storages of parameters, buffers and the batch
    weights: dict[str, StorageRef] = field(default_factory=dict)  # parameters by name
    gradients: dict[str, StorageRef] = field(default_factory=dict)  # gradients by parameter name
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of storages that operators made
    used: dict[str, int] = field(default_factory=dict)  # the first region that uses each parameter


class OperatorRecorder(TorchDispatchMode):
    """Context that fills an `OperatorTrace`: every operator, its region, and the storages that autograd saves."""

    def __init__(self, trace: OperatorTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.in_backward = False
        self.saved_keys: set[int] = set()  # storages that autograd has saved
        self.known_calls: dict[Any, _KnownCall | None] = {}  # of memoized blocks
        self._stack: list[tuple[str, nn.Module]] = []
        self._paused = 0
        self._owners: dict[int, tuple[str, int]] = {}
        self._numbers: list[int] = []
        self._alive: dict[int, Any] = {}  # keeps storages alive, so that no key is reused
        self.region = -1
        self.enter(None)

    def enter(self, block: str | None) -> int:
        """Start the region of a block's forward, or one outside of blocks (None), and return its number."""
        self.trace.regions.append(ForwardRegion(block))
        self.region = len(self.trace.regions) - 1
        return self.region

    def before(self, name: str) -> Callable[..., None]:
        """Return a forward pre-hook for the module of this name."""

        def hook(module: nn.Module, args: Any) -> None:
            self._stack.append((name, module))

        return hook

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Remove the module from the stack of running modules, as its forward hook."""
        while self._stack and self._stack.pop()[1] is not module:
            pass  # entries of modules whose exception the model caught

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude operators that are not the model's from the trace."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _NO_OPERATORS or self._paused:
            return result
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if not inputs and not outputs:
            return result
        current = torch._C._current_autograd_node() if self.in_backward else None
        if current is None or self._stack:
            node = _newest_node()
            module, region = (self._stack[-1][0] if self._stack else ""), self.region
            if node not in self._owners:
                self._owners[node] = module, region
                self._numbers.append(node)
        else:
            node = current._sequence_nr()
            module, region = "", self.region if node >= _NO_CALL else 0
            if node < _NO_CALL and self._numbers:  # the call that made the node, or the latest one before it
                nearest = self._numbers[max(0, bisect_right(self._numbers, node) - 1)]
                module, region = self._owners.get(node) or self._owners[nearest]
        refs: dict[int, StorageRef] = {}
        for tensor in (*inputs, *outputs):
            if id(tensor) not in refs:
                refs[id(tensor)] = ref = StorageRef.of(tensor)
                if ref.key not in self._alive:
                    self._alive[ref.key] = storage = tensor.untyped_storage()
                    self.trace.sizes[ref.key] = storage.nbytes()
        if not self.in_backward:
            for tensor in inputs:
                name = self.trace.parameters.get(refs[id(tensor)].key)
                if name is not None:
                    self.trace.used.setdefault(name, region)
        schema = func._schema
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        mutable = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        writing = {id(t) for name in mutable for t in tensors_in(named.get(name))}
        arguments: dict[str, Any] = {}  # with a `StorageRef` in place of each tensor
        for name, value in named.items():
            if isinstance(value, Tensor):
                value = refs[id(value)]
            elif isinstance(value, list | tuple):
                value = tree_map(lambda leaf: refs[id(leaf)] if isinstance(leaf, Tensor) else leaf, list(value))
            arguments[name] = value
        self.trace.events.append(
            OperatorEvent(
                schema.name.replace("::", "."),
                module,
                region,
                self.in_backward,
                node,
                arguments,
                [refs[id(t)] for t in inputs],
                [refs[id(t)] for t in outputs],
                frozenset(i for i, t in enumerate(inputs) if id(t) in writing),
            )
        )
        return result

    def note(self, name: str, inputs: list[Tensor], outputs: list[Tensor], region: int) -> None:
        """Record a call of a block that was not traced again as one event."""
        for tensor in (*inputs, *outputs):
            self._alive.setdefault(_key(tensor), tensor.untyped_storage())
        refs = list(map(StorageRef.of, inputs)), list(map(StorageRef.of, outputs))
        self.trace.events.append(OperatorEvent(name, "", region, self.in_backward, -1, {}, *refs))

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a saved tensor's storage and return the tensor, as the pack hook of saved tensors."""
        with torch._C.DisableTorchFunction():
            if self._paused or self.in_backward or tensor.layout != torch.strided:
                return tensor
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
            if key not in self.saved_keys and key not in self.trace.parameters and num_bytes:
                self.saved_keys.add(key)
                self._alive.setdefault(key, storage)
                place = len(self.trace.events)
                self.trace.saved.append(SavedStorage(_newest_node(), key, num_bytes, self.region, place))
        return tensor


def _newest_node() -> int:
    """Return the sequence number of the newest autograd node."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


# --------------------------------------------------------------------------------------------------- memoized blocks


@dataclass
class _KnownCall:
    """Traced call of a block. `outputs` describes each new output tensor, or is the index of a returned argument."""

    region: int
    outputs: list[tuple[Any, ...] | int]
    tree: Any
    leaves: list[Any]
    saved_inputs: list[bool]
    saved_outputs: list[bool]
    of_buffers: list[SavedStorage]  # buffers of the block that autograd saves; each equal block has its own


class _MemoizedForward:
    """Replacement of a block's `forward`: computed or, after a traced call with equal arguments, new empty tensors."""

    def __init__(self, tracer: OperatorTracer, name: str, module: nn.Module) -> None:
        self._tracer, self._name, self._module, self._original = tracer, name, module, module.forward
        self._structure = structure(module)
        self._region: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._tracer.recorder
        if recorder is None:
            return self._original(*args, **kwargs)
        if recorder.in_backward or not torch.is_grad_enabled():  # a block that is recomputed belongs to its own region
            before, recorder.region = recorder.region, recorder.region if self._region is None else self._region
            try:
                return self._original(*args, **kwargs)
            finally:
                recorder.region = before
        self._region = recorder.enter(self._name)
        try:
            inputs = tensors_in((args, kwargs))
            with recorder.paused():
                key = self._structure, _signature(recorder, args, kwargs)
            known = recorder.known_calls.get(key)
            if known is not None:
                return self._stand_in(recorder, self._region, known, inputs)
            result = self._original(*args, **kwargs)
            with recorder.paused():
                recorder.known_calls[key] = self._known(recorder, self._region, inputs, result)
            return result
        finally:
            recorder.enter(None)

    def _stand_in(self, recorder: OperatorRecorder, region: int, known: _KnownCall, inputs: list[Tensor]) -> Any:
        trace = recorder.trace
        trace.regions[region].like = known.region
        for name, parameter in self._module.named_parameters():
            trace.used.setdefault(trace.parameters.get(_key(parameter), f"{self._name}.{name}"), region)
        trace.saved += known.of_buffers
        dummy = next((p for p in self._module.parameters() if p.requires_grad), None)
        specs = [spec for spec in known.outputs if not isinstance(spec, int)]
        with recorder.paused():
            new = list(_StandIn.apply(recorder, region, specs, dummy, *inputs)) if specs else []  # type: ignore[no-untyped-call]
        recorder.note("stand_in", inputs, new, region)
        fresh = iter(new)
        outputs = [inputs[spec] if isinstance(spec, int) else next(fresh) for spec in known.outputs]
        saved = (*zip(inputs, known.saved_inputs, strict=True), *zip(outputs, known.saved_outputs, strict=True))
        recorder.saved_keys |= {_key(tensor) for tensor, is_saved in saved if is_saved}
        remaining = iter(outputs)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in known.leaves]
        return tree_unflatten(leaves, known.tree)

    def _known(self, recorder: OperatorRecorder, region: int, inputs: list[Tensor], result: Any) -> _KnownCall | None:
        """Return the record of a traced call, or None if outputs share memory with the inputs or with each other."""
        leaves, tree = tree_flatten(result)
        outputs = tensors_in(result)
        places = {id(tensor): i for i, tensor in enumerate(inputs)}
        keys = [_key(t) for t in outputs if id(t) not in places]
        if len(set(keys)) < len(keys) or set(keys) & set(map(_key, inputs)):
            return None
        if any(not isinstance(leaf, Tensor | int | float | str | bool | None) for leaf in leaves):
            return None
        specs = [places.get(id(t), (tuple(t.shape), t.stride(), t.dtype, t.requires_grad)) for t in outputs]
        buffers = set(map(_key, self._module.buffers()))
        of_buffers = [saved for saved in recorder.trace.saved if saved.region == region and saved.key in buffers]
        saved_inputs, saved_outputs = ([_key(t) in recorder.saved_keys for t in ts] for ts in (inputs, outputs))
        return _KnownCall(region, specs, tree, leaves, saved_inputs, saved_outputs, of_buffers)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: OperatorRecorder, region: int, *rest: Any) -> tuple[Tensor, ...]:
        specs, _, *inputs = rest
        ctx.recorder, ctx.region = recorder, region
        ctx.like = [(tuple(t.shape), t.dtype) for t in inputs]
        outputs = tuple(torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype, _ in specs)
        ctx.mark_non_differentiable(*(t for t, spec in zip(outputs, specs, strict=True) if not spec[3]))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.recorder.paused():
            of_inputs = [
                torch.empty(shape, dtype=dtype) if needed else None
                for (shape, dtype), needed in zip(ctx.like, ctx.needs_input_grad[4:], strict=True)
            ]
        read, new = ([g for g in tensors if g is not None] for tensors in (gradients, of_inputs))
        ctx.recorder.note("stand_in", read, new, ctx.region)
        return None, None, None, None, *of_inputs


def structure(module: nn.Module) -> str:
    """Return a text that is equal for modules with the same classes, shapes and plain attributes."""

    def comparable(value: Any) -> Any:
        if isinstance(value, _SIMPLE):
            return value
        if isinstance(value, tuple | list):
            return [comparable(item) for item in value]
        if isinstance(value, Mapping):
            return [(str(key), comparable(item)) for key, item in value.items()]
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype
        return getattr(value, "__qualname__", type(value).__name__)

    inside = [
        (name, type(m), [(k, comparable(v)) for k, v in vars(m).items() if k not in _PARTS and not PLACES.search(k)])
        for name, m in module.named_modules()
    ]
    tensors = [
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    return f"{inside}{tensors}"


def _signature(recorder: OperatorRecorder, args: Any, kwargs: Any) -> str:
    """Return a text that is equal for calls with equal arguments.

    It includes whether autograd has saved an argument already, because that decides which block accounts for it.
    """
    leaves, tree = tree_flatten((args, kwargs))
    places: dict[int, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            key = _key(leaf)
            place = places.setdefault(key, len(places))
            is_saved = key in recorder.saved_keys or key in recorder.trace.constants
            described.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, place, is_saved))
        else:
            described.append(leaf if isinstance(leaf, _SIMPLE) else type(leaf))
    return f"{described}{tree}"


# ------------------------------------------------------------------------------------------------------------ tracer


class OperatorTracer:
    """Tracer of one model, for any number of samples.

    Args:
        model: A module, or a function that builds one.
        loss: (model, batch) -> (total, weight).
        precision: Dtypes of the parameters and of the compute.
        device: Type of device whose kernels to trace, "cuda" or "cpu".
        by_grain: True if dropout is drawn as shoal's engine does.
        values: The tensors with values, for models that read them: none, the integers of the batch, or all.

    `tables`: bytes of weights with sparse gradients, by name. The trace has dense ones.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        precision: PrecisionSection,
        *,
        device: str = "cuda",
        by_grain: bool = False,
        values: Literal["none", "integers", "all"] = "none",
    ) -> None:
        self._loss, self._precision, self._device, self._by_grain = loss, precision, device, by_grain
        self.values = values
        self.recorder: OperatorRecorder | None = None  # of the running trace
        self._value_free = value_free = None if values == "all" else ValueFree()
        self.mode: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if value_free is None else value_free.mode
        )
        dtype = _DTYPES[precision.parameters]
        with _quiet():
            complete = False  # whether the model needs no copy
            if not isinstance(model, nn.Module):
                with self.mode:
                    model = model()
                ours = all(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers()))
                complete = dtype == torch.float32 and (ours or value_free is None)
            if value_free is None:
                self.model = (model if complete else copy.deepcopy(model).to(dtype)).train()
            else:
                narrow = dtype if dtype != torch.float32 else None
                with self.mode:
                    fakes = model if complete else twin(model, lambda _, t: value_free.fake(t, narrow))
                self.model = fakes.train()
        self.tables = {name: table.nbytes for name, table in sparse_parameters(self.model).items()}
        for module in self.model.modules():  # a sparse tensor has no storage that a trace could follow
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False
        self._named = dict(self.model.named_parameters())
        for block in repeated_blocks(self.model):
            if block.children is None:
                block.module.forward = _MemoizedForward(self, block.name, block.module)

    def trace(self, batch: Callable[[int], Any], samples: int) -> OperatorTrace:
        """Trace one forward and backward. Raises: errors of the batch, the model or the loss."""
        trace = OperatorTrace(samples)
        trace.parameters = {_key(p): name for name, p in self._named.items()}
        self.recorder = recorder = OperatorRecorder(trace)
        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(recorder.before(name), prepend=True))
            handles.append(module.register_forward_hook(recorder.after))
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(NoTrace(None, {"loss": self._loss}))
                stack.enter_context(_quiet())
                if self._value_free is not None:
                    stack.enter_context(self._value_free.running())
                    stack.enter_context(as_on(self._device, self._by_grain))
                inputs = tree_map(self._input, batch(samples))
                constants = *self.model.buffers(), *tensors_in(inputs)
                trace.constants = frozenset((*map(_key, constants), *trace.parameters))
                hooks = YieldingHooks(recorder.pack, lambda saved: saved)
                autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
                if self._precision.compute != self._precision.parameters:
                    cast_grouped_products()
                    autocast = torch.autocast("cpu", dtype=_DTYPES[self._precision.compute])
                with torch.enable_grad(), hooks, recorder:
                    with autocast:
                        result = self._loss(self.model, inputs)
                        total: Tensor = result[0] if isinstance(result, tuple | list) else result
                        total = total if total.ndim == 0 else total.sum()
                    trace.forward, recorder.in_backward = list(trace.events), True
                    total.backward()
            trace.weights = {name: StorageRef.of(p) for name, p in self._named.items()}
            trace.gradients = {name: StorageRef.of(p.grad) for name, p in self._named.items() if p.grad is not None}
        finally:
            self.recorder = None
            for handle in handles:
                handle.remove()
            for parameter in self._named.values():
                parameter.grad = None
        return trace

    def _input(self, leaf: Any) -> Any:
        """Return a leaf of the batch for the traced loss, in the parameters' dtype."""
        if not isinstance(leaf, Tensor):  # a batch of a user's class, for example, to which a loss may add tensors
            with without_modes():
                return copy_of(leaf)
        value_free, narrow = self._value_free, _DTYPES[self._precision.parameters]
        if value_free is not None:
            leaf = value_free.fake_or_integers(leaf) if self.values == "integers" else value_free.fake(leaf)
        return leaf.to(narrow) if leaf.is_floating_point() and narrow != torch.float32 else leaf


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
