"""Value-free execution: floating-point tensors have only shapes; integers that follow from shapes have values.

Every run of a model that needs shapes and no values is one of these two:

- `construction`: the user's constructor runs on the meta device, and makes a model without values;
- `ValueFree`: the model, or a copy of it, and the loss run on fake tensors. The profiler, the traces for tensor,
  context and pipeline parallelism, and the traced optimizer step run in it.

`deferred_init` is no third one: its construction records how to compute the values.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import JobError
from shoal.numerics.isolation import without_modes
from shoal.numerics.no_trace import NoTrace, refresh_recurrent
from shoal.numerics.operators import is_random, replace_leaves, roles, storage_key, tensors_in

# Largest result with values: a mask of 16,384 by 16,384 positions.
_MOST_BYTES = 1 << 28


class ValueFree:
    """One run without values: the fake mode, and the fake tensors on `device` that stand for a model and its batch.

    The fake tensors are not on the meta device: only fake tensors follow autocast as real tensors on their device do.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = torch.device(device)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return the context to run in: operators on shapes alone, except for integers that follow from shapes."""
        with self.mode, IntegerEvaluation():
            yield

    def fake(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a fake tensor of the same shape and strides, in `dtype` if the tensor is floating-point."""
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode and wanted == tensor.dtype:
            return tensor
        with unset_fake_temporarily():  # otherwise each takes 0.3 ms, for an element that is a fake tensor itself
            meta = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=wanted, device="meta")
            return FakeTensor(self.mode, meta, self._device)

    def fake_or_integers(self, tensor: Tensor) -> Tensor:
        """Return a batch's tensor: a copy of integers on the CPU, a fake tensor of others."""
        if _is_real(tensor):
            return self.fake(tensor)
        with unset_fake_temporarily():
            return tensor.detach().to("cpu", copy=True)

    def fakes_of(self, value: Any) -> Any:
        """Return a value with fake tensors that require the same gradients; a repeated tensor stays one tensor."""
        fakes: dict[int, Tensor] = {}

        def fake(leaf: Tensor) -> Tensor:
            if id(leaf) not in fakes:
                fakes[id(leaf)] = self.fake(leaf).requires_grad_(leaf.requires_grad)
            return fakes[id(leaf)]

        return replace_leaves(value, Tensor, fake)

    @contextlib.contextmanager
    def in_place(self, module: nn.Module, users: Mapping[str, object]) -> Iterator[dict[str, Tensor]]:
        """Return a context in which the module's own tensors are fake; it yields the fake tensors by name.

        The run changes nothing: `NoTrace` restores the module and the `users`, and modes of the caller are off.
        """
        fakes: dict[int, Tensor] = {}
        named: dict[str, Tensor] = {}
        homes: list[tuple[dict[str, Any], str, Tensor]] = []
        with NoTrace(module, users), without_modes():
            for prefix, part in module.named_modules():
                for home in (part._parameters, part._buffers):
                    for key, tensor in home.items():
                        if tensor is not None:
                            if id(tensor) not in fakes:
                                fakes[id(tensor)] = self.fake(tensor).requires_grad_(tensor.requires_grad)
                            homes.append((home, key, tensor))
                            named[f"{prefix}.{key}" if prefix else key] = fakes[id(tensor)]
            try:
                for home, key, tensor in homes:
                    home[key] = fakes[id(tensor)]
                refresh_recurrent(module.modules())
                yield named
            finally:
                for home, key, tensor in homes:
                    home[key] = tensor
                refresh_recurrent(module.modules())


def twin(model: nn.Module, stand_in: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy with `stand_in(name, tensor)` for parameters and buffers; shared tensors stay shared."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = nn.Parameter(stand_in(name, parameter), requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = stand_in(name, buffer)
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def construction() -> Iterator[None]:
    """Return a context in which a constructor makes a model on the meta device, and its initializers do nothing."""
    with torch.device("meta"), _Undrawn():
        yield


_DRAWS = {Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_}
_DRAWS |= {Tensor.normal_, Tensor.random_, Tensor.uniform_}


class _Undrawn(TorchFunctionMode):
    """Mode in which initializers do nothing to tensors on the meta device.

    There, torch draws through a Python function that imports its compiler, which takes 2.6 s on two cores.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class IntegerEvaluation(TorchDispatchMode):
    """Context over a FakeTensorMode that computes operators on integers and booleans that are not fake tensors.

    Masks and positions are such tensors, and code reads them: `mask.all()`, `lengths.max().item()`. The results depend
    on shapes or the batch, not on the model's values. Random, large and floating-point results stay fake, and so do
    results of fake tensors. An integer tensor counts as fake after a write from a fake tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = False
        self._unseen = _Unseen(self)
        self._spoilt: dict[int, Any] = {}  # storages, kept alive so that no other storage gets their key

    def __enter__(self) -> IntegerEvaluation:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._unseen.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        self._unseen.__exit__(*raised)  # type: ignore[no-untyped-call]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _SHAPES.get(func)
        if rule is not None:
            return rule(*args, **kwargs)
        if func is torch.ops.aten.embedding.default and self._has_values(args[1]):
            weight, indices = args[:2]  # a run would discover a missing row only in its first step
            with unset_fake_temporarily():
                low, high = (int(end) for end in indices.aminmax()) if indices.numel() else (0, 0)
            rows = weight.shape[0]
            if low < 0 or high >= rows:
                raise JobError(
                    given=f"an embedding of {rows:,} rows",
                    conflict=f"the model looks up row {low if low < 0 else high:,} of it: positions and tokens are "
                    f"counted from 0 to {rows - 1:,}",
                    remedy=f"use samples of at most {rows:,} tokens where its rows are positions (--seq), tokens below "
                    f"{rows:,} where they are words; or a model with a larger table",
                )
        if not func._schema.is_mutable and any(isinstance(argument, FakeTensor) for argument in args):
            return func(*args, **kwargs)  # the most frequent case, without a walk through arguments
        if self.paused or not all(map(self._has_values, tensors_in((args, kwargs)))) or is_random(func):
            for tensor in roles(func, args, kwargs)[0]:  # written, and from here on without values
                self._spoilt[storage_key(tensor)] = tensor.untyped_storage()
            return func(*args, **kwargs)
        try:
            fake = func(*args, **kwargs)
        except Exception:  # its result's shape, or what it returns, depends on the values
            fake = None
        if any(_is_real(t) or t.untyped_storage().nbytes() > _MOST_BYTES for t in tensors_in(fake)):
            return fake
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _has_values(self, tensor: Tensor) -> bool:
        return not (_is_real(tensor) or isinstance(tensor, FakeTensor) or storage_key(tensor) in self._spoilt)


class _Unseen(TorchFunctionMode):
    """Context that pauses the evaluation of integers within torch functions that return no integers.

    Otherwise a causal mask of 8,192 positions, computed again in each layer, would take most of a trace's time.
    """

    def __init__(self, evaluation: IntegerEvaluation) -> None:
        super().__init__()
        self._evaluation = evaluation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        before, self._evaluation.paused = self._evaluation.paused, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._evaluation.paused = before


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return an empty result of `F.grouped_mm`: its meta kernel supports only bfloat16 (torch 2.13)."""
    if left.ndim == right.ndim == 2:
        assert offs is not None
        return left.new_empty(len(offs), left.shape[0], right.shape[1])
    batch = left.shape[:1] if left.ndim == right.ndim else ()
    return left.new_empty(*batch, left.shape[-2], right.shape[-1])


_SHAPES: dict[Any, Callable[..., Tensor]] = {torch.ops.aten._grouped_mm.default: _grouped_mm}
