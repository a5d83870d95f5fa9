"""Default number of grains of a job, from its model and a few samples. It depends on no device and no measurement.

A grain is the smallest microbatch. The estimate of a sample's activation bytes is positions times features, in float32.
Positions are tokens, or patches, frames or pixels after the first layer's stride. Features are the elements that all
modules compute at one position. The estimate only ranks jobs: it ignores attention matrices and the smaller number of
positions in deeper layers.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from shoal.data.opened import training_data
from shoal.data.source import MapSource, Opened, small_batch
from shoal.jobs.job import Job
from shoal.numerics.generators import generators_kept
from shoal.numerics.operators import tensors_in
from shoal.parallel.model.deferred_init import deferred
from shoal.parallel.model.value_free import construction
from shoal.parallel.model.wrappers import unwrapped
from shoal.plans.grains import FEW_GRAINS, default_grains
from shoal.training.setup.job_model import lazy_names, whole

_FLOAT_BYTES = 4
# Number of samples to read, spread over the data: ragged samples differ, and a batch is as long as its longest sample.
_LOOKED_AT = 8
# Classes of torch and Keras, by name: an import of Keras would be slow for jobs that do not use it.
_BATCH_NORMS = {"_BatchNorm", "BatchNormalization"}
_DIMS_OF_TOKENS = 2
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class GrainsChoice:
    """Number of grains, and the reason in words."""

    num_grains: int
    why: str


def with_grains(job: Job) -> Job:
    """Return the job with its number of grains, the default if the job has none. Raises: errors of the job's data."""
    return replace(job, grains=grains_of(job, outline(job)).num_grains) if job.grains is None else job


def grains_of(job: Job, model: nn.Module | None, data: Opened | None = None) -> GrainsChoice:
    """Return the number of grains of a job, and the reason.

    `model`: the job's model on any device, or None if `outline` failed. In this case a deferred construction is tried.
    Raises: DataError if the data cannot be opened.
    """
    if job.grains is not None:
        return GrainsChoice(job.grains, "as the job says")
    if not job.fuse:
        return GrainsChoice(FEW_GRAINS, "default where the loss compares the samples of a grain")
    model = model or deferred_outline(job)
    if model is None:
        return GrainsChoice(FEW_GRAINS, "default; the model's size is not known before it is built")
    for name, module in model.named_modules():
        if module.training and any(base.__name__ in _BATCH_NORMS for base in type(module).__mro__):
            return GrainsChoice(FEW_GRAINS, f"default where batch statistics need samples ({name})")
    # A batch of a few samples. Errors are left to the first step, and the global generators stay unchanged.
    opened_data = data or training_data(job)
    source, batch, count = opened_data.source, None, 2
    with generators_kept(), contextlib.suppress(Exception):
        if isinstance(source, MapSource):
            count = min(len(source), _LOOKED_AT)
            batch = source.looked_at(np.arange(count) * len(source) // count)
        else:
            batch = small_batch(source, opened_data.collate)
    if batch is None:
        return GrainsChoice(FEW_GRAINS, "default; no sample could be looked at ahead")
    sample_bytes = float(_FLOAT_BYTES * positions_of(model, batch, count) * features_of(model))
    num_grains = default_grains(job.global_batch, sample_bytes)
    weight = "light" if num_grains == FEW_GRAINS else "heavy"
    unit, size = next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if sample_bytes >= size), ("kB", 1e3))
    activations = f"about {sample_bytes / size:.3g} {unit} of activations each"
    return GrainsChoice(num_grains, f"default for {weight} samples: {activations}")


def outline(job: Job) -> nn.Module | None:
    """Return the job's model on the meta device, or None if its constructor computes with values."""
    try:
        with construction(), unwrapped():
            model = job.model()
        if lazy_names(model):  # their shapes need a forward with values
            with generators_kept():
                model = whole(job.model(), job if job.grains is not None else replace(job, grains=1)).to("meta")
    except Exception:
        return None
    return model if isinstance(model, nn.Module) else None


def deferred_outline(job: Job) -> nn.Module | None:
    """Return the job's model with deferred initial values, or None if its construction cannot be deferred."""
    try:
        with unwrapped():
            model = deferred(job.model, job.seed)[0]
    except Exception:
        return None
    return None if lazy_names(model) else model


def features_of(model: nn.Module) -> int:
    """Return the number of elements that all modules with parameters compute at one position of a sample."""
    count = 0
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        matrices = [p.shape[0] for p in own if p.ndim > 1]
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            count += module.embedding_dim
        else:
            count += sum(matrices) if matrices else max((p.numel() for p in own), default=0)
    return count


def positions_of(model: nn.Module, batch: Any, num_samples: int) -> int:
    """Return a sample's number of positions: tokens if the model has embeddings, else outputs of its first layer."""
    embeds = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
    per_position = 0  # input elements of the first layer for each of its output positions
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            per_position = module.in_channels * math.prod(module.stride)
        elif isinstance(module, nn.Linear):
            per_position = module.in_features
        elif isinstance(module, nn.RNNBase):
            per_position = module.input_size
        else:
            continue
        break
    positions = [1]
    for leaf in tensors_in(batch):
        elements = -(-leaf.numel() // num_samples)
        # Integers with more dims are pixels, or classes of pixels.
        if not leaf.is_floating_point() and leaf.ndim <= _DIMS_OF_TOKENS:
            positions.append(elements if embeds else 1)
        elif per_position:
            positions.append(elements // per_position)
    return max(positions)
