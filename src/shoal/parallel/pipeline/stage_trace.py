"""Trace of a model for its division into stages: the order of module calls, and the dependences of values.

The user's own function runs once on tensors without data. A value is *tainted* if a stage without the earlier modules
cannot compute it: the output of a module with parameters, and everything computed from that output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from shoal.numerics.operators import tensors_in
from shoal.parallel.model.trial import FunctionCall, FunctionTrace

Forward = Callable[..., Any]

# To read one of these, a parameter must be on its device, but needs no values.
_PLACES = {Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.is_meta.__get__, Tensor.get_device}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Blank:
    """Shape, dtype and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Blank:
        """Return the blank of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device)

    def filled(self, dense: bool = False) -> Tensor:
        """Return a tensor of NaN, or of zeros for integers; only one number in memory unless `dense`."""
        is_float = self.dtype.is_floating_point or self.dtype.is_complex
        one = torch.full((), float("nan") if is_float else 0, dtype=self.dtype, device=self.device)
        one.requires_grad_(self.requires_grad and torch.is_grad_enabled())
        whole = one.expand(self.shape)
        return whole.clone() if dense else whole

    def empty(self) -> Tensor:
        """Return a tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Outline:
    """Structure of a module's output without its values: blanks, indices of returned arguments, or other objects."""

    leaves: tuple[Blank | int | tuple[Any], ...]
    spec: TreeSpec

    @classmethod
    def of(cls, output: Any, arguments: list[Any]) -> Outline:
        """Return the outline of a call's output, given the leaves of its arguments."""
        places = {id(leaf): place for place, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
        leaves, spec = tree_flatten(output)
        described = (places.get(id(leaf), Blank.of(leaf)) if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves)
        return cls(tuple(described), spec)

    def filled(self, arguments: list[Any], dense: bool) -> Any:
        """Return a meaningless output of this structure for the given leaves of arguments."""
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, Blank):
                leaves.append(leaf.filled(dense))
            else:
                leaves.append(arguments[leaf] if isinstance(leaf, int) else leaf[0])
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Slot:
    """Value that crosses a cut: its indices among the leaves of the arguments, and its blank."""

    places: tuple[int, ...]
    needs_grad: bool
    blank: Blank


@dataclass
class ModuleCall:
    """One call of a module, from `enter` to `exit` in the trace's time, in the call numbered `parent`."""

    number: int
    name: str
    parent: int | None
    enter: int
    exit: int = -1
    slots: tuple[Slot, ...] = ()
    argument_ids: frozenset[int] = frozenset()
    flops: int = 0  # total of all calls before this one
    parameter_bytes: int = 0  # total of the parameters used before this call
    tainted: bool = False
    uses_parameters: bool = False
    writes_into: str = ""  # a value from outside that a stage would have to know
    dense: bool = False  # its output is written into
    keeps_graph: bool = True  # whether autograd records as in the rest of the trace
    outline: Outline | None = None


@dataclass(frozen=True)
class Use:
    """Use of a parameter or buffer at a time, in the code of the call numbered `call`."""

    name: str
    time: int
    call: int | None
    writes: bool


@dataclass
class StageTrace:
    """Calls in order, uses of parameters and buffers, and the lifetime of each tainted value."""

    calls: list[ModuleCall] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    lives: dict[int, tuple[int, int]] = field(default_factory=dict)
    end: int = 0
    flops: int = 0
    parameter_bytes: int = 0

    def first(self, name: str) -> ModuleCall | None:
        """Return the first call of a module, or None."""
        return next((call for call in self.calls if call.name == name), None)

    def around(self, call: int | None) -> Iterator[ModuleCall]:
        """Yield a call and its enclosing calls, from the inside."""
        while call is not None:
            yield self.calls[call]
            call = self.calls[call].parent


