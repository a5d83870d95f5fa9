"""The gradient norm is right to 1e-6 at any size and of any kind of tensor, and the same where tensors are whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.numerics.gradient_norm import global_norm, rounded

# Rows of 256 squares in float32 are off by 18 units in the last place at most: see shoal.numerics.gradient_norm.
RELATIVE = 1e-6


def true_norm(gradients: list[Tensor]) -> float:
    dense = [g.to_dense() if g.layout is not torch.strided else g for g in gradients]
    return math.hypot(*(float(g.to(torch.promote_types(g.dtype, torch.float64)).norm()) for g in dense))


@pytest.mark.parametrize("num", [1, 2, 257, 4096, 4097, 65_537, 2_400_000, 9_000_000])
def test_is_right_at_any_size(num: int) -> None:
    torch.manual_seed(num)
    for gradient in (torch.randn(num), torch.full((num,), 0.7)):  # roundings of a constant go one way
        assert global_norm([gradient]) == pytest.approx(true_norm([gradient]), rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("num", [38_600_000, 100_000_000])
def test_is_right_at_large_sizes(num: int) -> None:
    gradient = torch.full((num,), 0.7)
    assert global_norm([gradient]) == pytest.approx(float(gradient[0]) * math.sqrt(num), rel=RELATIVE)


def of_many_kinds() -> dict[str, list[Tensor]]:
    torch.manual_seed(3)
    wide = torch.randn(300, 40)
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 4, 1]]), torch.randn(3, 2000), (6, 2000), check_invariants=True)
    return {
        "none": [],
        "empty": [torch.zeros(0), torch.ones(3)],
        "scalars": [torch.tensor(3.0), torch.tensor(4.0)],
        "narrow": [wide.bfloat16(), wide.half(), torch.full((70_000,), 1.0).half(), torch.ones(3).bfloat16()],
        "float64": [wide.double(), torch.ones(3, dtype=torch.float64)],
        "mixed": [wide, wide.double(), wide.bfloat16(), torch.ones(2)],
        "complex": [torch.randn(90, 60, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64), torch.ones(4)],
        "conjugate": [torch.randn(90, 60, dtype=torch.complex64).conj(), torch.randn(5, dtype=torch.complex128).conj()],
        "sparse": [rows, wide],
        "turned": [wide.t(), torch.randn(8, 16, 9, 9).to(memory_format=torch.channels_last), wide[:, ::2]],
        "spread": [torch.ones(1).expand(5000)],
        "tiny": [wide * 1e-30, torch.ones(2) * 1e-32],
        "subnormal": [torch.full((9000,), 3e-42)],
        "huge": [wide * 1e30, torch.ones(2)],
        "nothing": [torch.zeros(9000), torch.zeros(2)],
    }


@pytest.mark.parametrize("name", of_many_kinds())
def test_is_right_for(name: str) -> None:
    gradients = of_many_kinds()[name]
    assert global_norm(gradients) == pytest.approx(true_norm(gradients), rel=RELATIVE)


@pytest.mark.parametrize("size", [3, 9000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_is_not_finite_where_a_gradient_is_not(bad: float, size: int) -> None:
    gradient = torch.ones(size)
    gradient[1] = bad
    assert not math.isfinite(global_norm([torch.ones(5000), gradient]))


def test_is_the_same_number_however_parameters_are_grouped_or_cut() -> None:
    torch.manual_seed(4)
    gradients = [torch.randn(n) for n in (7, 300, 5000, 70_001, 256 * 600)]
    whole = rounded(global_norm(gradients), {torch.float32})
    stages = math.hypot(global_norm(gradients[:2]), global_norm(gradients[2:]))
    assert rounded(stages, {torch.float32}) == whole
    one_by_one = math.hypot(*(global_norm([g]) for g in reversed(gradients)))
    assert rounded(one_by_one, {torch.float32}) == whole
    cut = math.hypot(*(global_norm([part]) for g in gradients for part in g.tensor_split(3)))
    assert cut == pytest.approx(whole, rel=1e-7)


def test_keeps_more_of_a_float64_model() -> None:
    assert rounded(math.pi, {torch.float32, torch.float64}) == pytest.approx(math.pi, rel=1e-12)
    assert rounded(math.pi, {torch.float32}) == float(torch.tensor(math.pi))
    assert rounded(0.0, {torch.float32}) == 0.0
    assert rounded(1e300, {torch.float32}) == pytest.approx(1e300, rel=1e-7)
    assert rounded(math.inf, {torch.float32}) == math.inf
