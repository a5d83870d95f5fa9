"""Slices of sequences and deals of heads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from shoal.errors import PlanError
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.sequence.attention import Heads, Span, _exchange, refuse_degree


@given(st.integers(1, 40), st.integers(2, 8))
def test_slices_put_together_are_the_whole(length: int, degree: int) -> None:
    whole = torch.arange(2 * length).view(2, length)
    spans = [Span(length, degree, place) for place in range(degree)]
    slices = [span.own(whole, 1) for span in spans]
    assert {s.shape for s in slices} == {(2, spans[0].size)}
    assert spans[0].size >= 2
    found = torch.cat(slices, 1)
    assert torch.equal(found[:, :length], whole)
    # What stands for no position is a copy of a real one: nothing that a block computes of it is NaN.
    assert torch.equal(found[:, length:], whole[:, -1:].expand(2, found.shape[1] - length))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 8))
def test_every_query_head_reads_its_own_key_head(num_key: int, group: int, degree: int) -> None:
    heads = Heads(num_key * group, num_key, min(degree, num_key * group))
    seen = []
    for place in range(heads.degree):
        start, stop = heads.bounds(place)
        first, last = heads.read(place)
        read = list(range(first, last))
        repeats = heads.repeats(place)
        used = read if repeats is None else [read[i] for i in repeats]
        assert used == [head // group for head in range(start, stop)]
        assert stop > start
        seen += range(start, stop)
    assert seen == list(range(num_key * group))


def test_more_ranks_than_heads_are_refused() -> None:
    refuse_degree(3, 3, "blocks.0")
    with pytest.raises(PlanError, match="at most 3"):
        refuse_degree(3, 4, "blocks.0")


def test_a_model_without_data_is_followed_without_an_exchange() -> None:
    """Torch before 2.13 has no all-to-all of tensors without data: there is no process group that it could go to."""
    axis = TensorAxis(2, 0)
    with FakeTensorMode():
        given = torch.ones(6, requires_grad=True)
        (found,), (other,) = _exchange([[given[:4]], [given[4:]]], [[torch.Size((3,))], [torch.Size((2,))]], axis)
        assert (found.shape, other.shape) == ((3,), (2,))
        (found.sum() + other.sum()).backward()
        assert given.grad is not None
