"""Activation checkpointing: activations within a model's blocks are recomputed in the backward.

Chen et al., arXiv 1604.06174. The graph, and so the order of every sum of gradients, is that without it: where kernels
are deterministic, as in exact mode, no bit changes. See docs/decisions/0013-recompute-and-compile.md.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import PlanError, SettingWarning
from shoal.numerics.grain_randomness import python_generators
from shoal.numerics.isolation import ReentrantContext, python_generators_kept
from shoal.numerics.operators import tensors_in
from shoal.parallel.blocks.selective import SavedResults
from shoal.parallel.model.repeated_blocks import Block, parts, repeated_blocks

# What layers of transformers call the keys and values that they add to: twice, where they are computed again.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def recompute(model: nn.Module, kind: str) -> list[str]:
    """Makes the model's blocks compute again in the backward: all of it (full) or what is cheap (selective).

    Changes `forward` of module instances, and no name of a parameter. Gives the names of the blocks.
    """
    if kind == "none":
        return []
    found = repeated_blocks(model) or parts(model)
    blocks = [block for block in found if not _recomputes_itself(model, block)]
    if not blocks:
        why = (
            "its blocks compute again by themselves (gradient checkpointing)"
            if found
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
    """The forwards that `recompute` has put into a model."""
    found: list[Recomputed] = []
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Recomputed):
            found.append(forward)
        elif isinstance(forward, _Segments):
            found += [step for step in forward.steps if isinstance(step, Recomputed)]
    return found


def _recomputes_itself(model: nn.Module, block: Block) -> bool:
    """Whether the block, something around it, or something in it is checkpointed: transformers' way and torch's."""
    around = [m for name, m in model.named_modules() if not name or f"{block.name}.".startswith(f"{name}.")]
    return any(
        getattr(m, "gradient_checkpointing", False) is True or type(m).__name__ == "CheckpointWrapper"
        for m in (*around, *block.module.modules())
    )


class Recomputed:
    """Forward of a block: `forward`, whose activations are recomputed in the backward.

    `modules` are what it may change buffers of. A method of an object, so that a copy of the model has its own.
    """

    def __init__(self, name: str, modules: list[nn.Module], forward: Callable[..., Any], kind: str) -> None:
        self.name, self.forward, self.kind = name, forward, kind
        self._modules = modules
        self._changing: set[tuple[int, str]] | None = None  # buffers: unknown until the first forward
        self._draws = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        kwargs = self._without_cache(kwargs)
        inputs = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in inputs]
        buffers, generators = self._buffers(), python_generators()
        moment = _Moment(self._start(buffers), (random.getstate(), np.random.get_state()) if self._draws else None)
        kept = SavedResults() if self.kind == "selective" else None

        def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
            return kept or contextlib.nullcontext(), ReentrantContext(lambda: _again(moment, kept))

        output = checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if [tensor._version for tensor in inputs] != versions:
            raise self._changes_its_input()
        if kept is not None:
            kept.forget(output)
        self._learn(buffers, generators)
        if not self._draws:
            moment.generators = None
        return output

    def _buffers(self) -> dict[tuple[int, str], tuple[dict[str, Tensor | None], Tensor, int]]:
        """By module and key: where the buffer hangs, what hangs there now, and its version."""
        return {
            (id(module), key): (module._buffers, value, value._version)
            for part in self._modules
            for module in part.modules()
            for key, value in module._buffers.items()
            if value is not None
        }

    def _start(self, buffers: dict[tuple[int, str], Any]) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
        """Copies of the buffers that the forward changes, as they are before it.

        One that begins to change later is found out after that forward, which the engine then computes again.
        """
        return [
            (home, key[1], value.detach().clone())
            for key, (home, value, _) in buffers.items()
            if self._changing is None or key in self._changing
        ]

    def _learn(self, buffers: dict[tuple[int, str], Any], generators: tuple[Any, ...]) -> None:
        changed = {
            key
            for key, (home, value, version) in buffers.items()
            if home.get(key[1]) is not value or value._version != version
        }
        first = self._changing is None
        self._changing = changed | (self._changing or set())
        moved = python_generators() != generators
        self._draws = moved if first else self._draws or moved

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
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
        return {**kwargs, "use_cache": False} if kwargs.get("use_cache") else kwargs

    def _changes_its_input(self) -> PlanError:
        return PlanError(
            given=f"memory.recompute = {self.kind!r} with {self.name}, which changes its input in place",
            conflict="what it is computed from is gone when it is computed again",
            remedy="begin the block with an operation that is not in place, or write memory.recompute = 'none'",
        )


class _Segments:
    """The forward of a Sequential of which some children are computed again together."""

    def __init__(self, sequence: nn.Module, blocks: list[Block], kind: str) -> None:
        self._sequence = sequence
        self.steps: list[Callable[[Any], Any]] = []
        at = 0
        for block in blocks:
            assert block.children is not None
            start, stop = block.children
            self.steps += [_SequentialRun(sequence, i, i + 1) for i in range(at, start)]
            modules = list(sequence.children())[start:stop]
            self.steps.append(Recomputed(block.name, modules, _SequentialRun(sequence, start, stop), kind))
            at = stop
        self.steps += [_SequentialRun(sequence, at, len(list(sequence.children())))]

    def __call__(self, input: Any) -> Any:
        for step in self.steps:
            input = step(input)
        return input


class _SequentialRun:
    """Calls some children of a Sequential one after the other."""

    def __init__(self, sequence: nn.Module, start: int, stop: int) -> None:
        self._sequence, self._start, self._stop = sequence, start, stop

    def __call__(self, input: Any) -> Any:
        for child in list(self._sequence.children())[self._start : self._stop]:
            input = child(input)
        return input


class _Moment:
    """What a forward started from besides its arguments: buffers that it changes, Python's and numpy's generators."""

    def __init__(self, buffers: list[tuple[dict[str, Tensor | None], str, Tensor]], generators: Any) -> None:
        self._buffers, self.generators = buffers, generators

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context in which things are as they were then; afterwards they are as before it, whatever was done."""
        now = [home[key] for home, key, _ in self._buffers]
        with contextlib.nullcontext() if self.generators is None else python_generators_kept():
            try:
                for home, key, start in self._buffers:
                    home[key] = start.clone()
                if self.generators is not None:
                    random.setstate(self.generators[0])
                    np.random.set_state(self.generators[1])
                yield
            finally:
                for (home, key, _), value in zip(self._buffers, now, strict=True):
                    home[key] = value


@contextlib.contextmanager
def _again(moment: _Moment, kept: SavedResults | None) -> Iterator[None]:
    """The context of one recomputation."""
    with moment.again(), kept.again() if kept is not None else contextlib.nullcontext():
        yield
