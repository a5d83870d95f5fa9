"""Selective activation checkpointing: results of products and convolutions are saved, the rest is recomputed.

torch's create_selective_checkpoint_contexts does the same, but raises where what was kept is changed in place, as by
the ReLU(inplace=True) after a convolution, and draws other random numbers where it leaves out an operation that draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from shoal.numerics.operators import roles, storage_key, tensors_in

_aten = torch.ops.aten
# What takes time to compute. Everything else reads and writes memory, as keeping its result would.
KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_KEPT = frozenset(getattr(_aten, name).default for name in KEPT_NAMES if hasattr(_aten, name))


@dataclass
class _Result:
    """What one call gave; None where it has to be computed again."""

    value: Any


class SavedResults(TorchDispatchMode):
    """Context around the forward of a block, which saves results; `again` is the one around its recomputation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: dict[Any, list[_Result]] = defaultdict(list)
        self._by_storage: dict[int, _Result] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if self._by_storage and schema is not None and schema.is_mutable:
            for tensor in roles(func, args, kwargs)[0]:
                result = self._by_storage.pop(storage_key(tensor), None)
                if result is not None:
                    result.value = tree_map(_copy, result.value)
        out = func(*args, **kwargs)
        if func in _KEPT:
            result = _Result(None if _draws(func, args, kwargs) else tree_map(_alias, out))
            self.results[func].append(result)
            for tensor in tensors_in(result.value):
                self._by_storage[storage_key(tensor)] = result
        return out

    def forget(self, output: Any) -> None:
        """Drops what the block gives out: whoever has it may change it, and the block itself is done with it."""
        for tensor in tensors_in(output):
            result = self._by_storage.pop(storage_key(tensor), None)
            if result is not None:
                result.value = None
        self._by_storage = {}

    def again(self) -> TorchDispatchMode:
        """Each result serves once; a second recomputation (a graph that is retained) computes everything."""
        return _RecallResults(self.results)


class _RecallResults(TorchDispatchMode):
    def __init__(self, results: dict[Any, list[_Result]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._counts: dict[Any, int] = defaultdict(int)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KEPT:
            number = self._counts[func]
            self._counts[func] += 1
            results = self._results.get(func, [])
            result = results[number] if number < len(results) else _Result(None)
            if result.value is not None:
                value, result.value = result.value, None
                return value
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it moves the generator on, which the recomputation has to do as well."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool((args[number] if number < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0)
    return False


def _alias(value: Any) -> Any:
    """Not the tensor itself, to which autograd ties the graph that made it."""
    return value.detach() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
