"""Trace for stages that runs one of several equal calls of blocks and copies its records for the others.

Calls are equal if the states of block and arguments are equal, and the same arguments depend on earlier stages. A call
runs nevertheless if something else could make a difference: if it takes tensors other than its own and its arguments,
writes into these, changes any state, or uses its index among its siblings.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shoal.numerics.operators import storage_key, tensors_in
from shoal.parallel.model.module_state import PlaceNumber, UnknownStateError, place_numbers, state_of
from shoal.parallel.model.structure import repeated_blocks
from shoal.parallel.model.trial import FunctionCall
from shoal.parallel.pipeline.stage_trace import Forward, ModuleCall, StageTracer, Use, written_by

# Packages with blocks that are known to keep no state outside their arguments and attributes. The trace does not
# examine globals, for example. Blocks of all other packages run.
_PACKAGES = frozenset(("torch", "transformers"))


class EscapeError(Exception):
    """A value that a block did not return was used elsewhere, so the values of equal blocks are not known."""


@dataclass
class _Running:
    """Call in progress: the ids of tensors that it may take and has created; `alone` if it took no others."""

    own: set[int]
    created: set[int] = field(default_factory=set)
    alone: bool = True


@dataclass(frozen=True)
class _Made:
    """Tensor of an output. `whole`: id, shape, stride, dtype and device of the tensor or, for a `view`, of its base."""

    id: int
    needs_grad: bool
    whole: tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]
    view: tuple[torch.Size, tuple[int, ...], int] | None

    def again(self) -> dict[int, Tensor]:
        """Return new tensors like this one and its base, by the old tensors' ids."""
        key, shape, stride, dtype, device = self.whole
        with torch._C.DisableTorchFunction():
            root = torch.empty((), device=device).requires_grad_(self.needs_grad)
            whole: Tensor = _Whole.apply(root, shape, stride, dtype)  # type: ignore[no-untyped-call]
            return {key: whole, self.id: whole if self.view is None else whole.as_strided(*self.view)}


class _Whole(torch.autograd.Function):
    """Autograd function that creates a tensor that is no leaf, like any result of a block."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=root.device)


_Output = _Made | int | tuple[Any]  # a new tensor, the argument of that index, or another object


@dataclass(frozen=True)
class _Amounts:
    """Totals before a point of the trace: time, calls, FLOPs and bytes of parameters."""

    end: int
    calls: int
    flops: int
    parameter_bytes: int


@dataclass(frozen=True)
class _Record:
    """All that a call of a block added to the trace, with the trace's own ids and times."""

    block: str
    arguments: tuple[int, ...]  # ids of tensors
    before: _Amounts
    after: _Amounts
    calls: list[ModuleCall]
    uses: list[Use]
    lives: dict[int, tuple[int, int]]
    tainted: set[int]
    outputs: list[_Output]
    spec: TreeSpec


