"""Products of narrow numbers in float32: what a processor with instructions for them gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.precision import Precision, ProductsInFloat32, is_slow

NARROW = [torch.bfloat16, torch.float16]


def attention(x: Tensor, w: Tensor) -> Tensor:
    heads = (x @ w).view(2, 4, 8, 4)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def masked(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    heads = (x @ w).view(2, 4, 8, 4) / 4.0  # large scores would enlarge their own rounding
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.view(1, 16, 4, 4), w[:, :, None, None].expand(16, 16, 3, 3), w[0], padding=1)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "matmul": lambda x, w: x @ w,
    "batched": lambda x, w: torch.bmm(x.view(4, 4, 16), w.expand(4, 16, 16)),
    "batched with a summand": lambda x, w: torch.baddbmm(x.view(4, 4, 16), x.view(4, 4, 16), w.expand(4, 16, 16)),
    "convolution": lambda x, w: F.conv2d(
        x.view(1, 16, 4, 4), w[:, :, None, None].expand(16, 16, 3, 3), w[0], padding=1
    ),
    "attention": attention,
    "attention under a mask of numbers": lambda x, w: masked(x, w, x.detach().view(2, 1, 8, 16)[..., :8]),
    "attention under a mask of truths": lambda x, w: masked(x, w, torch.ones(8, 8).tril().bool()),
}


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients_are_rounded_once(name: str, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randn(16, 16).to(kind), torch.randn(16, 16).to(kind)]

    def computed(dtype: torch.dtype) -> list[Tensor]:
        leaves = [value.to(dtype).requires_grad_() for value in values]
        out = PRODUCTS[name](*leaves)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    exact = computed(torch.float64)
    with ProductsInFloat32():
        found = computed(kind)
    for mine, wanted in zip(found, exact, strict=True):
        assert mine.dtype == kind
        # An output is rounded a few times on its way (operands of the backward, and itself).
        assert (mine.double() - wanted).norm() <= 4 * torch.finfo(kind).eps * wanted.norm()


def test_it_is_used_for_forward_and_backward_where_the_processor_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("shoal.numerics.precision.is_slow", lambda kind: kind == torch.bfloat16)
    mixed = Precision(torch.float32, torch.bfloat16, torch.float32, cpu)
    pure = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, cpu)
    other = Precision(torch.float32, torch.float16, torch.float32, cpu)
    gpu = Precision(torch.float32, torch.bfloat16, torch.float32, torch.device("cuda"))
    assert [isinstance(p.products(), ProductsInFloat32) for p in (mixed, pure, other, gpu)] == [
        True,
        True,
        False,
        False,
    ]
    assert not is_slow(torch.float32)
    assert not is_slow(torch.float64)


@pytest.mark.parametrize("kind", NARROW)
def test_an_overflow_stays_one(kind: torch.dtype) -> None:
    large = torch.full((2, 2), torch.finfo(kind).max, dtype=kind)
    with ProductsInFloat32():
        assert (large @ large).isinf().all()


def test_wide_and_mixed_operands_are_left_alone() -> None:
    with ProductsInFloat32():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        with pytest.raises(RuntimeError):
            torch.ones(2, 2, dtype=torch.bfloat16) @ torch.ones(2, 2)
