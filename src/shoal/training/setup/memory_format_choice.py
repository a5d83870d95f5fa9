"""Choice of the memory format of images on CPUs, from a trial of a job's model with two samples.

The choice depends only on the job, not on devices, times or threads: any number of processes makes the same choice.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.data.source import MapSource, Opened, small_batch
from shoal.distributed.failures import user_error
from shoal.errors import ShoalError
from shoal.jobs.job import Job
from shoal.numerics.generators import generators_kept
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.numerics.operators import tensors_in
from shoal.numerics.precision import Precision
from shoal.training.microbatch.step import LossPair

_aten = torch.ops.aten

# Seconds that channels last gains or loses against channels first, forward and backward, on one thread of an Intel Xeon
# (Sapphire Rapids) with torch 2.13.0. benchmarks/memory_format.py measures the nets that confirm the rule.
_MAX_POOL_SECONDS, _AVERAGE_POOL_SECONDS = 24e-9, 14e-9  # gained per output of a 2 x 2 window
_MANY_TAPS = 4  # larger windows gain no less
# Lost per weight in each microbatch, as kernels reorder weights. The loss per weight grows with the layer.
_WEIGHT_SECONDS, _MORE_SECONDS, _MOST_WEIGHT_SECONDS = 1.5e-9, 1e-9 / 150e3, 12e-9  # base, growth, maximum
# Lost in addition by large layers per weight and pixel: they use other kernels, up to 2.5 times slower.
_LARGE_WEIGHTS, _LARGE_SECONDS = 1e6, 0.055e-9
_COPIED_SECONDS = 1.5e-9  # lost per element that is reordered, as before a linear layer
# The rest of the step: a core's speed, products (one forward, two backward), and passes over activations.
_FLOPS_PER_SECOND, _PRODUCTS, _ELEMENT_SECONDS = 100e9, 3, 2e-9
# The gain must be twice the loss, and a larger share of the step than the differences between other kernels.
_TIMES_LOST, _LEAST_SHARE = 2.0, 0.05
# Relative tolerances for the loss and for all gradients together. Another order of sums changes some float32 units,
# 1e-6; a norm over two samples multiplies that by a thousand. A model that confuses pixels with channels differs by 1.
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 1e-3, 1e-2


@dataclass(frozen=True)
class FormatChoice:
    """Memory format of images, and a line for people or an empty string."""

    channels_last: bool = False
    note: str = ""


def choose_format(job: Job, model: nn.Module, precision: Precision, data: Opened) -> FormatChoice:
    """Return the format for a job if the user does not set it. Model and generators stay unchanged.

    `model`: with values, as it is trained. It computes two samples if it has convolutions in 2 dims.
    """
    source = data.source
    if precision.device.type != "cpu" or not precision.is_wide or not isinstance(source, MapSource):
        return FormatChoice()
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return FormatChoice()
    with generators_kept(), contextlib.suppress(Exception):  # a step reports any error
        batch = small_batch(source, data.collate, data.bad_samples)
        if any(leaf.ndim == 4 and leaf.dtype == torch.float32 for leaf in tensors_in(batch)):
            grains = job.grain_size / min(len(source), 2)
            with NoTrace(model, {"loss": job.loss}) as no_trace:
                return _tried_format(
                    model, LossPair(job.loss, precision), precision, batch, no_trace=no_trace, microbatch=grains
                )
    return FormatChoice()


_FIRST = "images lie in memory with their channels first"
_LAST = (
    "images lie in memory with their channels last, so that this model's pools take less time; to refuse it write "
    "execution.channels_last = false in a plan file"
)


def _tried_format(
    model: nn.Module, pair: LossPair, precision: Precision, batch: Any, *, no_trace: NoTrace, microbatch: float
) -> FormatChoice:
    """Return the choice for a microbatch of `microbatch` times the samples of the batch."""

    @contextlib.contextmanager
    def apart() -> Iterator[None]:
        """Restore everything at the end of the context. Disable dropout within it, since its masks would differ."""
        no_trace.restore()
        dropping = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for module in dropping:
                    module.training = False
                yield
            finally:
                for module in dropping:
                    module.training = True
                no_trace.restore()

    def gradients(*, channels_last: bool) -> list[Tensor]:
        """Return the loss, then the gradients of all parameters that have one."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        with apart(), torch.enable_grad():
            total, _ = pair(model, replace(precision, channels_last=channels_last).inputs(copy_of(batch)))
            own = torch.autograd.grad(total, parameters, allow_unused=True)
        return [total.detach(), *(g for g in own if g is not None)]

    try:
        operators = ImageOperators()
        with apart(), torch.enable_grad(), operators:  # the loss may differentiate
            pair(model, replace(precision, channels_last=True).inputs(copy_of(batch)))
        if not operators.is_worth(microbatch):
            return FormatChoice()
        other_loss, *others = gradients(channels_last=True)
    except Exception as caught:
        gradients(channels_last=False)  # raises too if the format is not the cause
        error = caught if isinstance(caught, ShoalError) else user_error("a backward", caught)
        raised = error.conflict.removeprefix("it raised ")
        return FormatChoice(note=f"{_FIRST}; with them last the model or loss raises {raised}")
    loss, *own = gradients(channels_last=False)
    same = len(own) == len(others) and math.isclose(float(loss), float(other_loss), rel_tol=_LOSS_TOLERANCE)
    if same:
        size = math.fsum(float(g.double().square().sum()) for g in own)
        apart_by = math.fsum(float((a.double() - b.double()).square().sum()) for a, b in zip(own, others, strict=True))
        same = apart_by <= _GRADIENT_TOLERANCE**2 * size
    if not same:
        return FormatChoice(note=f"{_FIRST}; with them last the model computes something else, or draws otherwise")
    return FormatChoice(channels_last=True, note=_LAST)


