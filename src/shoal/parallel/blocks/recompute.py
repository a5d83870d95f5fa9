"""Activation checkpointing: activations within a model's blocks are recomputed in the backward.

Chen et al., arXiv 1604.06174. The graph, and with it the order of every sum of gradients, does not change. With
deterministic kernels, as in exact mode, no bit changes. See docs/decisions/0013-recompute-and-compile.md.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import PlanError, SettingWarning
from shoal.numerics.generators import python_generators, python_generators_kept
from shoal.numerics.isolation import ReentrantContext
from shoal.numerics.operators import OperatorMode, replace_leaves, roles, storage_key, tensors_in
from shoal.parallel.model.structure import Block, parts, repeated_blocks

# Arguments of transformers' layers to which they append keys and values, twice if they are recomputed.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def recompute(model: nn.Module, kind: str) -> list[str]:
    """Make the model's blocks recompute activations in the backward: all (full) or the cheap ones (selective).

    The function changes `forward` of module instances, and no parameter's name. Returns: the names of the blocks.
    """
    if kind == "none":
        return []
    candidates = repeated_blocks(model) or parts(model)
    blocks = []
    for block in candidates:  # without those that transformers or torch checkpoints already, around or in them
        around = [m for name, m in model.named_modules() if not name or f"{block.name}.".startswith(f"{name}.")]
        if not any(
            getattr(m, "gradient_checkpointing", False) is True or type(m).__name__ == "CheckpointWrapper"
            for m in (*around, *block.module.modules())
        ):
            blocks.append(block)
    if not blocks:
        why = (
            "its blocks compute again by themselves (gradient checkpointing)"
            if candidates
            else "it repeats no block, and has no parts of more than one layer"
        )
        message = f"memory.recompute = {kind!r} has no effect on {type(model).__name__}: {why}"
        warnings.warn(message, SettingWarning, stacklevel=2)
    for sequence in {id(b.module): b.module for b in blocks if b.children is not None}.values():
        own = [b for b in blocks if b.module is sequence]
        sequence.forward = _Segments(sequence, own, kind)
    for block in blocks:
        if block.children is None:
            forward = block.module.forward
            block.module.forward = Recomputed(block.name, [block.module], forward, kind)
    return [block.name for block in blocks]


def recomputed(model: nn.Module) -> list[Recomputed]:
    """Return the forwards that `recompute` has installed in a model."""
    forwards: list[Recomputed] = []
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Recomputed):
            forwards.append(forward)
        elif isinstance(forward, _Segments):
            forwards += [step for step in forward.steps if isinstance(step, Recomputed)]
    return forwards


_Kept = tuple[dict[str, Tensor | None], str, Tensor]  # the dict that contains a buffer, its key, and its value


class Recomputed:
    """Forward of a block: `forward`, with activations recomputed in the backward.

    `modules`: their buffers may change in the forward. As an object, each copy of the model has its own.
    """

    def __init__(self, name: str, modules: list[nn.Module], forward: Callable[..., Any], kind: str) -> None:
        self.name, self.forward, self.kind = name, forward, kind
        self.modules = modules
        self._changing: set[tuple[int, str]] | None = None  # buffers: unknown until the first forward
        self._draws = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        for name in _CACHES:
            cache = kwargs.get(name)
            if cache is None:
                continue
            length = getattr(cache, "get_seq_length", lambda: 1)()
            if length:
                raise PlanError(
                    given=f"memory.recompute = {self.kind!r} with {name} of {int(length)} tokens for {self.name}",
                    conflict="the block adds to them, and would do so a second time where it is computed again",
                    remedy="write memory.recompute = 'none', or train without keys and values of earlier tokens",
                )
            kwargs = {**kwargs, name: None}
        if kwargs.get("use_cache"):
            kwargs = {**kwargs, "use_cache": False}
        inputs = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in inputs]
        generators = python_generators()
        # By module and key: the dict with the buffer, its current tensor, and the tensor's version.
        buffers = {
            (id(module), key): (module._buffers, value, value._version)
            for part in self.modules
            for module in part.modules()
            for key, value in module._buffers.items()
            if value is not None
        }
        # Copies of the buffers that the forward changes. A buffer that starts to change later is discovered after that
        # forward, which the engine then repeats.
        start = [
            (home, key[1], value.detach().clone())
            for key, (home, value, _) in buffers.items()
            if self._changing is None or key in self._changing
        ]
        moment = _Moment(start, (random.getstate(), np.random.get_state()) if self._draws else None)
        saved = SavedResults() if self.kind == "selective" else None

        def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
            return saved or contextlib.nullcontext(), ReentrantContext(lambda: moment.again(saved))

        output = checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if [tensor._version for tensor in inputs] != versions:
            raise PlanError(
                given=f"memory.recompute = {self.kind!r} with {self.name}, which changes its input in place",
                conflict="what it is computed from is gone when it is computed again",
                remedy="begin the block with an operation that is not in place, or write memory.recompute = 'none'",
            )
        if saved is not None:
            saved.forget(output)
        changed = {
            key
            for key, (home, value, version) in buffers.items()
            if home.get(key[1]) is not value or value._version != version
        }
        first = self._changing is None
        begun = changed - (changed if self._changing is None else self._changing)
        self._changing = changed | (self._changing or set())
        moved = python_generators() != generators
        self._draws = moved if first else self._draws or moved
        for begun_key in begun:  # a recomputation must not change these either
            home, key = buffers[begun_key][0], begun_key[1]
            current = home.get(key)
            if current is not None:
                moment.buffers.append((home, key, current.detach().clone()))
        if not self._draws:
            moment.generators = None
        return output


class _Segments:
    """Forward of a Sequential in which some children are recomputed together."""

    def __init__(self, sequence: nn.Module, blocks: list[Block], kind: str) -> None:
        self.steps: list[Callable[[Any], Any]] = []
        at = 0
        for block in blocks:
            assert block.children is not None
            start, stop = block.children
            self.steps += [partial(_run, sequence, i, i + 1) for i in range(at, start)]
            modules = list(sequence.children())[start:stop]
            self.steps.append(Recomputed(block.name, modules, partial(_run, sequence, start, stop), kind))
            at = stop
        self.steps += [partial(_run, sequence, at, None)]

    def __call__(self, input: Any) -> Any:
        for step in self.steps:
            input = step(input)
        return input


def _run(sequence: nn.Module, start: int, stop: int | None, input: Any) -> Any:
    """Call some children of a Sequential one after the other."""
    for child in list(sequence.children())[start:stop]:
        input = child(input)
    return input


class _Moment:
    """State before a forward, without its arguments: buffers that it changes, and Python's and numpy's generators."""

    def __init__(self, buffers: list[_Kept], generators: Any) -> None:
        self.buffers, self.generators = buffers, generators

    @contextlib.contextmanager
    def again(self, saved: SavedResults | None) -> Iterator[None]:
        """Return the context of one recomputation: it restores the stored state, and at its end the current state."""
        now = [home[key] for home, key, _ in self.buffers]
        with contextlib.nullcontext() if self.generators is None else python_generators_kept():
            try:
                for home, key, start in self.buffers:
                    home[key] = start.clone()
                if self.generators is not None:
                    random.setstate(self.generators[0])
                    np.random.set_state(self.generators[1])
                with saved.again() if saved is not None else contextlib.nullcontext():
                    yield
            finally:
                for (home, key, _), value in zip(self.buffers, now, strict=True):
                    home[key] = value


_aten = torch.ops.aten
# Operations that take time to compute. All others read and write memory, as storing their results would.
KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_KEPT = frozenset(getattr(_aten, name).default for name in KEPT_NAMES if hasattr(_aten, name))


@dataclass
class _Result:
    """Result of one call; None if it has to be recomputed."""

    value: Any


class SavedResults(OperatorMode):
    """Context around a block's forward that saves results; `again` is the context around its recomputation.

    torch's create_selective_checkpoint_contexts does the same, but raises if a saved result is changed in place, as by
    a ReLU(inplace=True) after a convolution. It also draws other random numbers if it skips an operation that draws.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, list[_Result]] = defaultdict(list)
        self._by_storage: dict[int, _Result] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if self._by_storage and schema is not None and schema.is_mutable:
            for tensor in roles(func, args, kwargs)[0]:
                result = self._by_storage.pop(storage_key(tensor), None)
                if result is not None:
                    result.value = replace_leaves(result.value, Tensor, Tensor.clone)
        out = func(*args, **kwargs)
        if func in _KEPT:
            # Detached: autograd ties the tensors themselves to the graph that created them.
            result = _Result(None if _draws(func, args, kwargs) else replace_leaves(out, Tensor, Tensor.detach))
            self.results[func].append(result)
            for tensor in tensors_in(result.value):
                self._by_storage[storage_key(tensor)] = result
        return out

    def forget(self, output: Any) -> None:
        """Drop the results that the block returns: its caller may change them, and the block no longer needs them."""
        for tensor in tensors_in(output):
            result = self._by_storage.pop(storage_key(tensor), None)
            if result is not None:
                result.value = None
        self._by_storage = {}

    def again(self) -> OperatorMode:
        """Return the recomputation's mode. Each result serves once; a second recomputation computes everything."""
        return _RecallResults(self.results)


class _RecallResults(OperatorMode):
    def __init__(self, results: dict[Any, list[_Result]]) -> None:
        super().__init__()
        self._results = results
        self._counts: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KEPT:
            number = self._counts[func]
            self._counts[func] += 1
            results = self._results.get(func, [])
            result = results[number] if number < len(results) else _Result(None)
            if result.value is not None:
                value, result.value = result.value, None
                return value
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the call advances the generator, which the recomputation has to do as well."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool((args[number] if number < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0)
    return False
