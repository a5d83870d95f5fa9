"""Choice of the memory format of images on CPUs, from what a job's model computes of two samples.

It depends on the job alone, never on devices, times or threads: any number of processes chooses the same.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.data.source import MapSource, Opened, small_batch
from shoal.distributed.failures import user_error
from shoal.errors import ShoalError
from shoal.job import Job
from shoal.numerics.isolation import generators_kept
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.numerics.operators import tensors_in
from shoal.numerics.precision import Precision
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.computation import LossPair

_aten = torch.ops.aten

# Forward and backward on one thread of an Intel Xeon (Sapphire Rapids), torch 2.13.0: what channels last gains or
# costs over channels first. benchmarks/memory_format.py measures the nets that the rule is proven on.
_MAX_POOL_SECONDS, _AVERAGE_POOL_SECONDS = 24e-9, 14e-9  # gained for an output of 2 x 2 pixels
_MANY_TAPS = 4  # an output of more pixels gains no less
# Lost for a weight in each microbatch: kernels take it in another order, which larger layers pay more for.
_WEIGHT_SECONDS, _MORE_SECONDS, _MOST_WEIGHT_SECONDS = 1.5e-9, 1e-9 / 150e3, 12e-9  # more for each weight beside it
# Lost besides by large layers for a weight and pixel: other kernels, up to 2.5 times slower.
_LARGE_WEIGHTS, _LARGE_SECONDS = 1e6, 0.055e-9
_COPIED_SECONDS = 1.5e-9  # lost for an element that is put in order again, as before a linear layer
# Of the step besides: a core's products, forward and twice backward, and passes over activations.
_FLOPS_PER_SECOND, _PRODUCTS, _ELEMENT_SECONDS = 100e9, 3, 2e-9
# What is gained has to be twice what is lost, and a part of the step that other kernels' differences do not undo.
_TIMES_LOST, _LEAST_SHARE = 2.0, 0.05
# Of a loss and of all gradients together. Kernels that add in another order differ by some float32 units, 1e-6; through
# a norm over two samples by a thousand times that. A model that takes pixels for channels differs by its size.
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 1e-3, 1e-2


@dataclass(frozen=True)
class FormatChoice:
    """Memory format of images, and a line for people where there is something to tell."""

    channels_last: bool = False
    note: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """The line, if there is one."""
        return (self.note,) if self.note else ()


def choose_format(job: Job, model: nn.Module, precision: Precision, data: Opened) -> FormatChoice:
    """The format for a job where nobody says. Leaves model and generators as they were.

    model: with values, as it is trained. It computes two samples, and that only with convolutions in 2 dims.
    """
    source = data.source
    if precision.device.type != "cpu" or not precision.is_wide or not isinstance(source, MapSource):
        return FormatChoice()
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return FormatChoice()
    with generators_kept(), contextlib.suppress(Exception):  # what raises here a step will tell of
        batch = small_batch(source, data.collate, data.bad_samples)
        if any(leaf.ndim == 4 and leaf.dtype == torch.float32 for leaf in tensors_in(batch)):
            grains = job.grain_size / min(len(source), 2)
            with NoTrace(model, {"loss": job.loss}) as kept:
                return _tried(_FormatTrial(model, LossPair(job.loss, precision), precision, batch, kept), grains)
    return FormatChoice()


def agreed_format(job: Job, held: ShardedModel, precision: Precision, data: Opened) -> FormatChoice:
    """The format that all ranks can have: `choose_format` of each. Collective: all ranks, one JSON gather."""
    own = choose_format(job, held.model, precision, data)
    told = [FormatChoice(**document) for document in held.mesh.gather_json(asdict(own))]
    return next((choice for choice in told if not choice.channels_last), told[0])


def _tried(trial: _FormatTrial, microbatch: float) -> FormatChoice:
    """The choice for a microbatch of so many times the trial's samples."""
    try:
        if not trial.operators().is_worth(microbatch):
            return FormatChoice()
        last = trial.gradients(channels_last=True)
    except Exception as caught:
        trial.gradients(channels_last=False)  # raises as well where it is not the format's doing
        error = caught if isinstance(caught, ShoalError) else user_error("a backward", caught)
        raised = error.conflict.removeprefix("it raised ")
        return FormatChoice(note=f"{_FIRST}; with them last the model or loss raises {raised}")
    if not _same(trial.gradients(channels_last=False), last):
        return FormatChoice(note=f"{_FIRST}; with them last the model computes something else, or draws otherwise")
    return FormatChoice(channels_last=True, note=_LAST)


