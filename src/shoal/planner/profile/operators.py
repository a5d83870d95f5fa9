"""Costs of operators and of an optimizer on any device: FLOPs, sizes of products, bytes moved, number of kernels.

FLOPs of products, convolutions and fused attention count, two per multiply-add, as in torch's FlopCounterMode.
Bytes are those of the operands in memory: a view moves nothing, and an expanded tensor reads its base.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.planner.profile.kernels import SAVED_VECTORS
from shoal.planner.profile.trace import OperatorEvent, OperatorRecorder, OperatorTrace, StorageRef
from shoal.planner.profile.values import ALIGNED, Amount, Operation, OperationKind, Phase
from shoal.training.update.job_optimizer import Parameters, on_matrices
from shoal.training.update.optimizer_step import fused


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Cost of one kernel of an event, for the traced samples.

    `reread_bytes`: bytes that a GPU reads again, beside `read_bytes`.
    `of_weight`: True if the kernel computes a weight's gradient in an event that also computes other gradients.
    """

    kind: OperationKind = OperationKind.MEMORY
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    batch: float = 1.0
    launches: int = 1
    of_weight: bool = False
    window: tuple[int, ...] = ()
    winograd: bool = False
    rows: tuple[str, ...] = ()
    reread_bytes: float = 0.0


def costs(event: OperatorEvent) -> list[KernelCost]:
    """Return the costs of an event's kernels; an empty list if it runs none."""
    if event.name == "stand_in" or event.is_view or event.name in _FREE or not (event.outputs or event.written):
        return []
    special, operands = _COSTS.get(event.name), PRODUCTS.get(event.name)
    if operands is not None:
        return _product(event, *(event.inputs[i] for i in operands))
    return special(event) if special is not None else [_moves(event)]


# ------------------------------------------------------------------------------------------------------------ memory


def _named(names: str) -> frozenset[str]:
    """Return the qualified names of torch operators."""
    return frozenset(f"aten.{name}" for name in names.split())


_FREE = _named(
    """
    empty empty_strided empty_like new_empty new_empty_strided set_ resize_ detach_ _local_scalar_dense
    _assert_tensor_metadata _assert_async _has_compatible_shallow_copy_type
    """
)
# In-place operators that do not read the previous values.
_FILLS = _named(
    """
    fill_ zero_ copy_ bernoulli_ normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ arange_
    """
)
# Lookups: of the first operand, the table, they read as many bytes as they return.
_LOOKUPS = _named("embedding index index_select gather take _embedding_bag")
# Scatters: they read and write as many bytes of the table as their last operand has.
_SCATTERS = _named(
    """
    index_put_ _index_put_impl_ index_add_ scatter_add_ scatter_ index_copy_ scatter_reduce_ index_fill_
    """
)
# Operators that use `self` only for its shape.
_UNREAD = _named(
    """
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward nll_loss_backward nll_loss2d_backward
    nll_loss_forward avg_pool2d_backward _adaptive_avg_pool2d_backward full_like zeros_like ones_like rand_like
    randn_like new_zeros new_full new_ones
    """
)
# Two passes, statistics and then results: the input is too large to stay in the cache between them.
_TWICE = _named(
    """
    native_batch_norm _native_batch_norm_legit native_batch_norm_backward cudnn_batch_norm _batch_norm_with_update
    batch_norm_backward native_group_norm native_group_norm_backward
    """
)
# Softmaxes of rows that a GPU's block cannot keep in its 48 KiB of shared memory: torch's kernels read the row for its
# maximum, its sum and its results, and backward the gradient (and the result) for a sum first (SoftMax.cu). Times that
# they read as many bytes as they write once more.
_ROW_BYTES = 48 << 10
_REREAD = {
    "aten._log_softmax": 2,
    "aten._softmax": 2,
    "aten._log_softmax_backward_data": 1,
    "aten._softmax_backward_data": 2,
}
_LAUNCHES = {
    "aten.native_layer_norm_backward": 2,
    "aten.native_batch_norm": 2,
    "aten.native_batch_norm_backward": 2,
    "aten.embedding_dense_backward": 3,
    "aten.nll_loss_backward": 2,
    "aten.index_put_": 3,
    "aten.slice_backward": 2,
    "aten.select_backward": 2,
    "shoal_profiling.rms_norm_backward": 2,
}