class RepeatTracer(StageTracer):
    """Tracer of a model with equal blocks. `unwrapped`: the modules' own forwards, by the ids of their wrappers.

    Raises: EscapeError at the end of the run.
    """

    def __init__(self, model: nn.Module, unwrapped: Mapping[int, Any], *names_and_sizes: Any) -> None:
        super().__init__(*names_and_sizes)
        whole = (block for block in repeated_blocks(model) if block.children is None)
        self._blocks = {
            block.name: block.module
            for block in whole
            if all(type(module).__module__.partition(".")[0] in _PACKAGES for module in block.module.modules())
        }
        self._unwrapped = unwrapped
        self._all_names = self._names | {id(module): name for name, module in model.named_modules()}
        self._records: dict[Hashable, _Record | None] = {}
        self._running: _Running | None = None
        self._inner: set[int] = set()  # tensors that blocks made and did not return
        self._escaped = False
        self._places: list[PlaceNumber] = []
        self._usual: Collection[str] = ()  # attributes of every tensor in the run
        self._fresh = itertools.count(-1, -1)  # ids for tensors that do not exist

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return the context of the traced run."""
        homes = [place for block in self._blocks.values() for place in place_numbers(block)]
        self._places = [PlaceNumber(value) for _, _, value in homes]
        for (home, key, _), number in zip(homes, self._places, strict=True):
            home[key] = number
        try:
            with super().running():
                with torch._C.DisableTorchFunction():
                    self._usual = vars(torch.empty(())).keys()
                yield
        finally:
            for home, key, value in homes:
                home[key] = value
        if self._escaped:
            raise EscapeError

    def seen(self, call: FunctionCall) -> None:
        """Record the tensors that a block takes."""
        for tensor in call.given:
            self._take(tensor)
        if self._running is not None:
            self._running.created |= {id(tensor) for tensor in call.results} - self._running.own
            known = self._running.created | self._names.keys()
            self._running.alone &= all(id(tensor) in known for tensor in written_by(call))
        super().seen(call)

    def _take(self, tensor: Tensor) -> None:
        self._escaped |= id(tensor) in self._inner
        running = self._running
        if running is not None:
            running.alone &= id(tensor) in running.own or id(tensor) in running.created

    def call(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Record a call of a module, and run it unless an equal call is known."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = tensors_in(leaves)
        for tensor in tensors:
            self._take(tensor)
        state = None
        if name in self._blocks and self._running is None:
            others = [repr(spec), *(leaf for leaf in leaves if not isinstance(leaf, Tensor))]
            state = functools.partial(self._state, name, tensors, others)
        key = None if state is None else state()
        if state is None or key is None:
            return super().call(name, forward, args, kwargs)
        key = key, frozenset(_renamed(used, name, "") for used in self._used if used.startswith(f"{name}."))
        known = self._records.get(key)
        if known is not None:
            return self._repeated(known, name, tensors)
        before = self._amounts(), len(self.trace.uses), set(self.trace.lives)
        own = {key for key, full in self._names.items() if full.startswith(f"{name}.")}
        self._running = running = _Running(own | set(map(id, tensors)))
        for number in self._places:
            number.is_read = False
        try:
            output = super().call(name, forward, args, kwargs)
        finally:
            self._running = None
        running.alone &= not any(number.is_read for number in self._places)
        if running.alone and state() == key[0]:
            self._records[key] = self._record(name, tensors, output, before, running)
        return output

    def _amounts(self) -> _Amounts:
        return _Amounts(self.trace.end, len(self.trace.calls), self.total_flops, self.trace.parameter_bytes)

    # ------------------------------------------------------------------------------------------------------- equality

    def _state(self, name: str, tensors: list[Tensor], others: list[Any]) -> Hashable | None:
        """Return a state that is equal for calls that do the same; None if that cannot be determined."""
        if any(id(tensor) in self._names for tensor in tensors):
            return None
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        seen: dict[int, int] = {}
        arguments: list[Hashable] = []
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, FakeTensor):  # it has values
                arguments.append((id(tensor), tensor._version))
                continue
            with torch._C.DisableTorchFunction():
                same = seen.setdefault(id(tensor), place), seen.setdefault(storage_key(tensor), place)
                layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device
                kind = tensor.requires_grad, tensor.is_leaf, tensor._is_view()
            arguments.append((same, layout, kind, id(tensor) in self._tainted))
        more = [{k: v for k, v in vars(tensor).items() if k not in self._usual} for tensor in tensors]

        def own_name(value: Any) -> str | None:
            full = self._all_names.get(id(value))
            return None if full is None else _renamed(full, name, "")

        try:
            state = state_of([self._blocks[name], others, more], own_name, self._unwrapped)
        except UnknownStateError:
            return None
        return modes, stacks, tuple(arguments), state

    # -------------------------------------------------------------------------------------------------------- records

    def _record(
        self, name: str, tensors: list[Tensor], output: Any, before: tuple[_Amounts, int, set[int]], running: _Running
    ) -> _Record | None:
        """Return all that a call has added to the trace; None if its output cannot be reproduced."""
        trace, arguments = self.trace, tuple(map(id, tensors))
        amounts, uses, born = before
        leaves, spec = tree_flatten(output)
        places, storages = {id(t): place for place, t in enumerate(tensors)}, {storage_key(t) for t in tensors}
        outputs: list[_Output] = []
        for leaf in leaves:
            if id(leaf) in places:
                outputs.append(places[id(leaf)])
            elif not isinstance(leaf, Tensor):
                if type(leaf) not in (int, float, bool, str, type(None)):
                    return None
                outputs.append((leaf,))
            else:
                description = _described(leaf, running)
                if description is None or storage_key(leaf) in storages:
                    return None
                storages.add(storage_key(leaf))
                outputs.append(description)
        self._inner |= running.created - {id(leaf) for leaf in leaves}
        return _Record(
            name,
            arguments,
            amounts,
            self._amounts(),
            [replace(call) for call in trace.calls[amounts.calls :]],
            trace.uses[uses:],
            {key: life for key, life in trace.lives.items() if key not in born or key in arguments},
            self._tainted & running.created,
            outputs,
            spec,
        )

    # -------------------------------------------------------------------------------------------------------- repeats

    def _repeated(self, record: _Record, name: str, arguments: list[Tensor]) -> Any:
        """Return an equal call's output, and record the call as if it had run."""
        new: dict[int, Tensor] = {}
        for output in record.outputs:
            new |= output.again() if isinstance(output, _Made) else {}
        ids = dict(zip(record.arguments, map(id, arguments), strict=True)) | {old: id(t) for old, t in new.items()}
        self._alive += new.values()
        self._tainted |= {ids[old] for old in record.tainted & new.keys()}
        trace, now, before, after = self.trace, self._amounts(), record.before, record.after
        later, further = now.end - before.end, now.calls - before.calls
        for key, (birth, last) in record.lives.items():
            copied = ids[key] if key in ids else ids.setdefault(key, next(self._fresh))
            trace.lives[copied] = trace.lives[copied][0] if key in record.arguments else birth + later, last + later
        parent = self._open[-1] if self._open else None
        outside = parent.number if parent is not None else None
        for call in record.calls:
            around = call.parent if call.number > before.calls else None
            trace.calls.append(
                replace(
                    call,
                    number=call.number + further,
                    name=_renamed(call.name, record.block, name),
                    parent=around + further if around is not None else outside,
                    enter=call.enter + later,
                    exit=call.exit + later,
                    argument_ids=frozenset(ids.get(key, key) for key in call.argument_ids),
                    flops=call.flops + now.flops - before.flops,
                    parameter_bytes=call.parameter_bytes + now.parameter_bytes - before.parameter_bytes,
                )
            )
        first = trace.calls[now.calls]  # the call of this block
        for use in record.uses:
            full, around = _renamed(use.name, record.block, name), use.call
            trace.uses.append(Use(full, use.time + later, None if around is None else around + further, use.writes))
            self._used.add(full)
        if parent is not None:
            parent.uses_parameters |= first.uses_parameters
        trace.end = after.end + later
        trace.parameter_bytes += after.parameter_bytes - before.parameter_bytes
        self._repeated_flops += after.flops - before.flops
        leaves: list[Any] = []
        for output in record.outputs:
            if isinstance(output, _Made):
                leaves.append(new[output.id])
                self._made_by[id(new[output.id])] = first
            else:
                leaves.append(arguments[output] if isinstance(output, int) else output[0])
        return tree_unflatten(leaves, record.spec)


def _renamed(name: str, block: str, other: str) -> str:
    """Return the name with the block's prefix replaced by the other block's."""
    return other + name.removeprefix(block) if name == block or name.startswith(f"{block}.") else name


def _described(leaf: Tensor, running: _Running) -> _Made | None:
    """Return the description of a tensor that a call has made; None if its kind cannot be reproduced."""
    with torch._C.DisableTorchFunction():
        whole = leaf._base if leaf._is_view() else leaf
        if not isinstance(leaf, FakeTensor) or not isinstance(whole, FakeTensor) or not leaf.is_floating_point():
            return None
        mine = {id(leaf), id(whole)} <= running.created and whole.storage_offset() == 0
        alike = leaf.dtype == whole.dtype and leaf.requires_grad == whole.requires_grad
        if not mine or not alike or (leaf.requires_grad and leaf.is_leaf):
            return None
        view = (leaf.shape, leaf.stride(), int(leaf.storage_offset())) if whole is not leaf else None
        like = id(whole), whole.shape, whole.stride(), whole.dtype, whole.fake_device
        return _Made(id(leaf), leaf.requires_grad, like, view)
