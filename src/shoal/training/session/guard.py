"""Guards of a Session's loop against gradient and optimizer calls that the Session makes itself."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import UserCodeError

_GUARDED = ("step", "zero_grad")


class Guard:
    """Guard of optimizers' `step` and `zero_grad` as long as their loop lasts."""

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


class LoopWatch:
    """Guard of gradients and learning rates against changes while a pass is under way."""

    def __init__(self) -> None:
        self._gradients: list[tuple[Tensor, Tensor, int]] = []
        self._blanks: dict[int, Tensor] = {}
        self._rates: list[Any] = []

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """A pass of these starts. Raises: UserCodeError where the gradients of the last one were changed after it."""
        for parameter, gradient, version in self._gradients:
            if parameter.grad is gradient and gradient._version != version and bool(gradient.any()):
                raise _late()
        self._gradients = []
        self._rates = _rates(optimizers)

    def note(self, parameters: Sequence[Tensor], *, taken: bool = False) -> None:
        """The gradients are as the session has left them. `taken`: it has put them aside, and zeros stand for them."""
        for parameter in parameters if taken else ():
            if parameter.grad is None:
                parameter.grad = self._blanks.setdefault(id(parameter), torch.zeros_like(parameter))
        self._gradients = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]

    def drop(self) -> None:
        """Takes the zeros away again."""
        for parameter, gradient, _ in self._gradients:
            if parameter.grad is gradient is self._blanks.get(id(parameter)):
                parameter.grad = None

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises: UserCodeError where gradients or rates have been changed since."""
        if any(p.grad is not gradient or gradient._version != version for p, gradient, version in self._gradients):
            raise _changed()
        if _rates(optimizers) != self._rates:
            raise _rescheduled()


def _rates(optimizers: Sequence[Optimizer]) -> list[Any]:
    found = (group.get("lr") for optimizer in optimizers for group in optimizer.param_groups)
    return [rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate for rate in found]


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


def _changed() -> UserCodeError:
    return UserCodeError(
        given="gradients that were changed after step.backward(), within the batches of a step",
        conflict="they are those of this rank's batches so far, and the step's gradient is the sum over all ranks",
        remedy="to clip write shoal.Session(clip_norm=...) and leave clip_grad_norm_ out; leave model.zero_grad() out",
    )


def _late() -> UserCodeError:
    return UserCodeError(
        given="gradients that were changed after the update",
        conflict="the update takes place when the step's batches are used up: nothing reads them any more",
        remedy="to clip write shoal.Session(clip_norm=...) and leave clip_grad_norm_ out",
    )


def _rescheduled() -> UserCodeError:
    return UserCodeError(
        given="a learning rate that was changed within the batches of a step, as by scheduler.step()",
        conflict="a rank may have several batches of a step, or none: rates belong to the step",
        remedy="write scheduler.step() after the loop over the batches, once a step",
    )


def _zero_grad() -> UserCodeError:
    return UserCodeError(
        given="optimizer.zero_grad() within the batches of a step",
        conflict="a step's gradient is the sum over all its batches, and each step begins without one",
        remedy="leave optimizer.zero_grad() out",
    )
