"""Recurrent layers as cuDNN runs them: one operator for all layers and steps, with the cost of each product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.planner.profile.events import OperatorEvent, StorageRef
from shoal.planner.profile.operators import KernelCost
from shoal.planner.profile.values import OperationKind

_DEFINED = torch.library.Library("shoal_profiling", "FRAGMENT")
_HOW = "Tensor[] state, Tensor[] weights, int layers, bool both, bool batch_first"
_DEFINED.define(f"lstm(Tensor input, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)")
_DEFINED.define(
    f"lstm_backward(Tensor gradient, Tensor input, Tensor out, Tensor reserve, {_HOW}) -> (Tensor, Tensor[], Tensor[])"
)
_ops = torch.ops.shoal_profiling
# For each step and layer, the backward needs the four gates, the cell and its tanh.
_KEPT_VECTORS = 6


def _lstm(
    input: Tensor, state: list[Tensor], weights: list[Tensor], layers: int, both: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = state[0].shape[-1]
    ways = layers * (1 + both)
    steps = input.numel() // input.shape[-1]
    out = input.new_empty((*input.shape[:-1], hidden * (1 + both)))
    reserve = input.new_empty((ways * steps * hidden * _KEPT_VECTORS,))
    return out, torch.empty_like(state[0]), torch.empty_like(state[1]), reserve


def _lstm_backward(
    gradient: Tensor, input: Tensor, out: Tensor, reserve: Tensor, state: list[Tensor], *rest: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return torch.empty_like(input), [torch.empty_like(s) for s in state], [torch.empty_like(w) for w in rest[0]]


torch.library.register_fake("shoal_profiling::lstm", _lstm, lib=_DEFINED)
torch.library.register_fake("shoal_profiling::lstm_backward", _lstm_backward, lib=_DEFINED)


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        layers, both, batch_first, input, h, c, *weights = given
        out, last_h, last_c, reserve = _ops.lstm(input, [h, c], weights, layers, both, batch_first)
        ctx.how = layers, both, batch_first
        ctx.save_for_backward(input, out, reserve, h, c, *weights)
        return out, last_h, last_c

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, out, reserve, h, c, *weights = ctx.saved_tensors
        found = _ops.lstm_backward(gradients[0], input, out, reserve, [h, c], weights, *ctx.how)
        return None, None, None, found[0], *found[1], *found[2]


def lstm(input: Tensor, state: Any, weights: Any, *options: Any) -> Any:
    """Replace `torch.lstm` for padded sequences.

    `options`: biases, layers, dropout, training, bidirectional, batch first.
    """
    biased, layers, dropout, training, both, batch_first = options
    del biased
    if dropout and training:  # dropout is part of the kernel and saves only bits
        dropout = 0.0
    narrow = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if narrow else input.dtype
    given = [t.to(dtype) for t in (input, *state, *weights)]
    return _LSTM.apply(layers, both, batch_first, *given)  # type: ignore[no-untyped-call]


# --------------------------------------------------------------------------------------------------------------- cost


def costs(event: OperatorEvent) -> list[KernelCost]:
    """Return the kernel costs: one product per layer and direction for all inputs, and one per step for the state."""
    backward = event.name.endswith("backward")
    found = [cost for matrices in _layers(event) for cost in (_late(*matrices) if backward else _early(*matrices))]
    return found


def _layers(event: OperatorEvent) -> Iterator[tuple[StorageRef, StorageRef, int, int]]:
    """Yield (input weight, state weight, steps, samples) for each layer and direction."""
    input, weights = event.arguments["input"], event.arguments["weights"]
    samples, steps = input.shape[:2] if event.arguments["batch_first"] else (input.shape[1], input.shape[0])
    matrices = [w for w in weights if len(w.shape) == 2]
    for first, second in zip(matrices[::2], matrices[1::2], strict=True):
        yield first, second, steps, samples


def _matmul(m: int, n: int, k: int, size: int, of_weight: bool = False) -> KernelCost:
    read, written = (m * k + n * k) * size, m * n * size
    return KernelCost(OperationKind.MATMUL, 2.0 * m * n * k, read, written, m, n, k, of_weight=of_weight)


def _early(first: StorageRef, second: StorageRef, steps: int, samples: int) -> Iterator[KernelCost]:
    (gates, width), hidden, size = first.shape, second.shape[1], first.itemsize
    yield _matmul(steps * samples, gates, width, size)
    for _ in range(steps):
        yield _matmul(samples, gates, hidden, size)
    vectors = steps * samples * hidden * size
    yield KernelCost(read_bytes=5.0 * vectors, written_bytes=(2.0 + _KEPT_VECTORS) * vectors, launches=steps)


def _late(first: StorageRef, second: StorageRef, steps: int, samples: int) -> Iterator[KernelCost]:
    (gates, width), hidden, size = first.shape, second.shape[1], first.itemsize
    vectors = steps * samples * hidden * size
    yield KernelCost(read_bytes=(2.0 + _KEPT_VECTORS) * vectors, written_bytes=5.0 * vectors, launches=steps)
    for _ in range(steps):
        yield _matmul(samples, hidden, gates, size)
    yield _matmul(steps * samples, width, gates, size)
    yield _matmul(gates, width, steps * samples, size, of_weight=True)
    yield _matmul(gates, hidden, steps * samples, size, of_weight=True)
