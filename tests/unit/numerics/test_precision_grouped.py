"""Grouped products under autocast: cast as other products, or left alone where the kernel would refuse them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.precision import Precision
from shoal.plans.plan import PrecisionSection

OFFSETS = torch.tensor([3, 8], dtype=torch.int32)


def multiplied(wide: int, compute: str, kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """The product of 8 rows with two experts under a plan's precision, what it is of single rows, and a gradient."""
    torch.manual_seed(0)
    rows, experts = torch.randn(8, 16, dtype=kind), torch.randn(2, 16, wide, dtype=kind, requires_grad=True)
    with Precision.of(PrecisionSection(compute=compute), torch.device("cpu")).autocast():
        found = F.grouped_mm(rows, experts, offs=OFFSETS)
    found.float().square().sum().backward()  # torch 2.13 fails on a gradient that is one number expanded
    assert experts.grad is not None
    return found, torch.cat([rows[:3] @ experts[0], rows[3:] @ experts[1]]), experts.grad


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_factors_are_cast_and_gradients_are_of_the_parameters_dtype(compute: str) -> None:
    found, wanted, gradient = multiplied(24, compute)
    error = (found - wanted).detach()
    assert found.dtype == getattr(torch, compute)
    assert gradient.dtype == torch.float32
    assert float(error.norm() / wanted.detach().norm()) < 2**-7  # two roundings to 8 bits, and sums of 16


def test_without_autocast_nothing_is_cast() -> None:
    found, wanted, _ = multiplied(24, "float32")
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted, atol=1e-5)


def test_rows_that_the_kernel_would_refuse_in_fewer_bits_stay() -> None:
    """4 numbers are 16 bytes in float32, and 8 in bfloat16."""
    assert multiplied(4, "bfloat16")[0].dtype == torch.float32


def test_what_asks_for_a_dtype_gets_it() -> None:
    with Precision.of(PrecisionSection(compute="bfloat16"), torch.device("cpu")).autocast():
        found = F.grouped_mm(torch.randn(8, 16), torch.randn(2, 16, 24), offs=OFFSETS, out_dtype=torch.float32)
    assert found.dtype == torch.float32