_FIRST = "images lie in memory with their channels first"
_LAST = (
    "images lie in memory with their channels last, so that this model's pools take less time; to refuse it write "
    "execution.channels_last = false in a plan file"
)


@dataclass(frozen=True)
class _FormatTrial:
    model: nn.Module
    pair: LossPair
    precision: Precision
    batch: Any
    kept: NoTrace

    def operators(self) -> ImageOperators:
        """The operators of a forward with channels last."""
        found = ImageOperators()
        with self._apart(), torch.enable_grad(), found:  # the loss may differentiate
            self.pair(self.model, replace(self.precision, channels_last=True).inputs(copy_of(self.batch)))
        return found

    def gradients(self, *, channels_last: bool) -> list[Tensor]:
        """The loss, and the gradients of all parameters that have one."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with self._apart(), torch.enable_grad():
            precision = replace(self.precision, channels_last=channels_last)
            total, _ = self.pair(self.model, precision.inputs(copy_of(self.batch)))
            found = torch.autograd.grad(total, parameters, allow_unused=True)
        return [total.detach(), *(g for g in found if g is not None)]

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """A context after which all is as before; dropout, whose masks differ, drops nothing."""
        self.kept.restore()
        dropping = [m for m in self.model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for module in dropping:
                    module.training = False
                yield
            finally:
                for module in dropping:
                    module.training = True
                self.kept.restore()


class ImageOperators(TorchDispatchMode):
    """Recorder of the operators on images in a forward, priced for both formats; seconds of forward and backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler for the first operator: over a second

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gained = self.lost = self.rest = 0.0  # for the samples that are computed
        self.lost_by_weights = 0.0  # for a microbatch of any size

    def is_worth(self, microbatch: float) -> bool:
        """Whether channels last gains time in a microbatch of so many times the samples, and so in larger ones."""
        gained, lost = self.gained * microbatch, self.lost * microbatch + self.lost_by_weights
        step = self.rest * microbatch + gained
        return gained >= _TIMES_LOST * lost and gained > _LEAST_SHARE * step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        out = found[0] if isinstance(found, tuple) else found
        if isinstance(out, Tensor) and out.ndim == 4:
            self.rest += out.numel() * _ELEMENT_SECONDS
            self._price(func._overloadpacket, args, out)
        return found

    def _price(self, kind: Any, args: Any, out: Tensor) -> None:
        if kind in (_aten.max_pool2d_with_indices, _aten.avg_pool2d):
            of_output = _MAX_POOL_SECONDS if kind is _aten.max_pool2d_with_indices else _AVERAGE_POOL_SECONDS
            taps = min(_MANY_TAPS, math.prod(args[1]) if len(args[1]) > 1 else args[1][0] ** 2)
            if not args[0].is_contiguous():  # else the model has put them in order, and nothing is gained
                self.gained += out.numel() * of_output * taps / _MANY_TAPS
        elif kind is _aten.convolution:
            self._price_convolution(args[1], out)
        elif kind is _aten.clone:
            self.lost += out.numel() * _COPIED_SECONDS

    def _price_convolution(self, weight: Tensor, out: Tensor) -> None:
        count, pixels = weight.numel(), out.shape[0] * math.prod(out.shape[2:])
        self.rest += 2.0 * count * pixels * _PRODUCTS / _FLOPS_PER_SECOND
        each = _WEIGHT_SECONDS
        if math.prod(weight.shape[2:]) > 1:  # else both orders are one
            each = min(_MOST_WEIGHT_SECONDS, _WEIGHT_SECONDS + count * _MORE_SECONDS)
            self.lost += count * pixels * _LARGE_SECONDS if count > _LARGE_WEIGHTS else 0.0
        self.lost_by_weights += count * each


def _same(first: list[Tensor], last: list[Tensor]) -> bool:
    """Whether losses and gradients are equal but for rounding."""
    (loss, *own), (other, *others) = first, last
    if len(own) != len(others) or not math.isclose(float(loss), float(other), rel_tol=_LOSS_TOLERANCE):
        return False
    size = math.fsum(float(g.double().square().sum()) for g in own)
    apart = math.fsum(float((a.double() - b.double()).square().sum()) for a, b in zip(own, others, strict=True))
    return apart <= _GRADIENT_TOLERANCE**2 * size
