"""Tensor files: what is written piece by piece is what the library reads, and for one dtype what it writes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from shoal.checkpoint.tensor_file import tensor_file_chunks

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn),
]


def test_every_dtype_comes_back() -> None:
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), 'a "name"/é': torch.ones(1)}
    found = load(b"".join(tensor_file_chunks(tensors)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].tolist() == tensor.tolist(), name


def test_of_one_dtype_it_is_what_the_library_writes() -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(7), "c/d": torch.tensor(1.0)}
    assert b"".join(tensor_file_chunks(tensors)) == save(tensors)


def test_a_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4)
    *_, content = tensor_file_chunks({"x": tensor})
    tensor.fill_(1.0)
    assert bytes(content) == torch.ones(4).numpy().tobytes()


def test_a_dtype_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError):
        list(tensor_file_chunks({"x": torch.zeros(1, dtype=torch.complex128)}))
