"""Random numbers by hash: even, unrelated to their neighbours, and the same however they are computed."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.numerics import hashed_draws
from shoal.numerics.hashed_draws import SampleKeys, dropout, element_keys, noise_of, row_keys, site_key
from shoal.plans.grains import divide

ROWS, ELEMENTS = 1024, 1000
CPU = torch.device("cpu")
# Six standard errors of a mean of this many numbers of variance 1: passed by one draw in 5e8.
FAR = 6.0 / math.sqrt(ROWS * ELEMENTS)


def keys(seed: int = 3, step: int = 5, rows: int = ROWS, start: int = 0, name: str = "drop", count: int = 0) -> Tensor:
    return row_keys(seed, step, np.arange(start, start + rows)) ^ site_key(name, count, CPU)


def words(keys: Tensor, elements: int) -> Tensor:
    return hashed_draws.words(keys, element_keys(elements, CPU))


def values(p: float, **which: int | str) -> Tensor:
    """Return a mask as numbers of mean 0 and variance 1."""
    return (hashed_draws.keep_mask(keys(**which), element_keys(ELEMENTS, CPU), p).double() - (1 - p)) / math.sqrt(
        p * (1 - p)
    )  # type: ignore[arg-type]


def test_numbers_of_a_row_depend_on_its_position_alone() -> None:
    whole = words(keys(), 50)
    for start, rows in ((0, 1), (7, 3), (500, 12)):
        assert torch.equal(words(keys(start=start, rows=rows), 50), whole[start : start + rows])
    assert torch.equal(words(keys(), 20), whole[:, :20])
    assert len(whole.unique()) > 0.999 * whole.numel()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_show_no_structure(p: float) -> None:
    mask = values(p)
    assert abs(float(mask.mean())) < FAR
    for dim, size in ((0, ROWS), (1, ELEMENTS)):  # the means of columns and rows scatter as those of coins
        means = mask.mean(dim) * math.sqrt(size)
        assert float(means.abs().max()) < 6.0
        assert abs(float(means.var()) - 1.0) < 6.0 * math.sqrt(2.0 / means.numel())
        for shift in (1, 2, 3, 8, 64):
            product = mask.narrow(dim, shift, size - shift) * mask.narrow(dim, 0, size - shift)
            assert abs(float(product.mean())) < 1.1 * FAR, (dim, shift)
    assert abs(float((mask[1:, 1:] * mask[1:, :-1] * mask[:-1, 1:] * mask[:-1, :-1]).mean())) < 1.1 * FAR


@pytest.mark.parametrize("other", [{"step": 6}, {"seed": 4}, {"count": 1}, {"name": "drop2"}, {"start": ROWS}])
def test_masks_of_others_are_unrelated(other: dict[str, int | str]) -> None:
    assert abs(float((values(0.5) * values(0.5, **other)).mean())) < FAR


def test_each_bit_of_a_word_is_even() -> None:
    drawn = words(keys(), ELEMENTS)
    for bit in range(32):
        assert abs(float(((drawn >> bit) & 1).double().mean()) - 0.5) < FAR / 2, bit
    counts = torch.bincount(((drawn >> 16) & 0xFFFF).flatten(), minlength=1 << 16).double()
    expected = drawn.numel() / (1 << 16)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi - (1 << 16)) < 6.0 * math.sqrt(2.0 * (1 << 16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 64), (3, 5, 7), (2, 1), (300, 7, 301)])
def test_eager_code_on_a_cpu_has_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    own = keys(rows=shape[0]), element_keys(math.prod(shape[1:]), CPU)
    eager = SampleKeys(3, 5, divide(shape[0], shape[0], 3))
    for p in (0.1, 0.5, 1e-12):
        noise = eager.noise(("drop", 0), shape, p, dtype, CPU)
        assert noise.dtype == dtype
        assert torch.equal(noise, noise_of(shape, p, dtype, *own))


def test_dynamo_traces_a_dropout_whole() -> None:
    x = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(lambda x, k: dropout(x, 0.4, k[0]), backend="aot_eager", fullgraph=True)
    own = keys(rows=8, count=2)
    assert torch.equal(compiled(x, own[None]), dropout(x, 0.4, own))
