"""Guards of a Session's loop: calls that the Session makes itself, changed gradients, and state outside of buffers."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shoal.errors import UserCodeError
from shoal.numerics.checksum import bits_checksum
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.training.microbatch.look import LATER_STEPS, find_state, turned

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

    def note(self, parameters: Sequence[Tensor], *, moved: bool = False) -> None:
        """Record the gradients as the session has left them. `moved`: it has moved them; zeros take their place."""
        for parameter in parameters if moved else ():
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
    rates = (group.get("lr") for optimizer in optimizers for group in optimizer.param_groups)
    return [rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate for rate in rates]


class ForwardWatch:
    """Watch over a Session's prepared models. Their forwards are unknown until the loop calls them."""

    def __init__(self, models: Sequence[nn.Module], allow_state: Sequence[str]) -> None:
        self._models, self._allow_state = list(models), tuple(allow_state)
        self._calls: dict[nn.Module, tuple[Any, Any]] = {}
        self._handles: list[Any] = []

    def begin(self, step: int) -> None:
        """Store the inputs of each model's first forward in step `step`, counted from 0, if the step is checked."""
        if step + 1 in (1, *LATER_STEPS):
            self._handles = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in self._models]

    def _note(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._calls.setdefault(model, (copy_of(args), copy_of(kwargs)))

    def end(self) -> None:
        """Repeat the stored forwards from the state that they left. Raises: JobError for state that matters."""
        for handle in self._handles:
            handle.remove()
        calls, self._calls, self._handles = self._calls, {}, []
        for model, call in calls.items():

            def run(given: Any, model: nn.Module = model) -> tuple[float, ...]:
                args, kwargs = copy_of(given)
                with torch.no_grad():
                    leaves = tree_leaves(model(*args, **kwargs))
                return tuple(float(bits_checksum([leaf])) for leaf in leaves if isinstance(leaf, Tensor))

            one, other = functools.partial(run, call), functools.partial(run, turned(call))
            with NoTrace(model, {}) as isolation:
                first = one()
                find_state(isolation, other, one, first, self._allow_state)
