"""Events of a traced step, one per operator, as values: the storages, their shapes, and the calling module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A tensor described as a view of a storage; `key` identifies the storage during the trace."""

    key: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    dtype: str
    floating: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StorageRef:
        """Return the description of a strided tensor."""
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
        """Number of elements in memory; an expanded dim counts once."""
        return math.prod(n for n, step in zip(self.shape, self.stride, strict=True) if step or n == 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements in memory."""
        return self.numel * self.itemsize


@dataclass(slots=True, eq=False)
class OperatorEvent:
    """One call of an operator.

    `node`: sequence number of the autograd node that the call made or, in the backward, that it belongs to.
    `arguments`: all arguments by the schema's names, with tensors as `StorageRef`s.
    `written`: indices in `inputs` of the tensors that the call changes in place.
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
        """Whether the call only makes views of its inputs."""
        return not self.written and {o.key for o in self.outputs} <= {i.key for i in self.inputs}


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """Storage that autograd first saved for node `node`, before event `place` of the trace."""

    node: int
    key: int
    num_bytes: int
    region: int
    place: int


@dataclass(slots=True)
class ForwardRegion:
    """Part of the forward: one call of a block, or the operators between two such calls.

    `like`: the region of an equal block that was traced instead of this one, if any.
    """

    block: str | None = None
    like: int | None = None


@dataclass
class OperatorTrace:
    """Trace of one forward and backward over `samples` samples."""

    samples: int
    events: list[OperatorEvent] = field(default_factory=list)
    saved: list[SavedStorage] = field(default_factory=list)
    regions: list[ForwardRegion] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)  # names by storage key
    constants: frozenset[int] = frozenset()  # storages of parameters, buffers and the batch
    weights: dict[str, StorageRef] = field(default_factory=dict)  # parameters by name
    gradients: dict[str, StorageRef] = field(default_factory=dict)  # gradients by parameter name
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of storages that operators made
    used: dict[str, int] = field(default_factory=dict)  # the first region that uses each parameter

    @property
    def forward(self) -> Iterator[OperatorEvent]:
        """The events before the backward, in order; their indices equal those in `events`."""
        return takewhile(lambda event: not event.is_backward, self.events)
