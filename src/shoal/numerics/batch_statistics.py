"""Buffers that the forward changes (batch statistics, counters): one update a step, the same on any layout.

Every microbatch starts from the step's buffers; the new value is the mean of what the microbatches made of them,
weighted by samples. For BatchNorm's running statistics, which are linear in the batch's, that is the mean over grains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.flat import views_of
from shoal.numerics.precision import numbers

T = TypeVar("T")
_RUNNING, _WEIGHTS = ("running_mean", "running_var"), ("weight", "bias")


def normalised_by_grain(parts: Sequence[Tensor], given: Mapping[str, Any]) -> Tensor:
    """Batch normalisation of each grain's rows by themselves, with `given` as arguments of torch's function.

    Running statistics become the mean of what the grains made of them, weighted by rows.
    """
    running = {name: given[name] for name in _RUNNING if given.get(name) is not None}
    own = {name: value.expand(len(parts), *value.shape).clone() for name, value in running.items()}
    normalised = _as_channels if _is_launch_bound(given["input"], parts) else _one_by_one
    whole = normalised(parts, given, own)
    rows = len(given["input"])
    for name, values in own.items():  # which the backward has: nothing is written there
        if _are_alike(parts):
            torch.mean(values, 0, out=running[name])
        else:
            shares = torch._foreach_mul(values.unbind(), [len(part) / rows for part in parts])
            running[name].copy_(torch.stack(shares).sum(0))
    return whole


def _is_launch_bound(input: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether one call for all grains takes less time than a call for each, whose launch takes longer than its kernel.

    Not where channels lie last: there it would bring them into another format, and back.
    """
    return len(parts) > 1 and input.is_cuda and input.is_contiguous() and _are_alike(parts)


def _are_alike(parts: Sequence[Tensor]) -> bool:
    return len(set(map(len, parts))) == 1


