"""Proof that a job's model computes the same with its images' channels last, from two samples."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.source import MapSource, Opened, small_batch
from shoal.distributed.failures import user_error
from shoal.errors import ShoalError
from shoal.jobs.job import Job
from shoal.numerics.generators import generators_kept
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.numerics.operators import tensors_in
from shoal.numerics.outputs import microbatch_loss
from shoal.numerics.precision import Precision
from shoal.training.microbatch.loss_pair import LossPair

# Relative tolerances for the loss and for all gradients together. Another order of sums changes some float32 units,
# 1e-6; a norm over two samples multiplies that by a thousand. A model that confuses pixels with channels differs by 1.
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 1e-3, 1e-2


def why_not_channels_last(job: Job, model: nn.Module, precision: Precision, data: Opened) -> str | None:
    """Return why a job cannot be tried with channels last, in words; None if both formats compute the same.

    `model`: with values, as it is trained. It computes two samples in both formats, and stays unchanged.
    """
    precision, source = precision if precision.compute == precision.parameters else precision.wide(), data.source
    if not isinstance(source, MapSource) or not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return NO_IMAGES
    with generators_kept(), contextlib.suppress(Exception):  # a step reports any error
        batch = small_batch(source, data.collate, data.bad_samples)
        if any(leaf.ndim == 4 and leaf.is_floating_point() for leaf in tensors_in(batch)):
            with NoTrace(model, {"loss": job.loss}) as no_trace:
                return _difference(model, LossPair(microbatch_loss(job), precision), precision, batch, no_trace)
    return NO_IMAGES


NO_IMAGES = "no convolution reads images"


def _difference(model: nn.Module, pair: LossPair, precision: Precision, batch: Any, no_trace: NoTrace) -> str | None:
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
        other_loss, *others = gradients(channels_last=True)
    except Exception as caught:
        gradients(channels_last=False)  # raises too if the format is not the cause
        error = caught if isinstance(caught, ShoalError) else user_error("a backward", caught)
        return f"the model or loss raises {error.conflict.removeprefix('it raised ')}"
    loss, *own = gradients(channels_last=False)
    same = len(own) == len(others) and math.isclose(float(loss), float(other_loss), rel_tol=_LOSS_TOLERANCE)
    if same:
        size = math.fsum(float(g.double().square().sum()) for g in own)
        apart_by = math.fsum(float((a.double() - b.double()).square().sum()) for a, b in zip(own, others, strict=True))
        same = apart_by <= _GRADIENT_TOLERANCE**2 * size
    return None if same else "the model computes something else, or draws otherwise"