def _once(refs: list[StorageRef]) -> int:
    """Return the total bytes of these tensors, with identical views counted once."""
    return sum({(r.key, r.offset, r.shape, r.stride): r.num_bytes for r in refs}.values())


def _moves(event: OperatorEvent) -> KernelCost:
    """Return the cost of an operator that reads its operands and writes its results."""
    own = {i.key for i in event.inputs}
    changed = [event.inputs[i] for i in sorted(event.written)]
    if event.name.startswith("aten._fused_") and event.arguments.get("grad_scale") is None:
        untouched = {id(ref) for ref in event.arguments.get("grads", ())}  # they are written only to unscale them
        changed = [ref for ref in changed if id(ref) not in untouched]
    written = _once([o for o in event.outputs if o.key not in own] + changed)
    unread = event.arguments.get("self") if event.name in _UNREAD else None
    inputs = [r for r in event.inputs if r is not unread]
    if event.name in _FILLS:
        inputs = [r for i, r in enumerate(event.inputs) if i not in event.written]
    if event.name in _LOOKUPS:
        read = _once(inputs[1:]) + min(inputs[0].num_bytes, written)
    elif event.name in _SCATTERS:
        values = inputs[-1].num_bytes
        read, written = _once(inputs[1:]) + values, values
    else:
        read = _once(inputs)
    if event.name in _TWICE:
        read *= 2
    launches, again = _LAUNCHES.get(event.name, 1), 0.0
    if event.name in _REREAD:
        output = event.outputs[0]
        if output.shape and output.shape[event.arguments["dim"]] * output.itemsize > _ROW_BYTES:
            again = float(_REREAD[event.name] * written)
    return KernelCost(read_bytes=float(read), written_bytes=float(written), reread_bytes=again, launches=launches)


# ---------------------------------------------------------------------------------------------------------- products


# Products of two matrices, or of batches of them, with the indices of both operands.
PRODUCTS = {"aten.mm": (0, 1), "aten.bmm": (0, 1), "aten.addmm": (1, 2), "aten.baddbmm": (1, 2)}


def _product(event: OperatorEvent, left: StorageRef, right: StorageRef) -> list[KernelCost]:
    *batch, m, k = left.shape
    n, count, moved = right.shape[-1], math.prod(batch), _moves(event)
    matrices = (left, "m", "k"), (right, "k", "n"), (event.outputs[0], "m", "n")
    rows = tuple(sorted({_row(*matrix) for matrix in matrices} - {""}))
    flops = 2.0 * (m * n * k * count)
    read, written = moved.read_bytes, moved.written_bytes
    return [KernelCost(OperationKind.MATMUL, flops, read, written, m, n, k, count, rows=rows)]


def _row(ref: StorageRef, outer: str, inner: str) -> str:
    """Return the size along which a matrix' rows lie in memory, or "" if padding keeps the rows aligned.

    Padded rows and column slices are as aligned as the distance between rows (the leading dimension in cuBLAS).
    """
    (height, width), (down, along) = ref.shape[-2:], ref.stride[-2:]
    if 1 not in (down, along):  # the matrix is copied before the product
        return inner
    name, length, distance = (outer, height, along) if down == 1 != along else (inner, width, down)
    return "" if distance > length and distance % ALIGNED == 0 else name


def _grouped(event: OperatorEvent) -> list[KernelCost]:
    """Return the cost of a grouped product, whose groups divide the rows, the columns or (weight gradients) the sum."""
    left, right = event.inputs[:2]
    if len(left.shape) == len(right.shape) == 3:
        return _product(event, left, right)
    m, n, k = float(left.shape[-2]), float(right.shape[-1]), float(left.shape[-1])
    flops, moved = 2.0 * m * n * k, _moves(event)
    groups = next(ref for ref in (*event.outputs, left, right) if len(ref.shape) == 3).shape[0]
    if len(event.outputs[0].shape) == 3:
        k /= groups
    elif len(left.shape) == 2:
        m /= groups
    else:
        n /= groups
    return [KernelCost(OperationKind.MATMUL, flops, moved.read_bytes, moved.written_bytes, m, n, k, groups)]


