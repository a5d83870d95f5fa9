"""Stubs for the output of a module that another stage computes: its shape and dtype, NaN, no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shoal.errors import JobError
from shoal.numerics.grain_randomness import DrawCounter
from shoal.parallel.model.value_free import ValueFree
from shoal.parallel.pipeline.stage_trace import Blank, Outline

Forward = Callable[..., Any]


class StageShapes:
    """Output shapes of modules, from one run without data for each kind of arguments."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._modules = dict(model.named_modules())
        self._device = device
        self._known: dict[Any, tuple[Outline, int]] = {}
        self.is_running = False

    def output(self, name: str, forward: Forward, args: Any, kwargs: Any, dense: bool) -> tuple[Any, int]:
        """Return (a stub for the output, number of random draws of a GrainScope that the call would have made)."""
        leaves, spec = tree_flatten((args, kwargs))
        key = self._key(name, leaves, spec)
        outline = self._known.get(key)
        if outline is None:
            outline = self._known[key] = self._run(name, forward, leaves, spec)
        return outline[0].filled(leaves, dense), outline[1]

    def _key(self, name: str, leaves: list[Any], spec: TreeSpec) -> Any:
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        seen: dict[int, int] = {}
        described: list[Any] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                described.append((Blank.of(leaf), seen.setdefault(id(leaf), place)))
            else:
                described.append(leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf))
        return name, self._modules[name].training, torch.is_grad_enabled(), autocast, str(spec), tuple(described)

    def _run(self, name: str, forward: Forward, leaves: list[Any], spec: TreeSpec) -> tuple[Outline, int]:
        module = self._modules[name]
        self.is_running = True
        try:
            value_free = ValueFree(self._device)
            with value_free.in_place(module, {}):
                given = value_free.fakes_of(leaves)
                args, kwargs = tree_unflatten(given, spec)
                with value_free.running(), DrawCounter() as counter:
                    output = forward(*args, **kwargs)
        except DataDependentOutputException as error:
            raise JobError(
                given=f"module {name}, whose forward reads a number off a tensor, in a pipeline",
                conflict="another stage computes the module: here the shapes of its outputs are known, and no values",
                remedy="write layout.pipeline = 1, or a forward that keeps the number in a tensor",
            ) from error
        finally:
            self.is_running = False
        return Outline.of(output, given), counter.count
