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

# Calls that a loop must leave to its Session: what was given, what it conflicts with, what to write.
_GUARDED = {
    "step": (
        "optimizer.step() in the loop of a Session",
        "the update takes place when the step's batches are used up, and would be made twice",
        "leave optimizer.step() out",
    ),
    "zero_grad": (
        "optimizer.zero_grad() within the batches of a step",
        "a step's gradient is the sum over all its batches, and each step begins without one",
        "leave optimizer.zero_grad() out",
    ),
}


class Guard:
    """Guard that refuses calls of optimizers' `step` and `zero_grad` during their loop."""

    def __init__(self, optimizers: Sequence[Optimizer], in_pass: Callable[[], bool]) -> None:
        self._in_pass = in_pass
        self._guards = [(o, name, vars(o).get(name), self._refused(o, name)) for o in optimizers for name in _GUARDED]
        self.put()

    def _refused(self, optimizer: Optimizer, name: str) -> Any:
        method = getattr(optimizer, name)

        @functools.wraps(method)  # schedulers look for their mark on the method
        def guarded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._lifted and (name == "step" or self._in_pass()):
                given, conflict, remedy = _GUARDED[name]
                raise UserCodeError(given=given, conflict=conflict, remedy=remedy)
            return method(*args, **kwargs)

        return types.MethodType(guarded, optimizer)  # a scheduler unbinds it

    def put(self) -> None:
        """Set the guards, as attributes of the optimizers."""
        for optimizer, name, own, guard in self._guards:
            _replace(vars(optimizer), name, own, guard)
        self._lifted = False

    def lift(self) -> None:
        """Remove the guards and restore the previous attributes, such as a scheduler's own wrapper.

        A scheduler that was made in the loop has wrapped the guard. Its wrapper stays, and the guard passes all calls.
        """
        self._lifted = True
        for optimizer, name, own, guard in self._guards:
            _replace(vars(optimizer), name, guard, own)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Return a context without the guards, for the session's own update."""
        self.lift()
        try:
            yield
        finally:
            self.put()


def _replace(attributes: dict[str, Any], name: str, old: Any, new: Any) -> None:
    if attributes.get(name) is old:
        attributes.pop(name, None)
        if new is not None:
            attributes[name] = new


class LoopWatch:
    """Watch for changes of gradients and learning rates during a pass."""

    def __init__(self) -> None:
        self._gradients: list[tuple[Tensor, Tensor, int]] = []
        self._blanks: dict[int, Tensor] = {}
        self._rates: list[Any] = []

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Start a pass over these optimizers. Raises: UserCodeError if gradients were changed after the last update."""
        for parameter, gradient, version in self._gradients:
            if parameter.grad is gradient and gradient._version != version and bool(gradient.any()):
                raise UserCodeError(
                    given="gradients that were changed after the update",
                    conflict="the update takes place when the step's batches are used up: nothing reads them any more",
                    remedy="to clip write shoal.Session(clip_norm=...) or clip_value, and leave torch's out",
                )
        self._gradients = []
        self._rates = _rates(optimizers)

    def note(self, parameters: Sequence[Tensor], *, taken: bool = False) -> None:
        """Record the gradients as the session has left them. `taken`: it has moved them; zeros take their place."""
        for parameter in parameters if taken else ():
            if parameter.grad is None:
                parameter.grad = self._blanks.setdefault(id(parameter), torch.zeros_like(parameter))
        self._gradients = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]

    def drop(self) -> None:
        """Remove the zeros that stand for stored gradients."""
        for parameter, gradient, _ in self._gradients:
            if parameter.grad is gradient is self._blanks.get(id(parameter)):
                parameter.grad = None

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise UserCodeError if gradients or learning rates were changed since."""
        if any(p.grad is not gradient or gradient._version != version for p, gradient, version in self._gradients):
            raise UserCodeError(
                given="gradients that were changed after step.backward(), within the batches of a step",
                conflict="they are those of this rank's batches so far, and the step's gradient is the sum over all "
                "ranks",
                remedy="to clip write shoal.Session(clip_norm=...) or clip_value, and leave torch's out; leave "
                "model.zero_grad() out",
            )
        if _rates(optimizers) != self._rates:
            raise UserCodeError(
                given="a learning rate that was changed within the batches of a step, as by scheduler.step()",
                conflict="a rank may have several batches of a step, or none: rates belong to the step",
                remedy="write scheduler.step() after the loop over the batches, once a step",
            )


def _rates(optimizers: Sequence[Optimizer]) -> list[Any]:
    found = (group.get("lr") for optimizer in optimizers for group in optimizer.param_groups)
    return [rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate for rate in found]
