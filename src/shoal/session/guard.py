"""Guard: what a plain loop does with an optimizer and a Session does itself is refused where it would count twice."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from shoal.errors import UserCodeError

_GUARDED = ("step", "zero_grad")


class Guard:
    """Watches over `step` and `zero_grad` of optimizers as long as their loop lasts."""

    def __init__(self, optimizers: Sequence[Optimizer], in_pass: Callable[[], bool]) -> None:
        self._optimizers, self._in_pass = list(optimizers), in_pass
        self._own = [{name: vars(o).get(name) for name in _GUARDED} for o in self._optimizers]
        self._lifted = False
        self._guards = [
            {
                "step": _refused(o, "step", lambda: not self._lifted, _step),
                "zero_grad": _refused(o, "zero_grad", lambda: self._in_pass() and not self._lifted, _zero_grad),
            }
            for o in self._optimizers
        ]
        self.put()

    def put(self) -> None:
        """Sets the guards, as attributes of the objects."""
        self._replace(self._own, self._guards)
        self._lifted = False

    def lift(self) -> None:
        """Takes them away: what was there before is there again, as a scheduler's own wrapper.

        A wrapper that came later, of a scheduler that was made in the loop, stays and calls the guard, which lets pass.
        """
        self._lifted = True
        self._replace(self._guards, self._own)

    def _replace(self, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
        for optimizer, before, after in zip(self._optimizers, old, new, strict=True):
            attributes = vars(optimizer)
            for name in _GUARDED:
                if attributes.get(name) is not before[name]:
                    continue
                attributes.pop(name, None)
                if after[name] is not None:
                    attributes[name] = after[name]

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """A context without them, for the session's own update."""
        self.lift()
        try:
            yield
        finally:
            self.put()


def _refused(optimizer: Optimizer, name: str, when: Callable[[], bool], error: Callable[[], UserCodeError]) -> Any:
    method = getattr(optimizer, name)

    @functools.wraps(method)  # schedulers look for a mark of theirs
    def guarded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if when():
            raise error()
        return method(*args, **kwargs)

    return types.MethodType(guarded, optimizer)  # a scheduler unbinds it


def _step() -> UserCodeError:
    return UserCodeError(
        given="optimizer.step() in the loop of a Session",
        conflict="the update takes place when the step's batches are used up, and would be made twice",
        remedy="leave optimizer.step() out",
    )


def _zero_grad() -> UserCodeError:
    return UserCodeError(
        given="optimizer.zero_grad() within the batches of a step",
        conflict="a step's gradient is the sum over all its batches, and each step begins without one",
        remedy="leave optimizer.zero_grad() out",
    )