class ConvolutionShape(NamedTuple):
    """Sizes of a convolution as an implicit matmul per group, and what selects its kernel.

    `pixels`: positions at which the weight is applied. `first`: the weight's first dim per group, which is the input's
    channels if transposed. `reach`: taps times the second dim. `window`: as in `Operation.window`.
    """

    pixels: int
    first: int
    reach: int
    groups: int
    kind: OperationKind
    winograd: bool
    window: tuple[int, ...]

    @classmethod
    def of(cls, event: OperatorEvent, input: StorageRef, weight: StorageRef, output: StorageRef) -> ConvolutionShape:
        """Return the shape of a forward or backward.

        Depthwise convolutions do too few products per number read, so memory limits them. Winograd's algorithm applies
        to 3 x 3 taps. Only plain two-dimensional convolutions have a window.
        """
        transposed, groups = event.arguments["transposed"], int(event.arguments["groups"])
        strides, paddings, dilations = (event.arguments[name] for name in ("stride", "padding", "dilation"))
        grid = input if transposed else output
        pixels = grid.shape[0] * math.prod(grid.shape[2:])
        (outer, inner), taps = weight.shape[:2], weight.shape[2:]
        is_plain = groups == 1 and not transposed
        window: tuple[int, ...] = ()
        if is_plain and len(taps) == 2:
            window = inner, outer, taps[1], output.shape[3], strides[-1], paddings[-1] // dilations[-1]
        depthwise = groups > 1 and inner == 1
        kind = OperationKind.MEMORY if depthwise else OperationKind.CONVOLUTION
        winograd = is_plain and taps == (3, 3) and set(strides) == set(dilations) == {1}
        return cls(pixels, outer // groups, inner * math.prod(taps), groups, kind, winograd, window)


def _convolution(event: OperatorEvent) -> list[KernelCost]:
    input, weight = event.inputs[:2]
    m, n, k, groups, kind, winograd, window = ConvolutionShape.of(event, input, weight, event.outputs[0])
    if event.arguments["transposed"]:
        n, k = k, n
    moved, flops = _moves(event), 2.0 * m * n * k * groups
    sizes = m, n, k, groups
    return [KernelCost(kind, flops, moved.read_bytes, moved.written_bytes, *sizes, window=window, winograd=winograd)]


def _convolution_backward(event: OperatorEvent) -> list[KernelCost]:
    output, input, weight = (event.arguments[name] for name in ("grad_output", "input", "weight"))
    m, first, reach, groups, kind, winograd, window = ConvolutionShape.of(event, input, weight, output)
    flops = 2.0 * m * first * reach * groups
    of_input, of_weight, of_bias = event.arguments["output_mask"]
    results = list(event.outputs)
    kernels = []
    if of_input:
        read, written = output.num_bytes + weight.num_bytes, results.pop(0).num_bytes
        sizes = m, reach, first, groups
        kernels.append(KernelCost(kind, flops, read, written, *sizes, window=window, winograd=winograd))
    if of_weight:
        read, written = output.num_bytes + input.num_bytes, results.pop(0).num_bytes
        sizes = first, reach, m, groups
        kernels.append(KernelCost(kind, flops, read, written, *sizes, of_weight=True, window=window, winograd=winograd))
    if of_bias:
        kernels.append(KernelCost(read_bytes=output.num_bytes, written_bytes=results.pop(0).num_bytes, of_weight=True))
    return kernels


# --------------------------------------------------------------------------------------------------------- attention

# A causal mask keeps half of the scores, and fused kernels skip the blocks of the other half.
_CAUSAL = 0.5


def _attention(event: OperatorEvent) -> list[KernelCost]:
    """Return the cost of two products forward, or five backward.

    The backward computes the scores again, and the gradients of q, k, v and the attention weights.
    """
    backward = event.name.endswith("_backward")
    query, key, value = event.inputs[1:4] if backward else event.inputs[:3]
    *batch, m, width = query.shape
    n, count, moved = key.shape[-2], math.prod(batch), _moves(event)
    # Three of the five backward products run over the width of q and k, two over the width of v; one each forward.
    widths = 3 * width + 2 * value.shape[-1] if backward else width + value.shape[-1]
    flops = 2.0 * (_CAUSAL if event.arguments.get("is_causal") else 1.0) * count * m * n * widths
    return [KernelCost(OperationKind.ATTENTION, flops, moved.read_bytes, moved.written_bytes, m, n, width, count)]


# ----------------------------------------------------------------------------------------------------------- LSTMs


def _lstm(event: OperatorEvent) -> Iterator[KernelCost]:
    """Yield the kernels of each layer and direction: one product for all inputs, and one per step for the state."""
    input, backward = event.arguments["input"], event.name.endswith("backward")
    samples, steps = input.shape[:2] if event.arguments["batch_first"] else (input.shape[1], input.shape[0])
    matrices = [w for w in event.arguments["weights"] if len(w.shape) == 2]
    for of_input, of_state in zip(matrices[::2], matrices[1::2], strict=True):
        (gates, width), hidden, size = of_input.shape, of_state.shape[1], of_input.itemsize

        def matmul(m: int, n: int, k: int, of_weight: bool = False, size: int = size) -> KernelCost:
            read, written = (m * k + n * k) * size, m * n * size
            return KernelCost(OperationKind.MATMUL, 2.0 * m * n * k, read, written, m, n, k, of_weight=of_weight)

        vectors = steps * samples * hidden * size
        few, many = 5.0 * vectors, (2.0 + SAVED_VECTORS) * vectors
        if not backward:
            yield matmul(steps * samples, gates, width)
            for _ in range(steps):
                yield matmul(samples, gates, hidden)
            yield KernelCost(read_bytes=few, written_bytes=many, launches=steps)
            continue
        yield KernelCost(read_bytes=many, written_bytes=few, launches=steps)
        for _ in range(steps):
            yield matmul(samples, hidden, gates)
        yield matmul(steps * samples, width, gates)
        yield matmul(gates, width, steps * samples, of_weight=True)
        yield matmul(gates, hidden, steps * samples, of_weight=True)


_COSTS: dict[str, Callable[[OperatorEvent], list[KernelCost]]] = {
    "aten._grouped_mm": _grouped,
    "aten.convolution": _convolution,
    "aten._convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "shoal_profiling.attention": _attention,
    "shoal_profiling.attention_backward": _attention,
    "shoal_profiling.lstm": lambda event: list(_lstm(event)),
    "shoal_profiling.lstm_backward": lambda event: list(_lstm(event)),
}
_COSTS |= {
    f"aten._scaled_dot_product_{kind}{suffix}": _attention
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    for suffix in ("", "_backward")
}


# -------------------------------------------------------------------------------------------------------- optimizers

# Number of parameters in the traced step; the others cost the same per element.
_FEW = 6
# Tensors in one kernel of torch's multi_tensor_apply. A kernel takes fewer large tensors (320 chunks of 65536
# elements), but those kernels start without Python between them and run 100 times longer than a launch takes.
_TENSORS_A_LAUNCH = 30


@dataclass(frozen=True)
class OptimizerCost:
    """Cost of an optimizer step; `note` is set if the cost is a guess.

    `state_bytes_per_element`: bytes of state for each trainable element. `passes`: reads and writes of each element.
    `products`: matmuls of optimizers such as Muon; `launches` of each is their number in a step.
    `whole`: elements of parameters that the optimizer is known to need whole.
    """

    state_bytes_per_element: float = 8.0
    passes: float = 7.0
    launches: int = 0
    note: str | None = None
    products: tuple[Operation, ...] = ()
    whole: int = 0


def update(
    make: Callable[[Any], Any], model: nn.Module, mode: contextlib.AbstractContextManager[Any], device: str
) -> OptimizerCost:
    """Return the cost of the second step of the torch-style optimizer `make(parameters)`."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        return OptimizerCost(0.0, 0.0, 0)
    text = ""
    try:
        for capturable in (False, True):  # True for optimizers whose step count is a tensor that cannot be read here
            try:
                with mode, torch.no_grad():
                    return _measured(make(Parameters(model)), [p for _, p in named], device, capturable)
            except Exception as error:
                text = text or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return OptimizerCost(note=f"the optimizer could not be traced, and counts as a fused Adam: {text}")
    finally:
        for _, parameter in named:
            parameter.grad = None


def _measured(optimizer: Any, parameters: list[nn.Parameter], device: str, capturable: bool) -> OptimizerCost:
    """Return the cost of the second step on the largest parameters, extrapolated to all."""
    choosing = [g for g in optimizer.param_groups if "foreach" in g and g["foreach"] is None and not g.get("fused")]
    if device != "cpu":
        for group in choosing:
            group["foreach"] = True  # torch's default if all parameters are on a GPU
    for group in optimizer.param_groups:
        if "capturable" in group and capturable:
            group["capturable"] = True
    largest = sorted(parameters, key=lambda p: -p.numel())[:_FEW]
    for parameter in largest:
        parameter.grad = torch.empty_like(parameter)
    trace = OperatorTrace(1)
    # The same optimizer step as in the engine's fast mode (training/update/optimizer_step.py).
    kinds = (nn.Parameter, Tensor, FakeTensor)
    with _capturable_anywhere(), fused(optimizer, kinds) if device == "cpu" else contextlib.nullcontext():
        optimizer.step()
        with OperatorRecorder(trace):
            optimizer.step()
    launches, moved_bytes, multiplies = 0.0, 0.0, False
    for event in trace.events:
        lists = (v for v in event.arguments.values() if isinstance(v, list) and v and isinstance(v[0], StorageRef))
        length = len(next(lists, []))
        for cost in costs(event):
            if cost.kind is OperationKind.MATMUL:
                multiplies = True
            else:
                moved_bytes += cost.read_bytes + cost.written_bytes
            if "_foreach_" in event.name or "_fused_" in event.name:
                launches += max(1, -(-len(parameters) * length / len(largest) // _TENSORS_A_LAUNCH))
            else:
                launches += len(parameters) / len(largest)
    elements = sum(p.numel() for p in largest)
    state = [v for p in largest for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    width = sum(p.numel() * p.itemsize for p in largest) / elements
    per_element = sum(t.nbytes for t in state) / elements, moved_bytes / elements / width
    for parameter in largest:
        parameter.grad = None
    products = _products(optimizer, parameters) if multiplies else ()
    whole = sum(p.numel() for p in on_matrices(optimizer))
    return OptimizerCost(*per_element, round(launches), products=products, whole=whole)


def _products(optimizer: Any, parameters: list[nn.Parameter]) -> tuple[Operation, ...]:
    """Return the matmuls of an update, from a step of one parameter of each shape."""
    products: Counter[Operation] = Counter()
    for shape, count in Counter(parameter.shape for parameter in parameters).items():
        one = next(parameter for parameter in parameters if parameter.shape == shape)
        trace = OperatorTrace(1)
        one.grad = torch.empty_like(one)
        with OperatorRecorder(trace):
            optimizer.step()
        one.grad = None
        for event in trace.events:
            for cost in costs(event):
                if cost.kind is OperationKind.MATMUL:
                    m, n, k, batch = (Amount(size) for size in (cost.m, cost.n, cost.k, cost.batch))
                    own = Operation(event.name, "", cost.kind, Phase.FORWARD, m=m, n=n, k=k, batch=batch)
                    own = replace(own, dtype=event.outputs[0].dtype)
                    products[own] += count
    return tuple(replace(own, launches=count) for own, count in products.items())


@contextlib.contextmanager
def _capturable_anywhere() -> Iterator[None]:
    """Allow `capturable` on the CPU, whose fake tensors stand for an accelerator's here."""
    name = "_get_capturable_supported_devices"
    changed = [m for key, m in sys.modules.items() if key.startswith("torch.optim.") and hasattr(m, name)]
    allowed = getattr(sys.modules["torch.optim.optimizer"], name)

    def devices(*args: Any, **kwargs: Any) -> list[str]:
        return [*allowed(*args, **kwargs), "cpu"]

    for module in changed:
        setattr(module, name, devices)
    try:
        yield
    finally:
        for module in changed:
            setattr(module, name, allowed)