class StageTracer(FunctionTrace):
    """Tracer of one run; `call` wraps each module's forward."""

    def __init__(self, names: dict[int, str], sizes: dict[str, int], parameters: set[str]) -> None:
        super().__init__()
        self.trace = StageTrace()
        self._names, self._sizes, self._parameters = names, sizes, parameters
        self._tainted: set[int] = set()
        self._open: list[ModuleCall] = []
        self._made_by: dict[int, ModuleCall] = {}
        self._used: set[str] = set()
        self._flops = FlopCounterMode(display=False)
        self._repeated_flops = 0  # of calls that were not run
        self._with_gradients = torch.is_grad_enabled()

    @property
    def total_flops(self) -> int:
        """Number of FLOPs until now."""
        return self._flops.get_total_flops() + self._repeated_flops

    def call(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Record a call of a module and run it."""
        trace = self.trace
        trace.end += 1
        parent = self._open[-1].number if self._open else None
        call = ModuleCall(len(trace.calls), name, parent, trace.end)
        call.flops, call.parameter_bytes = self.total_flops, trace.parameter_bytes
        trace.calls.append(call)
        leaves = tree_leaves((args, kwargs))
        places: dict[int, list[int]] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) in self._tainted:
                places.setdefault(id(leaf), []).append(place)
        call.slots = tuple(
            Slot(tuple(at), leaves[at[0]].requires_grad, Blank.of(leaves[at[0]])) for at in places.values()
        )
        call.keeps_graph = torch.is_grad_enabled() == self._with_gradients
        call.argument_ids = frozenset(id(leaf) for leaf in leaves)
        for leaf in leaves:
            self._live(leaf)
        self._open.append(call)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._open.pop()
        trace.end += 1
        call.exit = trace.end
        call.outline = Outline.of(output, leaves)
        if self._open:
            self._open[-1].uses_parameters |= call.uses_parameters
        returned = tensors_in(output)
        new = [tensor for tensor in returned if id(tensor) not in call.argument_ids]
        call.tainted = call.uses_parameters or any(id(tensor) in self._tainted for tensor in returned)
        if call.tainted:
            for leaf in new:
                self._taint(leaf)
        for leaf in new:
            self._made_by[id(leaf)] = call
        return output

    def _taint(self, value: Tensor) -> None:
        if id(value) not in self._tainted:
            self._tainted.add(id(value))
            self._alive.append(value)
            self.trace.lives[id(value)] = self.trace.end, self.trace.end

    def _live(self, value: Any) -> None:
        if id(value) in self._tainted:
            self.trace.lives[id(value)] = self.trace.lives[id(value)][0], self.trace.end

    def seen(self, call: FunctionCall) -> None:
        """Record which parameters are used, and which values depend on an earlier stage."""
        written = written_by(call)
        if not call.results and not written and call.func not in _PLACES:
            return
        self.trace.end += 1
        for tensor in call.given:
            name = self._names.get(id(tensor))
            if name is not None:
                number = self._open[-1].number if self._open else None
                self.trace.uses.append(Use(name, self.trace.end, number, any(tensor is w for w in written)))
                if name in self._parameters and self._open:
                    self._open[-1].uses_parameters = True
                if name not in self._used:
                    self._used.add(name)
                    self.trace.parameter_bytes += self._sizes[name]
            self._live(tensor)
        if any(id(tensor) in self._tainted for tensor in call.given):
            for value in (value for tensor in written for value in (tensor, tensor._base)):
                if value is None or id(value) in self._tainted or id(value) in self._names:
                    continue
                for around in self._open:
                    if id(value) in around.argument_ids:
                        around.writes_into = f"a tensor of shape {list(value.shape)} among its arguments"
                self._taint(value)
            for tensor in call.results:
                self._taint(tensor)
        for tensor in written:
            if id(tensor) in self._made_by:
                self._made_by[id(tensor)].dense = True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context manager. The model's operations within it are added to `trace`."""
        with sdpa_kernel(SDPBackend.MATH), self._flops, self:  # flash attention on a CPU counts no FLOPs
            yield
        self.trace.end += 1
        self.trace.flops = self.total_flops


def written_by(call: FunctionCall) -> list[Tensor]:
    """Return the tensors that a torch function writes into."""
    name, args, kwargs = getattr(call.func, "__name__", ""), call.args, call.kwargs
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")
    augmented = name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    targets = [args[0]] if (in_place or augmented or kwargs.get("inplace")) and args else []
    return tensors_in((targets, kwargs.get("out")))
