"""Buffers that the forward changes (batch statistics, counters): one update a step, the same on any layout.

Every microbatch starts from the step's buffers; the new value is the mean of what the microbatches made of them,
weighted by samples. For BatchNorm's running statistics, which are linear in the batch's, that is the mean over grains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.precision import numbers


class StepBuffers:
    """The changing buffers of a model; ranks agree on `names`, so that their vectors match."""

    def __init__(self, model: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> None:
        """`counts` says of a name whether the sum over ranks takes this rank's values: of equal ones, it takes one."""
        self.names: tuple[str, ...] = ()
        self._counts = counts
        # Where each buffer hangs, since a forward may replace the tensor; walking the modules each time is slow.
        self._homes: dict[str, tuple[dict[str, Tensor | None], str]] = {}
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
        value = home[key]
        assert value is not None, f"buffer {name} was removed"
        return value

    def watch(self, names: Iterable[str] | None = None) -> None:
        """Sets the names of the buffers that change; all of them where None."""
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
        self._saved = {name: self._now(name).detach().clone() for name in self.names if not self._now(name).is_meta}
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
        return torch.cat([self._value(name) for name in self.names]) * num_samples

    def _value(self, name: str) -> Tensor:
        value = self._now(name).detach()
        if value.is_meta or not self._counts(name):  # other ranks hold it, or count it
            return torch.zeros(self._length(name), dtype=torch.float64, device=self._device)
        return numbers(value).flatten()

    def restore(self) -> None:
        """Puts the step's values back. Raises: JobError where a forward has given a buffer another shape."""
        if not self._homes:
            return
        self._changed = self.changed()
        started = {name: self._still[name][1] for name in self._changed & self._still.keys()} | self._saved
        with torch.no_grad():
            for name, value in started.items():
                if self._now(name).shape != value.shape:
                    raise _reshaped(name, value.shape, self._now(name).shape)
                if self._now(name).dtype == value.dtype:
                    self._now(name).copy_(value)
                else:  # a forward has put one of another dtype there, as under autocast
                    home, key = self._homes[name]
                    home[key] = value.clone()
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
        with torch.no_grad():
            for name, part in zip(self.names, values.split(list(map(self._length, self.names))), strict=True):
                buffer = self._now(name)
                if buffer.is_meta:
                    continue
                if buffer.is_complex():
                    new = torch.view_as_complex(part.reshape(*buffer.shape, 2).contiguous())
                else:
                    new = (part if buffer.is_floating_point() else part.round()).view_as(buffer)
                buffer.copy_(new if good is None else torch.where(good, new.to(buffer.dtype), self._saved[name]))
        self._saved = {}  # the step is over: there is nothing to go back to


def _reshaped(name: str, before: torch.Size, after: torch.Size) -> JobError:
    return JobError(
        given=f"buffer {name} of shape {list(before)}, which a forward gives the shape {list(after)}",
        conflict="a step makes one value of what its microbatches leave in a buffer: all have to be of one shape",
        remedy="build it for the longest sample (in Transformers a larger max_position_embeddings or "
        "max_source_positions), or keep what a forward can compute again in a plain attribute",
    )
