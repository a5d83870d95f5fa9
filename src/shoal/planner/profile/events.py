"""Events of a traced step, operator by operator, as values: the storages, their shapes, and the module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A tensor as a view of a storage; `key` tells storages apart for as long as a trace lives."""

    key: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    dtype: str
    floating: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StorageRef:
        """The place of a strided tensor."""
        return cls(
            tensor.untyped_storage()._cdata,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.itemsize,
            str(tensor.dtype).removeprefix("torch."),
            tensor.is_floating_point(),
        )

    @property
    def numel(self) -> int:
        """Elements that lie in memory: an expanded dim counts one."""
        return math.prod(n for n, step in zip(self.shape, self.stride, strict=True) if step or n == 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements."""
        return self.numel * self.itemsize


@dataclass(slots=True, eq=False)
class OperatorEvent:
    """One call of an operator. `node` is the number of the autograd node that it made, or in the backward serves.

    `arguments` are its positional and keyword ones by the schema's names, tensors as `StorageRef`s. `written`: places
    in `inputs` of what it changes in place.
    """

    name: str  # "aten.mm"
    module: str
    region: int
    is_backward: bool
    node: int
    arguments: dict[str, Any]
    inputs: list[StorageRef]
    outputs: list[StorageRef]
    written: frozenset[int] = frozenset()

    @property
    def is_view(self) -> bool:
        """Whether it only tells of memory that is there already."""
        return not self.written and {o.key for o in self.outputs} <= {i.key for i in self.inputs}


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """Storage that autograd began to save for the node of this number, before event `place` of its trace."""

    node: int
    key: int
    num_bytes: int
    region: int
    place: int


@dataclass(slots=True)
class ForwardRegion:
    """Stretch of the forward: a call of a block, or the operators between two of them.

    `like` is the region that was traced in its place, where an equal block had been traced before.
    """

    block: str | None = None
    like: int | None = None


@dataclass
class OperatorTrace:
    """Trace of a forward and a backward of `samples` samples."""

    samples: int
    events: list[OperatorEvent] = field(default_factory=list)
    saved: list[SavedStorage] = field(default_factory=list)
    regions: list[ForwardRegion] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)  # by storage
    constants: frozenset[int] = frozenset()  # storages of parameters, buffers and the batch
    weights: dict[str, StorageRef] = field(default_factory=dict)  # the parameters, by name
    gradients: dict[str, StorageRef] = field(default_factory=dict)  # of the parameters, by name
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of storages that operators made
    used: dict[str, int] = field(default_factory=dict)  # the first region that uses each parameter

    @property
    def forward(self) -> Iterator[OperatorEvent]:
        """The events before the backward, which have the same places."""
        return takewhile(lambda event: not event.is_backward, self.events)
