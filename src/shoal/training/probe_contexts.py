"""Contexts in which a model is probed: without gradients and warnings, and in wider dtypes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from shoal.numerics.batch_statistics import StepBuffers


@contextlib.contextmanager
def probing(buffers: StepBuffers, device: torch.device) -> Iterator[None]:
    """A context without gradients, warnings and TF32 (CUDA's default in convolutions: too coarse to tell a sum)."""
    cuda = device.type == "cuda"
    rounding = torch.backends.cudnn.flags(enabled=True, allow_tf32=False) if cuda else contextlib.nullcontext()
    with rounding, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            buffers.restore()


@contextlib.contextmanager
def widened(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A context in which parameters and buffers of fewer bits than the dtype's are copies of themselves in it."""
    # A forward may put another tensor in a buffer's place.
    homes = [(m._buffers, key, buffer) for m in model.modules() for key, buffer in m._buffers.items()]
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    tensors = [t for t in tensors if t.itemsize < dtype.itemsize]
    narrow = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for home, key, buffer in homes:
            home[key] = buffer
        for tensor, data in zip(tensors, narrow, strict=True):
            tensor.data = data
