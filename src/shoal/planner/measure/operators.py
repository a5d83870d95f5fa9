"""Benchmarks of operators that are slower than a CPU core's memory bandwidth, by the bytes that they move.

Activation functions, norms and pools take longer than a stream of the same bytes through memory. The bytes are those
that a profile counts for the operator, so both have the same meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from shoal.hardware.values import CHANNELS_LAST
from shoal.numerics.precision import channels_last
from shoal.planner.measure.probes import Call, Make, Probe
from shoal.planner.profile.operators import costs
from shoal.planner.profile.trace import OperatorRecorder, OperatorTrace

# A matrix and images of equal size: small enough for a core's caches, large compared to the cost of a call.
_ROWS, _WIDTH = 512, 256
_IMAGES = (8, 64, 16, 16)
_aten = torch.ops.aten


def operators() -> Iterator[Probe]:
    """Yield a probe for each operator, with the operator's name; the optimizer's step is named "update"."""
    makes = [*_elementwise(), *_rows(), *_images(torch.randn), *_moves(), _update]
    last = list(_images(lambda *shape: channels_last(torch.randn(*shape))))
    for make, kind in (*((make, "") for make in makes), *((make, CHANNELS_LAST) for make in last)):
        call, trace = make(), OperatorTrace(1)
        with torch.no_grad(), OperatorRecorder(trace):
            call()
        kernels = [(event.name, cost) for event in trace.events for cost in costs(event)]
        name = "update" if any("_fused_" in name for name, _ in kernels) else kernels[0][0]
        work = sum(cost.read_bytes + cost.written_bytes for _, cost in kernels)
        yield Probe(f"operator.{name}{kind}", work, make, graph=False, operand_bytes=work)


def _matrix() -> Tensor:
    return torch.randn(_ROWS, _WIDTH)


def _elementwise() -> Iterator[Make]:
    for forward in (_aten.gelu, _aten.silu, _aten.sigmoid, _aten.tanh, _aten.exp):
        yield lambda forward=forward: partial(forward, _matrix())  # type: ignore[misc]
    for backward in (_aten.gelu_backward, _aten.silu_backward, _aten.sigmoid_backward, _aten.tanh_backward):
        yield lambda backward=backward: partial(backward, _matrix(), _matrix())  # type: ignore[misc]
    yield lambda: partial(_aten.threshold_backward, _matrix(), _matrix(), 0)
    yield lambda: partial(Tensor.bernoulli_, _matrix(), 0.9)
    yield lambda: partial(Tensor.random_, _matrix().long(), -(2**63), None)


def _rows() -> Iterator[Make]:
    classes = torch.arange(_ROWS) % _WIDTH

    def normed(call: Callable[..., Call]) -> Make:
        weight, bias = torch.ones(_WIDTH), torch.zeros(_WIDTH)
        return lambda: call(_matrix(), weight, bias)

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
        return partial(_aten.native_layer_norm, x, [_WIDTH], weight, bias, 1e-5)

    def backward(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
        _, mean, spread = _aten.native_layer_norm(x, [_WIDTH], weight, bias, 1e-5)
        wanted = [True, True, True]
        return partial(_aten.native_layer_norm_backward, x, x, [_WIDTH], mean, spread, weight, bias, wanted)

    yield normed(forward)
    yield normed(backward)
    for softmax in (_aten._softmax, _aten._log_softmax):
        yield lambda softmax=softmax: partial(softmax, _matrix(), -1, False)  # type: ignore[misc]
    for backwards in (_aten._softmax_backward_data, _aten._log_softmax_backward_data):
        yield lambda backwards=backwards: partial(  # type: ignore[misc]
            backwards, _matrix(), torch.softmax(_matrix(), -1), -1, torch.float32
        )
    yield lambda: partial(_aten.sum.dim_IntList, _matrix(), [0], True)
    yield lambda: partial(_aten.embedding, _matrix(), classes)
    yield lambda: partial(_aten.embedding_dense_backward, _matrix(), classes, _WIDTH, -1, False)


def _images(random: Callable[..., Tensor]) -> Iterator[Make]:
    channels = _IMAGES[1]

    def image() -> Tensor:
        return random(*_IMAGES)

    def pooled() -> Tensor:
        return random(*_IMAGES[:2], _IMAGES[2] // 2, _IMAGES[3] // 2)

    def norm_backward() -> Call:
        x, weight, nothing = image(), torch.ones(channels), torch.zeros(channels)
        _, mean, spread = _aten.native_batch_norm(x, weight, nothing, nothing, weight, True, 0.1, 1e-5)
        rest = (weight, nothing, weight, mean, spread, True, 1e-5, [True, True, True])
        return partial(_aten.native_batch_norm_backward, image(), x, *rest)

    def norm() -> Call:
        ones, zeros = torch.ones(channels), torch.zeros(channels)
        return partial(_aten.native_batch_norm, image(), ones, zeros, zeros.clone(), ones.clone(), True, 0.1, 1e-5)

    def most_backward() -> Call:
        x = image()
        places = _aten.max_pool2d_with_indices(x, [2, 2], [2, 2])[1]
        window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
        return partial(_aten.max_pool2d_with_indices_backward, pooled(), x, *window, places)

    yield norm
    yield norm_backward
    yield lambda: partial(_aten.avg_pool2d, image(), [2, 2], [2, 2])
    yield lambda: partial(_aten.avg_pool2d_backward, pooled(), image(), [2, 2], [2, 2], [0, 0], False, True, None)
    yield lambda: partial(_aten.max_pool2d_with_indices, image(), [2, 2], [2, 2])
    yield most_backward


def _moves() -> Iterator[Make]:
    """Yield copies that change the order in memory, as between the heads and positions of attention."""

    def turned() -> Call:
        x = torch.randn(_ROWS // 64, 64, 4, _WIDTH // 4).transpose(1, 2)
        return lambda: x.clone(memory_format=torch.contiguous_format)

    yield turned


def _update() -> Call:
    """Return the work on gradients: their norm, a scaling, and a fused optimizer step with state."""
    sizes = [1 << 20, 1 << 20, 1 << 18, 1 << 10]
    parameters, gradients, state = ([torch.randn(n) for n in sizes] for _ in range(3))

    def call() -> None:
        torch._foreach_norm(gradients)
        torch._foreach_mul_(gradients, 0.999)
        torch._fused_sgd_(
            parameters,
            gradients,
            state,
            weight_decay=0.0,
            momentum=0.9,
            lr=1e-6,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    return call
