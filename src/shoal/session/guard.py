"""Guard: what a plain loop does with an optimizer and a Session does itself is refused where it would count twice."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from shoal.errors import UserCodeError

_GUARDED = ("step", "zero_grad")


class Guard:
    """Watches over `step` and `zero_grad` of optimizers as long as their loop lasts."""

    def __init__(self, optimizers: Sequence[Optimizer], in_pass: Callable[[], bool]) -> None:
        self._optimizers, self._in_pass = list(optimizers), in_pass
        self._own = [{name: vars(o)[name] for name in _GUARDED if name in vars(o)} for o in self._optimizers]
        self.put()

    def put(self) -> None:
        """Sets the guards, as attributes of the objects."""
        for optimizer in self._optimizers:
            vars(optimizer)["step"] = _refused(optimizer.step, lambda: True, _step)
            vars(optimizer)["zero_grad"] = _refused(optimizer.zero_grad, self._in_pass, _zero_grad)

    def lift(self) -> None:
        """Takes them away: what was there before is there again, as a scheduler's own wrapper."""
        for optimizer, own in zip(self._optimizers, self._own, strict=True):
            for name in _GUARDED:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(own)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """A context without them, for the session's own update."""
        self.lift()
        try:
            yield
        finally:
            self.put()


def _refused(method: Callable[..., Any], when: Callable[[], bool], error: Callable[[], UserCodeError]) -> Any:
    @functools.wraps(method)  # schedulers look for a mark of theirs
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if when():
            raise error()
        return method(*args, **kwargs)

    return guarded


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
