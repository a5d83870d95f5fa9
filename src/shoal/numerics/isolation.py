"""Contexts that suspend torch's modes and hooks, and restore them at their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shoal.numerics.generators import generators_kept, python_generators_kept


class ReentrantContext(AbstractContextManager[None]):
    """Context that can be entered any number of times, each time with a new context from `make`."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._now = self._make()
        self._now.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._now.__exit__(*error)


class YieldingHooks(torch.autograd.graph.saved_tensors_hooks):
    """Hooks on saved tensors that are inactive within transforms of torch.func, which do not support such hooks.

    Tensors that a transform saves do not pass through the hooks.
    """

    def __enter__(self) -> None:
        super().__enter__()
        self._disabled = torch.autograd.graph.disable_saved_tensors_hooks
        torch.autograd.graph.disable_saved_tensors_hooks = self._aside  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        torch.autograd.graph.disable_saved_tensors_hooks = self._disabled
        super().__exit__(*error)

    @contextmanager
    def _aside(self, message: str) -> Iterator[None]:
        """Run `disable_saved_tensors_hooks` with these hooks removed, if they are the innermost ones."""
        innermost = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if innermost is None or innermost[0] is not self.pack_hook:  # raises if other hooks are active
            with self._disabled(message):
                yield
            return
        super().__exit__()
        try:
            with self._disabled(message):
                yield
        finally:
            super().__enter__()


@contextmanager
def without_modes() -> Iterator[None]:
    """Suspend every mode that watches or changes what torch computes, for a trial run of a model.

    Python's and numpy's generators are restored, because libraries that a trial uses may draw from them.
    """
    modes = []
    while torch.overrides._get_current_function_mode() is not None:
        modes.append(torch.overrides._pop_mode())
    try:
        with python_generators_kept(), _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run operations without the caller's modes, gradients and CPU autocast, and restore the generators."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        generators_kept(),
    ):
        yield
