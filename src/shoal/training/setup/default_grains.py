"""Default number of grains of a job, from its model and a few samples. It depends on no device and no measurement.

A grain is the smallest microbatch. The estimate of a sample's activation bytes is positions times features, in float32.
Positions are tokens, patches or frames. Features are the elements that all modules compute at one position. The
estimate only ranks jobs: it ignores attention matrices. Layers of a convolutional model differ in their positions, so
its forward is run on the meta device, and the estimate is what autograd saves there, as in the planner's profile.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn

from shoal.data.opened import training_data
from shoal.data.source import MapSource, Opened, small_batch
from shoal.jobs.job import Job
from shoal.numerics.generators import generators_kept
from shoal.numerics.isolation import YieldingHooks, without_modes
from shoal.numerics.no_trace import NoTrace
from shoal.numerics.operators import replace_leaves, storage_key, tensors_in
from shoal.parallel.model.deferred_init import deferred
from shoal.parallel.model.value_free import construction, twin
from shoal.parallel.model.wrappers import unwrapped
from shoal.plans.grains import FEW_GRAINS, default_grains
from shoal.training.setup.job_model import lazy_names, whole

_FLOAT_BYTES = 4
# An upper bound of the tensors that autograd saves for a layer: outputs of the layer, norm, activation and dropout.
_MOST_SAVED = 4
# Number of samples to read, spread over the data: ragged samples differ, and a batch is as long as its longest sample.
_LOOKED_AT = 8
# Classes of torch and Keras, by name: an import of Keras would be slow for jobs that do not use it.
_BATCH_NORMS = {"_BatchNorm", "BatchNormalization"}
_DIMS_OF_TOKENS = 2
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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
    feature_bytes = _FLOAT_BYTES * features_of(model)
    sample_bytes = float(positions_of(model, batch, count) * feature_bytes)
    if is_convolutional(model):
        elements = max((-(-leaf.numel() // count) for leaf in tensors_in(batch)), default=1)
        if default_grains(job.global_batch, _MOST_SAVED * elements * feature_bytes) > FEW_GRAINS:  # else light anyway
            sample_bytes = saved_bytes(job.loss, model, batch) / count or sample_bytes
    num_grains = default_grains(job.global_batch, sample_bytes)
    weight = "light" if num_grains == FEW_GRAINS else "heavy"
    unit, size = next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if sample_bytes >= size), ("kB", 1e3))
    activations = f"about {sample_bytes / size:.3g} {unit} of activations each"
    return GrainsChoice(num_grains, f"default for {weight} samples: {activations}")


def outline(job: Job) -> nn.Module | None:
    """Return the job's model on the meta device, or None if its constructor computes with values."""
    try:
        with construction(), unwrapped(), warnings.catch_warnings():
            # A model() that loads a state dict loads nothing here, and all of it in the run.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
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


def is_convolutional(model: nn.Module) -> bool:
    """Return True if a layer after the first one is a convolution, so that layers differ in their positions."""
    kinds = (*_CONVOLUTIONS, *_TRANSPOSED)
    layers = [module for module in model.modules() if isinstance(module, (*kinds, nn.Linear, nn.RNNBase))]
    return any(isinstance(layer, kinds) for layer in layers[1:])


def saved_bytes(loss: Callable[[Any, Any], Any], model: nn.Module, batch: Any) -> int:
    """Return the bytes that autograd saves in a forward of a batch, or 0 if the model cannot run on the meta device.

    The meta device has shapes and no values, so nothing is computed and the model stays unchanged. The first forward
    there takes a second or two, in which torch imports its kernels' shapes.
    """
    saved: dict[int, UntypedStorage] = {}  # kept alive, so that no other storage gets their key
    returned: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_key(tensor)] = tensor.untyped_storage()
        return tensor

    own: list[Tensor] = []
    with NoTrace(model, {"loss": loss}), without_modes(), warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        shapes = twin(model, lambda _, tensor: tensor.detach().to("meta")).train()
        shapes.register_forward_hook(lambda *_: returned.append(True))
        inputs = replace_leaves(batch, Tensor, lambda leaf: leaf.to("meta"))
        own = [*shapes.parameters(), *shapes.buffers(), *tensors_in(inputs)]
        with torch.enable_grad(), torch.device("meta"), YieldingHooks(pack, lambda tensor: tensor):
            loss(shapes, inputs)  # a loss that reads values raises after the model's forward
    for tensor in own:
        saved.pop(storage_key(tensor), None)
    return sum(storage.nbytes() for storage in saved.values()) if returned else 0


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
