"""Detection of state outside of buffers in a user's own loop, by a repetition of the models' first forwards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.numerics.checksum import bits_checksum
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.training.microbatch.look import LATER_STEPS, find_state, turned


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
            with NoTrace(model, {}) as kept:
                first = one()
                find_state(kept, other, one, first, self._allow_state)
