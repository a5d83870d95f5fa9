"""Recorder of every operator of a forward and a backward, its region, and the storages that autograd saves."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from shoal.numerics.operators import tensors_in
from shoal.planner.profile.events import (
    ForwardRegion,
    OperatorEvent,
    OperatorTrace,
    SavedStorage,
    StorageRef,
)

# Operators that read a tensor and compute nothing: even the device of a fake tensor is one. A loop that logs a number
# for each sample has as many as samples.
_NO_OPERATORS = (torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default)
# Sequence numbers from here on are AccumulateGrad's, which belongs to no call.
_NO_CALL = 2**63


class OperatorRecorder(TorchDispatchMode):
    """Context that fills an `OperatorTrace`; `enter` and `leave` mark the start and end of a block's forward."""

    def __init__(self, trace: OperatorTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.in_backward = False
        self.kept: set[int] = set()
        self._stack: list[tuple[str, nn.Module]] = []
        self._paused = 0
        self._region = self._open(None)
        self._owners: dict[int, tuple[str, int]] = {}
        self._numbers: list[int] = []
        self._alive: dict[int, Any] = {}  # keeps storages alive, so that no key is reused
        self._names: dict[Any, str] = {}

    # ------------------------------------------------------------------------------------------------------ regions

    def _open(self, block: str | None) -> int:
        self.trace.regions.append(ForwardRegion(block))
        return len(self.trace.regions) - 1

    def enter(self, block: str) -> int:
        """Start the region of a block's forward and return its number."""
        self._region = self._open(block)
        return self._region

    def leave(self) -> None:
        """End a block's region and start a region outside of blocks."""
        self._region = self._open(None)

    @contextlib.contextmanager
    def within(self, region: int) -> Iterator[None]:
        """Attribute operators to an existing region, for a block that is recomputed."""
        before, self._region = self._region, region
        try:
            yield
        finally:
            self._region = before

    # -------------------------------------------------------------------------------------------------- attribution

    def before(self, name: str) -> Callable[..., None]:
        """Return a forward pre-hook for the module of this name."""

        def hook(module: nn.Module, args: Any) -> None:
            self._stack.append((name, module))

        return hook

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Remove the module from the stack of running modules, as its forward hook."""
        while self._stack and self._stack.pop()[1] is not module:
            pass  # entries of modules whose exception the model caught

    def _owner(self, node: int) -> tuple[str, int]:
        found = self._owners.get(node)
        if found is None and self._numbers:
            found = self._owners[self._numbers[max(0, bisect_right(self._numbers, node) - 1)]]
        return found or ("", 0)

    # ---------------------------------------------------------------------------------------------------- operators

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
        found = func(*args, **kwargs)
        if func not in _NO_OPERATORS and not self._paused:
            self._record(func, args, kwargs, found)
        return found

    def _record(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(found)
        if not inputs and not outputs:
            return
        current = torch._C._current_autograd_node() if self.in_backward else None
        if current is None or self._stack:
            node = _newest_node()
            module, region = (self._stack[-1][0] if self._stack else ""), self._region
            if node not in self._owners:
                self._owners[node] = module, region
                self._numbers.append(node)
        else:
            node = current._sequence_nr()
            module, region = self._owner(node) if node < _NO_CALL else ("", self._region)
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
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        writing = {id(t) for a in func._schema.arguments if _writes(a) for t in tensors_in(given.get(a.name))}
        self.trace.events.append(
            OperatorEvent(
                self._name(func),
                module,
                region,
                self.in_backward,
                node,
                {k: _plain(v, refs) for k, v in given.items()},
                [refs[id(t)] for t in inputs],
                [refs[id(t)] for t in outputs],
                frozenset(i for i, t in enumerate(inputs) if id(t) in writing),
            )
        )

    def _name(self, func: Any) -> str:
        if func not in self._names:
            self._names[func] = str(func._schema.name).replace("::", ".")
        return self._names[func]

    def note(self, name: str, inputs: list[Tensor], outputs: list[Tensor], region: int) -> None:
        """Record a call of a block that was not traced again as one event."""
        for tensor in (*inputs, *outputs):
            self._alive.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        refs = list(map(StorageRef.of, inputs)), list(map(StorageRef.of, outputs))
        self.trace.events.append(OperatorEvent(name, "", region, self.in_backward, -1, {}, *refs))

    # --------------------------------------------------------------------------------------------------------- kept

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a saved tensor's storage and return the tensor, as the pack hook of saved tensors."""
        with torch._C.DisableTorchFunction():
            if not self._paused and not self.in_backward and tensor.layout == torch.strided:
                self._keep(tensor.untyped_storage())
        return tensor

    def _keep(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.kept or key in self.trace.parameters or storage.nbytes() == 0:
            return
        self.kept.add(key)
        self._alive.setdefault(key, storage)
        node = _newest_node()
        self.trace.saved.append(SavedStorage(node, key, storage.nbytes(), self._region, len(self.trace.events)))


def _newest_node() -> int:
    """Return the sequence number of the newest autograd node."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _plain(value: Any, refs: dict[int, StorageRef]) -> Any:
    if isinstance(value, Tensor):
        return refs[id(value)]
    if isinstance(value, list | tuple):
        return tree_map(lambda leaf: refs[id(leaf)] if isinstance(leaf, Tensor) else leaf, list(value))
    return value
