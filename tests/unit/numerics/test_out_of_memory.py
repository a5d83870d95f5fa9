"""What torch, CUDA and its libraries say where memory ran out."""

from __future__ import annotations

import pytest
import torch

from shoal.numerics.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        # Seen on an H200 whose memory another process had.
        torch.AcceleratorError(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in its documentation"
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["python", "torch", "host", "driver", "cublas"],
)
def test_memory_ran_out(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_another_fault_of_a_device_is_none() -> None:
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("not enough memory"))
