"""Trial of a stage without data, in which nothing that it gives may come from a stub."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.numerics.operators import tensors_in
from shoal.parallel.model.function_trace import FunctionCall, FunctionTrace
from shoal.parallel.pipeline.stage_program import StageCall
from shoal.parallel.pipeline.stage_trace import Forward, written_by


class LeakError(Exception):
    """A value of earlier stages crosses into the stage that `begins` with a module, other than as its argument."""

    def __init__(self, begins: str, how: str) -> None:
        super().__init__(how)
        self.begins, self.how = begins, how


class Followed(Protocol):
    """Interface of a forward through a stage."""

    begun: bool

    def call(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Call of a module's forward, as the stage does it."""


class StubWatch(FunctionTrace):
    """Tracker of stubs' outputs, and of all values computed from them, through one dry run."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        super().__init__()
        self._buffers = {id(t): name for name, t in named.items()}
        self._from: dict[int, str] = {}
        self._inside: list[str] = []
        self._used = self._spoilt = ""

    def follow(self, run: Followed) -> None:
        """Sets the forward that is tried."""
        self._run = run

    def call(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Does a module's call as the forward does it."""
        self._inside.append(name)
        try:
            return self._run.call(name, forward, args, kwargs)
        finally:
            self._inside.pop()

    def stub(self, step: StageCall, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Stand-in of the module's output, marked as coming from a stub."""
        arguments = tree_leaves((args, kwargs))
        assert step.outline is not None
        with torch._C.DisableTorchFunction():
            output = step.outline.filled(arguments, dense=True)
        given = {id(leaf) for leaf in arguments}
        for tensor in tensors_in(output):
            if id(tensor) not in given:
                self._mark(tensor, step.name)
        return output

    def _mark(self, tensor: Tensor, origin: str) -> None:
        self._from.setdefault(id(tensor), origin)
        self._alive.append(tensor)

    def seen(self, call: FunctionCall) -> None:
        """Takes note of what is computed from what stubs gave."""
        origin = next((self._from[id(t)] for t in call.given if id(t) in self._from), None)
        changed = [*call.made, *written_by(call)]
        if origin is None or not changed:
            return
        for tensor in changed:
            self._mark(tensor, origin)
            if id(tensor) in self._buffers:
                self._spoilt = f"what {origin!r} gives has a part in the buffer {self._buffers[id(tensor)]!r}"
        if self._run.begun and not self._used:
            where = self._inside[-1] if self._inside else ""
            self._used = f", by {call.name} in " + (repr(where) if where else "the loss")

    def judge(self, begins: str, result: list[Any]) -> None:
        """Raises: LeakError where something of the result comes from a stub."""
        origin = next((self._from[id(leaf)] for leaf in result if id(leaf) in self._from), None)
        if origin is not None:
            how = f"what {origin!r} gives on a stage before is used after the cut{self._used or ' as it is'}"
            raise LeakError(begins, f"{how}, and not as an argument of {begins!r}")
        if self._spoilt:
            raise LeakError(begins, self._spoilt)