def _one_by_one(parts: Sequence[Tensor], given: Mapping[str, Any], running: Mapping[str, Tensor]) -> Tensor:
    """Batch normalisation of a grain after the other; `running` statistics have a row for each."""
    outputs = [
        F.batch_norm(**{**given, "input": part, **{name: values[place] for name, values in running.items()}})
        for place, part in enumerate(parts)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _as_channels(parts: Sequence[Tensor], given: Mapping[str, Any], running: Mapping[str, Tensor]) -> Tensor:
    """As `_one_by_one`, of grains of one size in one call, where each grain's channels are channels of their own."""
    grains, input = len(parts), given["input"]
    rows, channels, *rest = parts[0].shape
    beside = input.view(grains, rows, channels, *rest).transpose(0, 1).reshape(rows, grains * channels, *rest)
    own = {name: values.view(-1) for name, values in running.items()}
    own |= {name: given[name].expand(grains, -1).reshape(-1) for name in _WEIGHTS if given.get(name) is not None}
    normal = F.batch_norm(**{**given, "input": beside, **own})
    return normal.view(rows, grains, channels, *rest).transpose(0, 1).reshape(input.shape)


class StepBuffers:
    """The changing buffers of a model; ranks agree on `names`, so that their vectors match."""

    def __init__(self, model: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> None:
        """`counts` says of a name whether the sum over ranks takes this rank's values: of equal ones, it takes one."""
        self.names: tuple[str, ...] = ()
        self._counts = counts
        # Parameters without gradient, such as a teacher that the forward averages, are watched once they are named.
        self._frozen = {
            f"{prefix}.{key}" if prefix else key: (module._parameters, key)
            for prefix, module in model.named_modules()
            for key, value in module._parameters.items()
            if value is not None and not value.requires_grad
        }
        # Where each buffer hangs, since a forward may replace the tensor; walking the modules each time is slow.
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, module in model.named_modules():
            for key, value in module._buffers.items():
                if value is not None:
                    self._homes[f"{prefix}.{key}" if prefix else key] = module._buffers, key
        # A stage of a pipeline may hold no parameter.
        held = (p.device for p in (*model.parameters(), *model.buffers()) if not p.is_meta)
        self._device = next(held, torch.device("cpu"))
        self._versions: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self._saved: dict[str, Tensor] = {}
        # Buffers that are not known to change: what they go back to where a forward begins to change them after all.
        self._still: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._shapes = {name: self._now(name).shape for name in self._homes}  # the same on all ranks
        self.is_empty = not self._homes  # the model has none
        self.nothing = torch.zeros(0, dtype=torch.float64, device=self._device)  # values of none

    def _now(self, name: str) -> Tensor:
        home, key = self._homes[name]
        value: Tensor | None = home[key]
        assert value is not None, f"buffer {name} was removed"
        return value

    def watch(self, names: Iterable[str] | None = None) -> None:
        """Sets the names of the buffers that change; all of them where None."""
        for name in self._frozen.keys() & set(names or ()) - self._homes.keys():
            self._homes[name] = self._frozen[name]
            self._shapes[name] = self._now(name).shape
        self.is_empty = not self._homes
        self.names = tuple(sorted(self._homes if names is None else names))

    @property
    def num_values(self) -> int:
        """Numbers in all of them: a complex one is two."""
        return sum(map(self._length, self.names)) if self.names else 0

    def _length(self, name: str) -> int:
        return self._shapes[name].numel() * (1 + self._now(name).is_complex())

    def begin(self) -> None:
        """Keeps the step's values."""
        if not self._homes:
            return
        now = {name: self._now(name).detach() for name in self.names if not self._now(name).is_meta}
        self._saved = {name: torch.empty_like(value) for name, value in now.items()}
        _copy([(self._saved[name], value) for name, value in now.items()])
        self._still = {name: kept for name, kept in self._still.items() if name not in self._saved}
        for name in self._homes.keys() - self._saved.keys():
            value, mark = self._now(name), self._version(name)
            if not value.is_meta and (name not in self._still or self._still[name][0] != mark):
                self._still[name] = mark, value.detach().clone()
        self._changed = set()
        self._mark()

    def _mark(self) -> None:
        self._versions = {name: self._version(name) for name in self._homes}

    def _version(self, name: str) -> tuple[int, int]:
        value = self._now(name)
        return id(value), value._version

    def changed(self) -> set[str]:
        """The buffers that a forward wrote or replaced since `begin`."""
        if not self._homes:
            return set()
        return self._changed | {name for name, mark in self._versions.items() if self._version(name) != mark}

    def weighted(self, num_samples: int) -> Tensor:
        """Current values times the samples of their microbatches, flat float64 [num_values].

        Raises: JobError where a forward has given a buffer another shape.
        """
        if not self.names:
            return self.nothing
        for name in self.names:
            if self._now(name).shape != self._shapes[name]:
                raise _reshaped(name, self._shapes[name], self._now(name).shape)
        held = {name: self._now(name).detach() for name in self.names}
        own = {name: value for name, value in held.items() if not value.is_meta and self._counts(name)}
        found: dict[str, Tensor] = {}
        for names in _by_kind(own.items()):
            flat = numbers(torch.cat([own[name].flatten() for name in names])).flatten()
            found |= dict(zip(names, flat.split([self._length(name) for name in names]), strict=True))
        for name in held.keys() - own.keys():  # other ranks hold it, or count it
            found[name] = torch.zeros(self._length(name), dtype=torch.float64, device=self._device)
        return torch.cat([found[name] for name in self.names]) * num_samples

    def restore(self) -> None:
        """Puts the step's values back. Raises: JobError where a forward has given a buffer another shape."""
        if not self._homes:
            return
        self._changed = self.changed()
        started = {name: self._still[name][1] for name in self._changed & self._still.keys()} | self._saved
        same: list[tuple[Tensor, Tensor]] = []
        for name, value in started.items():
            now = self._now(name)
            if now.shape != value.shape:
                raise _reshaped(name, value.shape, now.shape)
            if now.dtype == value.dtype:
                same.append((now, value))
            else:  # a forward has put one of another dtype there, as under autocast
                home, key = self._homes[name]
                home[key] = value.clone()
        _copy(same)
        self._mark()

    def assign(self, weighted: npt.NDArray[np.float64], num_samples: int) -> None:
        """Sets the values from the sum over microbatches and ranks; whole numbers stay whole."""
        if not self.names or not num_samples:
            return
        self._assign(torch.from_numpy(weighted / num_samples), None)

    def queue_assign(self, weighted: Tensor, num_samples: Tensor, good: Tensor) -> None:
        """As `assign`, on the device: where not `good`, a bool [], the step's values are put back."""
        if self.names:
            self._assign(weighted / num_samples, good)

    def _assign(self, values: Tensor, good: Tensor | None) -> None:
        parts = dict(zip(self.names, values.split(list(map(self._length, self.names))), strict=True))
        held = {name: self._now(name) for name in self.names if not self._now(name).is_meta}
        for names in _by_kind(held.items()):
            buffers = [held[name] for name in names]
            new = _of_kind(torch.cat([parts[name] for name in names]), buffers[0])
            if good is not None:
                new = torch.where(good, new, torch.cat([self._saved[name].flatten() for name in names]))
            _copy(list(zip(buffers, views_of(new, buffers), strict=True)))
        self._saved = {}  # the step is over: there is nothing to go back to


def _by_kind(items: Iterable[tuple[T, Tensor]]) -> list[list[T]]:
    """Items whose tensors have one dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for item, tensor in items:
        found.setdefault((tensor.dtype, tensor.device), []).append(item)
    return list(found.values())


def _of_kind(values: Tensor, like: Tensor) -> Tensor:
    """Numbers as a buffer of such a dtype holds them, flat; pairs of a complex one."""
    values = values.to(like.device)
    if like.is_complex():
        return torch.view_as_complex(values.view(-1, 2)).to(like.dtype)
    return (values if like.is_floating_point() else values.round()).to(like.dtype)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies into the first of each pair the second, all of a dtype at once."""
    with torch.no_grad():
        for alike in _by_kind((pair, pair[0]) for pair in pairs):
            if any(map(_is_lazy, chain.from_iterable(alike))):
                for into, value in alike:
                    into.copy_(value)
            else:
                torch._foreach_copy_([into for into, _ in alike], [value for _, value in alike])


def _is_lazy(tensor: Tensor) -> bool:
    """Whether it is a conjugate or negative view, which no copy of several tensors takes."""
    return tensor.is_conj() or tensor.is_neg()


def _reshaped(name: str, before: torch.Size, after: torch.Size) -> JobError:
    if 0 in before:  # not reached by a forward yet
        return JobError(
            given=f"buffer {name} of shape {list(before)}, which a forward gives the shape {list(after)}",
            conflict="the first forward gives the buffer its shape, as an observer of quantization does; a step makes "
            "one value of what its microbatches leave in a buffer, so that all have to begin with one shape",
            remedy="give it its shape in model(): call the module there once with a sample, or register the buffer "
            f"with the shape {list(after)}",
        )
    return JobError(
        given=f"buffer {name} of shape {list(before)}, which a forward gives the shape {list(after)}",
        conflict="a step makes one value of what its microbatches leave in a buffer: all have to be of one shape",
        remedy="build it for the longest sample (in Transformers a larger max_position_embeddings or "
        "max_source_positions), or keep what a forward can compute again in a plain attribute",
    )
