"""Random operations of a captured graph, which draw by keys that the graph receives as inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from shoal.numerics.grain_randomness import GrainScope, NotFusibleError
from shoal.numerics.hashed_draws import element_keys, noise_of, words
from shoal.plans.grains import Grain


class TracedScope(GrainScope):
    """GrainScope of an operation in a graph. Its numbers are functions of `keys`, int32 [2, rows] for each draw."""

    def __init__(self, sizes: Sequence[int], keys: Iterable[Tensor]) -> None:
        super().__init__(0, 0, [Grain(0, 0, size) for size in sizes])
        self._given = iter(keys)

    def __enter__(self) -> TracedScope:
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        TorchFunctionMode.__exit__(self, *error)

    def words(self, rows: int, elements: int, device: torch.device) -> Tensor:
        keys = self._next_keys(rows)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return words(keys, element_keys(elements, device))

    def noise(self, rows: int, shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        keys, meta = self._next_keys(rows), get_current_meta()
        before = dict(meta)
        meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE  # a mask that is kept for the backward takes a kernel
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                return noise_of(shape, p, dtype, keys, element_keys(math.prod(shape) // rows, device))
        finally:
            meta.clear()
            meta.update(before)

    def generators(self, func: Any, device: torch.device) -> list[torch.Generator]:
        """Raise NotFusibleError, because no graph has a generator."""
        raise NotFusibleError(f"{getattr(func, '__name__', func)} has no form by hash")

    def _next_keys(self, rows: int) -> Tensor:
        self.check_rows(rows)
        self.calls += 1
        return next(self._given)


def calls_by_keys(
    function: Callable[..., Any], sizes: Sequence[int], keys: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int:
    """Return the number of keys of a random function, from a call without values.

    Raises: NotFusibleError if it has no form by keys.
    """
    with torch._C._EnableTorchFunction(), TracedScope(sizes, itertools.repeat(keys)) as scope:
        function(*args, **kwargs)
    return scope.calls


def drawn_by_keys(function: Callable[..., Any], sizes: Sequence[int]) -> Callable[..., Any]:
    """Return a random function of torch's as a function of (keys, *its own arguments)."""

    def drawn(keys: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction(), TracedScope(sizes, keys):
            return function(*args, **kwargs)

    return drawn
