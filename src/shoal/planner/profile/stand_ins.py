"""Memoized blocks: only the first of equal blocks is traced, and the others reuse its outputs.

A model of 80 equal layers therefore traces as fast as one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.numerics.operators import tensors_in
from shoal.parallel.model.module_state import PLACES
from shoal.parallel.model.structure import Block
from shoal.planner.profile.events import SavedStorage
from shoal.planner.profile.recording import OperatorRecorder

# Parameters, buffers and submodules, which are compared by name and shape instead.
_PARTS = frozenset(("_parameters", "_buffers", "_modules"))
_SIMPLE = (int, float, bool, str, type(None), torch.dtype)


def structure(module: nn.Module) -> str:
    """Return a text that is equal for modules with the same classes, shapes and plain attributes."""
    inside = [
        (name, type(m), [(k, _shown(v)) for k, v in vars(m).items() if k not in _PARTS and not PLACES.search(k)])
        for name, m in module.named_modules()
    ]
    tensors = [
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    return f"{inside}{tensors}"


def _shown(value: Any) -> Any:
    """Return the comparable part of an attribute."""
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, tuple | list):
        return [_shown(item) for item in value]
    if isinstance(value, Mapping):
        return [(str(key), _shown(item)) for key, item in value.items()]
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return getattr(value, "__qualname__", type(value).__name__)


@dataclass
class _Known:
    """Traced call of a block; `made` describes each new output tensor or has the index of a returned argument."""

    region: int
    made: list[tuple[Any, ...] | int]
    tree: Any
    leaves: list[Any]
    kept_inputs: list[bool]
    kept_outputs: list[bool]
    of_buffers: list[SavedStorage]  # buffers of the block that autograd saves; each equal block has its own


class StandIns:
    """Replaces the forward of a model's equal blocks; `recorder` records the running trace."""

    def __init__(self, blocks: list[Block]) -> None:
        self.recorder: OperatorRecorder | None = None
        self._known: dict[Any, _Known | None] = {}
        for block in blocks:
            if block.children is None:
                block.module.forward = _Forward(self, block.name, block.module, block.module.forward)

    def begin(self, recorder: OperatorRecorder) -> None:
        """Start a new trace and forget the calls of the previous one."""
        self.recorder = recorder
        self._known.clear()

    def call(self, block: _Forward, args: Any, kwargs: Any) -> Any:
        """Return the block's output, computed or, after a traced call with equal arguments, as new empty tensors."""
        recorder = self.recorder
        if recorder is None or recorder.in_backward or not torch.is_grad_enabled():
            if recorder is not None and block.region is not None:
                with recorder.within(block.region):
                    return block.original(*args, **kwargs)
            return block.original(*args, **kwargs)
        block.region = recorder.enter(block.name)
        try:
            with recorder.paused():
                key = (block.structure, _signature(recorder, args, kwargs))
            known = self._known.get(key)
            if known is not None:
                return self._stand_in(known, block, args, kwargs)
            found = block.original(*args, **kwargs)
            with recorder.paused():
                self._known[key] = _known(recorder, block, tensors_in((args, kwargs)), found)
            return found
        finally:
            recorder.leave()

    def _stand_in(self, known: _Known, block: _Forward, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        assert recorder is not None
        assert block.region is not None
        recorder.trace.regions[block.region].like = known.region
        for name, parameter in block.module.named_parameters():
            full = recorder.trace.parameters.get(parameter.untyped_storage()._cdata, f"{block.name}.{name}")
            recorder.trace.used.setdefault(full, block.region)
        recorder.trace.saved += known.of_buffers
        inputs = tensors_in((args, kwargs))
        dummy = next((p for p in block.module.parameters() if p.requires_grad), None)
        new = [spec for spec in known.made if not isinstance(spec, int)]
        with recorder.paused():
            made = list(_StandIn.apply(recorder, block.region, new, dummy, *inputs)) if new else []  # type: ignore[no-untyped-call]
        recorder.note("stand_in", inputs, made, block.region)
        fresh = iter(made)
        outputs = [inputs[spec] if isinstance(spec, int) else next(fresh) for spec in known.made]
        recorder.kept |= {
            tensor.untyped_storage()._cdata
            for tensors, flags in ((inputs, known.kept_inputs), (outputs, known.kept_outputs))
            for tensor, flag in zip(tensors, flags, strict=True)
            if flag
        }
        given = iter(outputs)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in known.leaves]
        return tree_unflatten(leaves, known.tree)


class _Forward:
    """Replacement of a block's `forward`."""

    def __init__(self, owner: StandIns, name: str, module: nn.Module, original: Callable[..., Any]) -> None:
        self._owner, self.name, self.module, self.original = owner, name, module, original
        self.structure = structure(module)
        self.region: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.call(self, args, kwargs)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: OperatorRecorder, region: int, *given: Any) -> tuple[Tensor, ...]:
        specs, _, *inputs = given
        ctx.recorder, ctx.region = recorder, region
        ctx.like = [(tuple(t.shape), t.dtype) for t in inputs]
        found = tuple(torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype, _ in specs)
        ctx.mark_non_differentiable(*(t for t, spec in zip(found, specs, strict=True) if not spec[3]))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.recorder.paused():
            found = [
                torch.empty(shape, dtype=dtype) if needed else None
                for (shape, dtype), needed in zip(ctx.like, ctx.needs_input_grad[4:], strict=True)
            ]
        given = [g for g in gradients if g is not None]
        ctx.recorder.note("stand_in", given, [g for g in found if g is not None], ctx.region)
        return None, None, None, None, *found


def _signature(recorder: OperatorRecorder, args: Any, kwargs: Any) -> str:
    """Return a text that is equal for calls with equal arguments.

    It includes whether autograd has saved an argument already, because that decides which block accounts for it.
    """
    leaves, tree = tree_flatten((args, kwargs))
    places: dict[int, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            key = leaf.untyped_storage()._cdata
            place = places.setdefault(key, len(places))
            kept = key in recorder.kept or key in recorder.trace.constants
            described.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, place, kept))
        else:
            described.append(leaf if isinstance(leaf, _SIMPLE) else type(leaf))
    return f"{described}{tree}"


def _known(recorder: OperatorRecorder, block: _Forward, inputs: list[Tensor], found: Any) -> _Known | None:
    """Return the record of a traced call, or None if its outputs share memory with the inputs or with each other."""
    leaves, tree = tree_flatten(found)
    outputs = tensors_in(found)
    places = {id(tensor): i for i, tensor in enumerate(inputs)}
    keys = [t.untyped_storage()._cdata for t in outputs if id(t) not in places]
    if len(set(keys)) < len(keys) or set(keys) & {t.untyped_storage()._cdata for t in inputs}:
        return None
    if any(not isinstance(leaf, Tensor | int | float | str | bool | None) for leaf in leaves):
        return None

    def kept(tensors: list[Tensor]) -> list[bool]:
        return [t.untyped_storage()._cdata in recorder.kept for t in tensors]

    made = [places.get(id(t), (tuple(t.shape), t.stride(), t.dtype, t.requires_grad)) for t in outputs]
    region = block.region
    assert region is not None
    own = {b.untyped_storage()._cdata for b in block.module.buffers()}
    of_buffers = [saved for saved in recorder.trace.saved if saved.region == region and saved.key in own]
    return _Known(region, made, tree, leaves, kept(inputs), kept(outputs), of_buffers)
