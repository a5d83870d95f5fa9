"""Random numbers by position: of the distribution that is asked for, and the same whatever the grains."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.draws import keep_mask, normal, uniform, words_at
from shoal.numerics.grain_randomness import GrainScope
from shoal.plans.grains import divide

ROWS, ELEMENTS = 512, 513  # a number of elements that fills no whole word
COUNT = ROWS * ELEMENTS
# Six standard errors of a mean of COUNT numbers of variance 1: passed by one draw in 5e8.
FAR = 6.0 / math.sqrt(COUNT)


def words(key: int = 3, start: int = 0) -> Tensor:
    return words_at(key, start, ROWS, ELEMENTS)


def test_a_row_is_where_it_is_in_the_stream() -> None:
    whole = words()
    for start, rows in ((0, 1), (7, 3), (500, 12)):
        assert torch.equal(words_at(3, start, rows, ELEMENTS), whole[start : start + rows])
    assert not torch.equal(words(4), whole)
    assert len({tuple(row.tolist()) for row in whole}) == ROWS


def test_bits_are_even_and_rows_unrelated() -> None:
    signs = (words() < 0).double() * 2 - 1
    assert abs(float(signs.mean())) < FAR
    for shift in (1, 2, 64):
        assert abs(float((signs[shift:] * signs[:-shift]).mean())) < 1.2 * FAR
        assert abs(float((signs[:, shift:] * signs[:, :-shift]).mean())) < 1.2 * FAR
    other = (words(4) < 0).double() * 2 - 1
    assert abs(float((signs * other).mean())) < FAR


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 1.0 - 2**-20])
def test_the_share_that_is_kept(keep: float) -> None:
    assert abs(float(keep_mask(words(), keep).double().mean()) - keep) < FAR * math.sqrt(keep * (1 - keep)) + 2**-32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers(dtype: torch.dtype) -> None:
    found = uniform(words(), dtype).double()
    assert float(found.min()) >= 0.0
    assert float(found.max()) < 1.0
    step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    assert abs(float(found.mean()) - 0.5) < FAR / math.sqrt(12.0) + step
    assert abs(float(found.var()) - 1 / 12) < FAR + step


def test_normal_numbers() -> None:
    found = normal(words_at(3, 0, ROWS, 512), torch.float64)
    assert found.shape == (ROWS, 512)
    assert abs(float(found.mean())) < FAR
    assert abs(float(found.var()) - 1.0) < FAR * math.sqrt(2.0)
    assert abs(float((found**4).mean()) - 3.0) < FAR * math.sqrt(96.0)
    assert abs(float((found[:, 0::2] * found[:, 1::2]).mean())) < FAR * math.sqrt(2.0)
    assert torch.isfinite(found).all()


def test_masks_do_not_depend_on_the_number_of_grains() -> None:
    x = torch.ones(64, 5)
    found = []
    for num_grains in (16, 32, 64):
        with GrainScope(1, 2, divide(64, 64, num_grains), by_position=True):
            found.append(F.dropout(x, 0.5))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_by_position_is_torchs_where_nothing_is_dropped(mask: str, grouped: bool) -> None:
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
    with GrainScope(1, 2, divide(8, 8, 8), by_position=True) as scope:
        found = F.scaled_dot_product_attention(
            query, key, value, dropout_p=2**-40, scale=0.3, enable_gqa=grouped, **given
        )
    assert scope.calls == 1
    torch.testing.assert_close(found, expected)
