"""Function tracing: torch functions and their tensors in one run of a loss on a copy of its model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.numerics.no_trace import NoTrace
from shoal.numerics.operators import replace_leaves, tensors_in
from shoal.parallel.model.value_free import ValueFree, twin

DROPOUTS = (F.dropout, torch.dropout)


@dataclass(frozen=True)
class FunctionCall:
    """Call of a torch function: its arguments, the tensors among them, and the tensors that it returned."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]
    results: list[Tensor]

    @property
    def name(self) -> str:
        """The function's Python name."""
        return str(getattr(self.func, "__name__", self.func))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


def dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> tuple[Tensor, float, bool, bool]:
    """Return a dropout call's tensor and probability, whether it drops anything, and whether it works in place."""
    return input, p, (training if train is None else train) and p > 0.0, inplace


class FunctionTrace(TorchFunctionMode):
    """Context that records calls of torch functions. It keeps their tensors alive, so that ids stay unique."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: list[Tensor] = []
        self._sources: dict[int, Any] = {}  # by id of a tensor: the sources that it was computed from
        self._handles: list[Any] = []

    def seen(self, call: FunctionCall) -> None:
        """Record a call that has returned."""
        raise NotImplementedError

    def mark(self, tensor: Tensor, sources: Any) -> None:
        """Record a tensor's sources."""
        self._alive.append(tensor)
        self._sources[id(tensor)] = sources

    def hook(self, module: nn.Module, after: Callable[..., None], before: Callable[..., None] | None = None) -> None:
        """Call `before(module, args, kwargs)` and `after(module, args, output)` around a module's forward."""
        if before is not None:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(after))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        call = FunctionCall(func, args, kwargs, tensors_in((args, kwargs)), tensors_in(result))
        self._alive += call.results
        self.seen(call)
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._alive.clear()


@contextlib.contextmanager
def on_copies(
    model: nn.Module, loss: Callable[..., Any], batch: Any, values: Callable[[str], Tensor] | None
) -> Iterator[tuple[nn.Module, Any]]:
    """Return a context to run a loss on copies of a model and a batch.

    Integers of the batch have their values in both cases. The run leaves no trace, for example in a cache of a
    function.
    """

    def real(name: str, tensor: Tensor) -> Tensor:
        assert values is not None
        return values(name).detach().to("cpu", tensor.dtype, copy=True)

    with NoTrace(model, {"loss": loss}), torch.enable_grad():
        if values is not None:
            yield twin(model, real), replace_leaves(batch, Tensor, lambda leaf: leaf.detach().cpu())
            return
        value_free = ValueFree()
        with value_free.running():
            yield (
                twin(model, lambda _, t: value_free.fake(t)),
                replace_leaves(batch, Tensor, value_free.fake_or_integers),
            )
