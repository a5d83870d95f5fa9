"""Closures of optimizers that compute the loss several times in a step, such as LBFGS and SAM."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.parallel.base import StepSums


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's `step` needs a closure, with which it computes the loss several times."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs = closure is not None and closure.default is closure.empty
    if closure is not None and not needs:  # step() may reject a closure of None, by an assertion or an error
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            step = ast.parse(textwrap.dedent(inspect.getsource(type(optimizer).step))).body[0]
            tests = [
                (node.test, "closure is None" if isinstance(node, ast.If) else "closure is not None")
                for node in getattr(step, "body", ())  # top level only
                if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise))
            ]
            needs = any(ast.unparse(test) == wanted for test, wanted in tests)
    return needs or isinstance(optimizer, torch.optim.LBFGS)


class Closure:
    """Closure of one optimizer step: sets `.grad` to the mean gradient, and returns the mean loss, float64 [].

    Its first call returns what the step has computed, unless the optimizer has changed a parameter or a gradient.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        loss: float,
        again: Callable[[], StepSums],
        mean_gradient: Callable[[float, float], object],
    ) -> None:
        """Set what computes the loss. `mean_gradient`: divides and clips gradients, from the mean loss and weight."""
        self._parameters, self._loss, self._again, self._mean_gradient = parameters, loss, again, mean_gradient
        self._own_gradients()
        # The values, since torch counts no changes of `parameter.data`.
        self._before: list[Tensor] | None = [p.detach().clone() for p in parameters]
        self._gradients = self._seen()

    def __call__(self) -> Tensor:
        """Return the mean loss at the parameters' present values. Collective: all ranks."""
        before, self._before = self._before, None
        if before is None or self._gradients != self._seen() or not all(map(torch.equal, before, self._parameters)):
            with torch.enable_grad():
                sums = self._again()
            self._loss = sums.loss
            self._mean_gradient(sums.loss, sums.weight)
            self._own_gradients()
        return torch.tensor(self._loss, dtype=torch.float64)

    def _own_gradients(self) -> None:
        """Move the gradients out of the memory of the next evaluation: an optimizer may keep them."""
        for parameter in self._parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad.detach().clone()

    def _seen(self) -> list[tuple[int, int]]:
        return [(id(g), g._version) for p in self._parameters if (g := p.grad) is not None]
