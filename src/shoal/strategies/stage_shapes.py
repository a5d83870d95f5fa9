"""Stubs: what stands for the output of a module that another stage computes: its shape and dtype, NaN, no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shoal.randomness import DrawCounter
from shoal.strategies.stage_trace import fake_of, without_data

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Blank:
    """A tensor's shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Blank:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device)

    def filled(self, dense: bool = False) -> Tensor:
        """A tensor of NaN, or zeros where the dtype has none; one number in memory unless it is to be written into."""
        is_float = self.dtype.is_floating_point or self.dtype.is_complex
        one = torch.full((), float("nan") if is_float else 0, dtype=self.dtype, device=self.device)
        one.requires_grad_(self.requires_grad and torch.is_grad_enabled())
        whole = one.expand(self.shape)
        return whole.clone() if dense else whole

    def empty(self) -> Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Outline:
    """A module's output for arguments of one kind: blanks, the place of an argument given back, or other values."""

    leaves: tuple[Blank | int | tuple[Any], ...]
    spec: TreeSpec
    num_draws: int


class Shapes:
    """The outlines of modules' outputs, found by running them without data once for each kind of arguments."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._modules = dict(model.named_modules())
        self._device = device
        self._known: dict[Any, Outline] = {}
        self.is_running = False

    def output(self, name: str, forward: Forward, args: Any, kwargs: Any, dense: bool) -> tuple[Any, int]:
        """(what stands for the output, how many random numbers the call would have drawn of a GrainScope)."""
        leaves, spec = tree_flatten((args, kwargs))
        key = self._key(name, leaves, spec)
        outline = self._known.get(key)
        if outline is None:
            outline = self._known[key] = self._run(name, forward, leaves, spec)
        made = []
        for leaf in outline.leaves:
            if isinstance(leaf, Blank):
                made.append(leaf.filled(dense))
            else:
                made.append(leaves[leaf] if isinstance(leaf, int) else leaf[0])
        return tree_unflatten(made, outline.spec), outline.num_draws

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

    def _run(self, name: str, forward: Forward, leaves: list[Any], spec: TreeSpec) -> Outline:
        module = self._modules[name]
        self.is_running = True
        try:
            with without_data(module, self._device) as (mode, _):
                given = fake_of(mode, leaves, self._device)
                args, kwargs = tree_unflatten(given, spec)
                with mode, DrawCounter() as counter:
                    output = forward(*args, **kwargs)
        finally:
            self.is_running = False
        places = {id(leaf): place for place, leaf in enumerate(given) if isinstance(leaf, Tensor)}
        found, output_spec = tree_flatten(output)
        described: list[Blank | int | tuple[Any]] = []
        for leaf in found:
            if not isinstance(leaf, Tensor):
                described.append((leaf,))
            else:
                described.append(places[id(leaf)] if id(leaf) in places else Blank.of(leaf))
        return Outline(tuple(described), output_spec, counter.count)