class ImageOperators(TorchDispatchMode):
    """Recorder of a forward's operators on images. It estimates what channels last gains and loses, in seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes over a second

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gained = self.lost = self.rest = 0.0  # for the samples of the trial
        self.lost_by_weights = 0.0  # per microbatch of any size

    def is_worth(self, microbatch: float) -> bool:
        """Return True if channels last saves time in microbatches of `microbatch` times the samples or more."""
        gained, lost = self.gained * microbatch, self.lost * microbatch + self.lost_by_weights
        step = self.rest * microbatch + gained
        return gained >= _TIMES_LOST * lost and gained > _LEAST_SHARE * step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        out = result[0] if isinstance(result, tuple) else result
        if not (isinstance(out, Tensor) and out.ndim == 4):
            return result
        self.rest += out.numel() * _ELEMENT_SECONDS
        kind = func._overloadpacket
        if kind in (_aten.max_pool2d_with_indices, _aten.avg_pool2d):
            of_output = _MAX_POOL_SECONDS if kind is _aten.max_pool2d_with_indices else _AVERAGE_POOL_SECONDS
            taps = min(_MANY_TAPS, math.prod(args[1]) if len(args[1]) > 1 else args[1][0] ** 2)
            if not args[0].is_contiguous():  # otherwise the model has reordered it, and nothing is gained
                self.gained += out.numel() * of_output * taps / _MANY_TAPS
        elif kind is _aten.convolution:
            weight = args[1]
            count, pixels = weight.numel(), out.shape[0] * math.prod(out.shape[2:])
            self.rest += 2.0 * count * pixels * _PRODUCTS / _FLOPS_PER_SECOND
            each = _WEIGHT_SECONDS
            if math.prod(weight.shape[2:]) > 1:  # otherwise both orders are identical
                each = min(_MOST_WEIGHT_SECONDS, _WEIGHT_SECONDS + count * _MORE_SECONDS)
                self.lost += count * pixels * _LARGE_SECONDS if count > _LARGE_WEIGHTS else 0.0
            self.lost_by_weights += count * each
        elif kind is _aten.clone:
            self.lost += out.numel() * _COPIED_SECONDS
        return result
