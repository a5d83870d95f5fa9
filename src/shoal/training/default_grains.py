"""Default number of grains of a job, from its model and a few samples: never from devices, nor from a measurement.

A grain is the smallest microbatch. The bytes of activations that a sample leaves for its backward are estimated as its
positions (tokens; patches, frames or pixels after the first layer's stride) times the features that the model's modules
give at each, in float32. The estimate only orders jobs: it counts neither attention matrices nor what a model computes
at fewer positions further down.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.data.opened import training_data
from shoal.data.source import MapSource, Opened, small_batch
from shoal.job import Job
from shoal.numerics.isolation import generators_kept
from shoal.numerics.operators import tensors_in
from shoal.parallel.model.deferred_init import deferred
from shoal.parallel.model.wrappers import unwrapped
from shoal.plans.grains import FEW_GRAINS, default_grains
from shoal.training.lazy_modules import lazy_names, whole

_FLOAT_BYTES = 4
# Samples that are looked at, spread over the data: ragged ones differ, and a batch is as long as its longest.
_LOOKED_AT = 8
# Of torch and of Keras; by name, since importing Keras to ask would load what nobody uses.
_BATCH_NORMS = {"_BatchNorm", "BatchNormalization"}
_DIMS_OF_TOKENS = 2
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class GrainsChoice:
    """Number of grains, and the reason in words."""

    num_grains: int
    why: str


def with_grains(job: Job) -> Job:
    """The job with its number of grains, for hand-made engines. Raises: what its data raise."""
    return replace(job, grains=grains_of(job, outline(job)).num_grains) if job.grains is None else job


def grains_of(job: Job, model: nn.Module | None, data: Opened | None = None) -> GrainsChoice:
    """Number of grains of a job; `model` is its own, on whatever device, None where it could not be outlined.

    Where the constructor computes with values, as much of it as can be put off is. Raises: DataError of data that
    cannot be opened.
    """
    if job.grains is not None:
        return GrainsChoice(job.grains, "as the job says")
    if not job.fuse:
        return GrainsChoice(FEW_GRAINS, "default where the loss compares the samples of a grain")
    model = model or deferred_outline(job)
    if model is None:
        return GrainsChoice(FEW_GRAINS, "default; the model's size is not known before it is built")
    statistics = next((name for name, module in model.named_modules() if _normalises_batches(module)), None)
    if statistics is not None:
        return GrainsChoice(FEW_GRAINS, f"default where batch statistics need samples ({statistics})")
    samples = _samples(data or training_data(job))
    if samples is None:
        return GrainsChoice(FEW_GRAINS, "default; no sample could be looked at ahead")
    positions = positions_of(model, *samples)
    sample_bytes = float(_FLOAT_BYTES * positions * features_of(model))
    found = default_grains(job.global_batch, sample_bytes)
    weight = "light" if found == FEW_GRAINS else "heavy"
    return GrainsChoice(found, f"default for {weight} samples: about {_bytes(sample_bytes)} of activations each")


def outline(job: Job) -> nn.Module | None:
    """The job's model without values; None where its constructor computes with them, and only building it tells."""
    try:
        with torch.device("meta"), _Undrawn(), unwrapped():
            model = job.model()
        if lazy_names(model):  # whose shapes a forward with values gives
            with generators_kept():
                model = whole(job.model(), job if job.grains is not None else replace(job, grains=1)).to("meta")
    except Exception:
        return None
    return model if isinstance(model, nn.Module) else None


_DRAWS = {Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_}
_DRAWS |= {Tensor.normal_, Tensor.random_, Tensor.uniform_}


class _Undrawn(TorchFunctionMode):
    """Mode in which initializers leave tensors without values as they are.

    On the meta device torch draws by a function in Python that imports its compiler: 2.6 s on two cores.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or getattr(func, "__module__", None) == "torch.nn.init":
            given = args[0] if args else kwargs.get("tensor")
            if isinstance(given, Tensor) and given.is_meta:
                return given
        return func(*args, **kwargs)


def _normalises_batches(module: nn.Module) -> bool:
    return module.training and any(base.__name__ in _BATCH_NORMS for base in type(module).__mro__)


def deferred_outline(job: Job) -> nn.Module | None:
    """The outline of a model whose constructor computes with values, as far as that can be put off."""
    try:
        with unwrapped():
            model = deferred(job.model, job.seed)[0]
    except Exception:
        return None
    return None if lazy_names(model) else model


def features_of(model: nn.Module) -> int:
    """Elements that the modules with parameters give at one position of a sample, all together."""
    return sum(map(_features, model.modules()))


def _features(module: nn.Module) -> int:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.embedding_dim
    own = [p for p in module._parameters.values() if p is not None]
    matrices = [p.shape[0] for p in own if p.ndim > 1]
    return sum(matrices) if matrices else max((p.numel() for p in own), default=0)


def positions_of(model: nn.Module, batch: Any, num_samples: int) -> int:
    """Positions of a sample: its tokens where the model embeds any, else where its first layer puts features."""
    leaves = tensors_in(batch)
    embeds = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
    per_position = next(_taken_at_a_position(model), 0)
    found = [1]
    for leaf in leaves:
        elements = -(-leaf.numel() // num_samples)
        # Whole numbers of further dims are pixels, or a class for each of them.
        if not leaf.is_floating_point() and leaf.ndim <= _DIMS_OF_TOKENS:
            found.append(elements if embeds else 1)
        elif per_position:
            found.append(elements // per_position)
    return max(found)


def _taken_at_a_position(model: nn.Module) -> Iterator[int]:
    """Elements of a sample for each output position of the layers, first layer first."""
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            yield module.in_channels * math.prod(module.stride)
        elif isinstance(module, nn.Linear):
            yield module.in_features
        elif isinstance(module, nn.RNNBase):
            yield module.input_size


def _samples(data: Opened) -> tuple[Any, int] | None:
    """A batch of some samples and their number; None of an iterator, and of what cannot be read: a step tells why.

    Leaves the global generators as they were.
    """
    source = data.source
    with generators_kept(), contextlib.suppress(Exception):
        if isinstance(source, MapSource):
            count = min(len(source), _LOOKED_AT)
            return source.looked_at(np.arange(count) * len(source) // count), count
        return small_batch(source, data.collate), 2
    return None


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
