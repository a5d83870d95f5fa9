"""A recorder of graphs for the CPU: operations of a function are noted once, and run again on the same tensors.

Nothing of Python runs in a replay, as in that of a CUDA graph: what the function would have done besides is not done.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.training.loop.captured_step import RECORDERS, Body, CaptureRules, Recorder, Recording


def memory(values: Any) -> set[int]:
    """Addresses of the storages of tensors."""
    return {value.untyped_storage().data_ptr() for value in tree_leaves(values) if isinstance(value, Tensor)}


@dataclass
class Noted:
    """One operation: its function, what it was given, and where its results lie."""

    func: Any
    args: Any
    kwargs: Any
    found: Any

    @property
    def changes(self) -> bool:
        """Whether it writes: a view of what is there already does not."""
        return (
            self.func.namespace == "c10d"
            or self.func._schema.is_mutable
            or not memory(self.found) <= memory((self.args, self.kwargs))
        )

    def again(self) -> None:
        found = self.func(*self.args, **self.kwargs)
        if self.func.namespace == "c10d":  # it writes in place, and each rank waits for it at once
            tree_leaves(found)[-1].wait()
            return
        for own, new in zip(tree_leaves(self.found), tree_leaves(found), strict=True):
            if isinstance(own, Tensor) and own.data_ptr() != new.data_ptr():
                assert own.shape == new.shape
                own.copy_(new)


class Notes(TorchDispatchMode):
    """Notes each operation that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Noted] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.noted.append(Noted(func, args, kwargs or {}, found))
        return found


@dataclass
class Replays(Recorder):
    """Stand-in for CudaRecorder; `counted`: how often which of its methods was called, by all of them."""

    device: torch.device
    counted: ClassVar[Counter[str]] = Counter()

    def warm_up(self, body: Body, rules: contextlib.AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        self.counted["warm_up"] += 1
        with rules:
            return body()

    def record(self, body: Body) -> Recording:
        self.counted["record"] += 1
        with CaptureRules(), Notes() as notes:
            outputs = body()
        noted = [one for one in notes.noted if one.changes]

        def replay() -> None:
            self.counted["replay"] += 1
            with torch.no_grad(), CaptureRules():
                for one in noted:
                    one.again()

        return Recording(replay, outputs)


@contextlib.contextmanager
def replaying(kind: type[Recorder] = Replays) -> Iterator[Counter[str]]:
    """A context in which the CPU is a device with graphs, and what was called of the stand-in."""
    Replays.counted = counted = Counter[str]()
    with mock.patch.dict(RECORDERS, {"cpu": kind}):
        yield counted
