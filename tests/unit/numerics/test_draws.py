"""Distributions from random words: as asked for, and the same whatever the grains."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.draws import exponential, normal, uniform
from shoal.numerics.grain_randomness import GrainScope
from shoal.numerics.hashed_draws import element_keys, row_keys
from shoal.numerics.hashed_draws import words as hashed_words
from shoal.plans.grains import divide

ROWS, ELEMENTS = 512, 513  # a number of elements that fills no whole word
COUNT = ROWS * ELEMENTS
# Six standard errors of a mean of COUNT numbers of variance 1: passed by one draw in 5e8.
FAR = 6.0 / math.sqrt(COUNT)


def words(elements: int = ELEMENTS) -> Tensor:
    return hashed_words(row_keys(3, 5, np.arange(ROWS)), element_keys(elements, torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers(dtype: torch.dtype) -> None:
    found = uniform(words(), dtype).double()
    assert float(found.min()) >= 0.0
    assert float(found.max()) < 1.0
    step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    assert abs(float(found.mean()) - 0.5) < FAR / math.sqrt(12.0) + step
    assert abs(float(found.var()) - 1 / 12) < FAR + step


def test_normal_numbers() -> None:
    found = normal(words(512), torch.float64)
    assert found.shape == (ROWS, 512)
    assert abs(float(found.mean())) < FAR
    assert abs(float(found.var()) - 1.0) < FAR * math.sqrt(2.0)
    assert abs(float((found**4).mean()) - 3.0) < FAR * math.sqrt(96.0)
    assert abs(float((found[:, 0::2] * found[:, 1::2]).mean())) < FAR * math.sqrt(2.0)
    assert torch.isfinite(found).all()


def test_exponential_numbers() -> None:
    found = exponential(words(), torch.float64)
    assert float(found.min()) > 0.0
    assert abs(float(found.mean()) - 1.0) < FAR
    assert abs(float(found.var()) - 1.0) < FAR * math.sqrt(8.0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.alpha_dropout(x, 0.3, training=True),
        lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.dropout1d(x, 0.3),
        lambda x: F.gumbel_softmax(x)[..., :1],
    ],
)
def test_other_functions_have_torchs_means(draw: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4096, 8, 4, generator=torch.Generator().manual_seed(1)).double()
    with GrainScope(1, 2, divide(4096, 4096, 8)):
        found = draw(x)
    torch.manual_seed(1)
    expected = draw(x)
    # Whole channels of 4 elements are drawn together, so a mean has a quarter of the numbers.
    error = 6.0 * math.sqrt(8.0 / (4096 * 8))
    assert abs(float(found.mean() - expected.mean())) < error
    assert abs(float(found.square().mean() - expected.square().mean())) < 4 * error


def test_masks_do_not_depend_on_the_number_of_grains() -> None:
    x = torch.ones(64, 5)
    found = []
    for num_grains in (16, 32, 64):
        with GrainScope(1, 2, divide(64, 64, num_grains)):
            found.append(F.dropout(x, 0.5))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_scope_is_torchs_where_nothing_is_dropped(mask: str, grouped: bool) -> None:
    query, key, value = (torch.randn(8, heads, 6, 4) for heads in ((4, 2, 2) if grouped else (4, 4, 4)))
    seen = torch.ones(8, 1, 6, 6, dtype=torch.bool)
    seen[:, :, :, 4:] = False
    seen[3, :, 2] = False
    given = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": torch.randn(6, 6)},
    }[mask]
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=grouped, **given)
    with GrainScope(1, 2, divide(8, 8, 8)) as scope:
        found = F.scaled_dot_product_attention(
            query, key, value, dropout_p=2**-40, scale=0.3, enable_gqa=grouped, **given
        )
    assert scope.calls == 1
    torch.testing.assert_close(found, expected)
