"""Codecs: what every rank decodes, what it holds back, and what becomes of values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.distributed.collectives.threads import on_ranks
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Handle
from shoal.distributed.collectives.compression.codecs import CodecTransport, _orthogonal, folded_sum
from shoal.distributed.collectives.compression.compressed_sum import make_codec
from shoal.plans.accounting.all_reduce import INT8_LEVELS
from shoal.plans.plan import CompressionSection

SCHEMES = ("bfloat16", "float16", "int8", "topk", "powersgd")
OPTIONS = CompressionSection(block=8, density=0.2, rank=2)
# Float32 sums of a few numbers, of the size of the largest of them.
ROUNDING = 2.0**-20


def finish(rounds: Iterator[Handle]) -> None:
    for handle in rounds:
        handle.wait()


def summed(
    scheme: str, rows: Tensor, shapes: list[tuple[int, ...]], options: CompressionSection = OPTIONS
) -> list[tuple[Tensor, Tensor]]:
    """(sum, what was held back) on each rank, of a row each."""

    def work(collective: Collective) -> tuple[Tensor, Tensor]:
        codec = make_codec(scheme, options, CodecTransport(collective, torch.device("cpu")), shapes)
        values, total = rows[collective.rank].clone(), torch.full_like(rows[0], 7.0)
        finish(codec.sum(values, total, keep=True))
        return total, values

    return on_ranks(len(rows), work)


@st.composite
def gradients(draw: st.DrawFn) -> Tensor:
    """Rows of a few ranks whose values are of very different sizes, zeros among them."""
    world_size, numel = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(world_size, numel, generator=generator)
    scales = 10.0 ** torch.randint(-12, 6, (world_size, numel), generator=generator)
    kept = torch.rand(world_size, numel, generator=generator) >= draw(st.sampled_from([0.0, 0.5, 1.0]))
    return values * scales * kept


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=40, deadline=None)
@given(rows=gradients())
def test_what_is_sent_and_what_is_held_back_are_all_there_was(scheme: str, rows: Tensor) -> None:
    shapes: list[tuple[int, ...]] = [(rows.shape[1] // 2, 1), (rows.shape[1] - rows.shape[1] // 2,)]
    found = summed(scheme, rows, shapes)
    total = found[0][0]
    assert all(torch.equal(total, other) for other, _ in found), "all ranks decode the same bits"
    missing = torch.stack([held for _, held in found]).double().sum(0)
    size = rows.double().abs().sum(0)
    sums_in_16_bits = {"bfloat16": 2.0**-7, "float16": 2.0**-9}.get(scheme, ROUNDING)
    tolerance = size * sums_in_16_bits + rows.abs().max() * (2.0**-38 if scheme == "float16" else ROUNDING)
    assert bool(((rows.double().sum(0) - total - missing).abs() <= tolerance).all())


@settings(max_examples=40, deadline=None)
@given(rows=gradients())
def test_int8_is_within_half_a_level_of_its_block(rows: Tensor) -> None:
    world_size, numel = rows.shape
    (_, held), *_ = summed("int8", rows, [(numel,)])
    for start in range(0, numel, OPTIONS.block):
        level = rows[:, start : start + OPTIONS.block].abs().max() / (INT8_LEVELS // world_size)
        assert held[start : start + OPTIONS.block].abs().max() <= level * 0.5001 + 2.0**-126 * 127


@settings(max_examples=30, deadline=None)
@given(rows=gradients())
def test_topk_sends_the_values_farthest_from_zero(rows: Tensor) -> None:
    for own, (_, held) in zip(rows, summed("topk", rows, [(rows.shape[1],)]), strict=True):
        sent = own - held
        count = -(-rows.shape[1] // 5)
        assert int((sent != 0).sum()) <= count
        assert torch.equal(sent.abs().sort().values[-count:], own.abs().sort().values[-count:])


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_powersgd_is_exact_for_matrices_of_its_rank(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    left, right = torch.randn(30, rank, generator=generator), torch.randn(world_size, rank, 24, generator=generator)
    rows = torch.cat([(left @ right).flatten(1), torch.randn(world_size, 5, generator=generator)], dim=1)
    options = CompressionSection(rank=rank)
    shapes: list[tuple[int, ...]] = [(30, 4, 6), (5,)]
    for total, held in summed("powersgd", rows, shapes, options):
        torch.testing.assert_close(total, rows.sum(0), rtol=1e-4, atol=1e-4)
        assert float(held[:720].norm()) <= 1e-4 * float(rows.norm())
        assert not held[720:].any(), "what is not factored is sent as it is"


def test_powersgd_comes_closer_with_each_step() -> None:
    matrix = torch.randn(60, 40, generator=torch.Generator().manual_seed(3)) / torch.arange(1, 41) ** 2
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    best = float((left[:, 2:] * values[2:] @ right[2:]).norm())

    def work(collective: Collective) -> list[float]:
        codec = make_codec("powersgd", OPTIONS, CodecTransport(collective, torch.device("cpu")), [(60, 40)])
        found = []
        for _ in range(8):
            total = torch.zeros(2400)
            finish(codec.sum(matrix.flatten(), total, keep=False))
            codec.commit()
            found.append(float((total.view(60, 40) - matrix).norm()))
        return found

    (errors,) = on_ranks(1, work)
    assert errors[-1] < errors[0]
    assert errors[-1] <= 1.001 * best


def test_powersgd_wakes_from_a_gradient_of_zeros() -> None:
    def work(collective: Collective) -> Tensor:
        codec = make_codec("powersgd", OPTIONS, CodecTransport(collective, torch.device("cpu")), [(10, 10)])
        for matrix in (torch.zeros(10, 10), torch.ones(10, 10)):
            total = torch.zeros(100)
            finish(codec.sum(matrix.flatten(), total, keep=False))
            codec.commit()
        return total

    torch.testing.assert_close(on_ranks(1, work)[0], torch.ones(100))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_not_finite_stays_so(scheme: str, value: float, world_size: int) -> None:
    rows = torch.randn(world_size, 50, generator=torch.Generator().manual_seed(1))
    rows[-1, 17] = value
    for total, _ in summed(scheme, rows, [(8, 5), (10,)]):
        assert not bool(torch.isfinite(total).all())
        assert not bool(torch.isfinite(total.norm()))


def test_float16_neither_overflows_nor_underflows() -> None:
    for size in (1e-30, 1e-7, 1.0, 1e6, 1e30):
        rows = torch.full((4, 3), size)
        for total, _ in summed("float16", rows, [(3,)]):
            torch.testing.assert_close(total, rows.sum(0), rtol=2.0**-9, atol=0.0)


def test_rows_become_orthogonal_and_what_adds_nothing_zero() -> None:
    rows = torch.randn(4, 101, generator=torch.Generator().manual_seed(1))
    rows[2] = 2 * rows[0] - 3 * rows[1]
    found = _orthogonal(rows)
    expected = torch.eye(4)
    expected[2, 2] = 0.0
    torch.testing.assert_close(found @ found.t(), expected, rtol=0.0, atol=1e-5)


@given(st.integers(1, 70))
def test_sums_by_halves(length: int) -> None:
    values = torch.arange(2 * length).view(2, length)
    assert torch.equal(folded_sum(values), values.sum(1))
