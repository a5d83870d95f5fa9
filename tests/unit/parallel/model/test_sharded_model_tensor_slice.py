"""Parts of a tensor: what one rank has and another lacks makes the whole, however either is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.model.sharded_model import Runs, TensorSlice

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorSlice:
    """Along each dim up to three runs, in order."""
    found = TensorSlice.whole(shape)
    for dim, size in enumerate(shape):
        kept = sorted(draw(st.sets(st.integers(0, size - 1))))
        runs: list[tuple[int, int]] = []
        for index in kept:
            if runs and runs[-1][1] == index:
                runs[-1] = runs[-1][0], index + 1
            else:
                runs.append((index, index + 1))
        found = found.select(dim, tuple(runs))
    return found


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@given(st.data())
def test_what_is_copied_is_what_both_hold(data: st.DataObject) -> None:
    shape = tuple(data.draw(SIZES))
    mine, theirs = data.draw(parts(shape)), data.draw(parts(shape))
    whole = numbered(shape)
    target = torch.full(mine.local_shape, -1)
    count = mine.copy(target, theirs, theirs.take(whole).clone())
    held = torch.full(shape, -1)
    theirs.put(held, theirs.take(whole))
    assert torch.equal(target, mine.take(held))
    assert count == int((target >= 0).sum())
    assert tuple(mine.take(whole).shape) == mine.local_shape
    assert TensorSlice.from_json(shape, mine.to_json()) == mine


@given(st.data())
def test_a_part_of_a_part(data: st.DataObject) -> None:
    shape = tuple(data.draw(SIZES))
    part = data.draw(parts(shape))
    size = part.local_shape[0]
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert torch.equal(part.narrow(0, start, stop).take(numbered(shape)), part.take(numbered(shape))[start:stop])


def test_parts_of_other_tensors_are_not_mixed() -> None:
    runs: Runs = ((0, 1),)
    with pytest.raises(ValueError, match="a part of"):
        TensorSlice.whole((2, 3)).copy(torch.empty(2, 3), TensorSlice((3, 2), (runs, runs)), torch.empty(1, 1))


def test_a_number_is_whole() -> None:
    part = TensorSlice.whole(())
    assert part.is_whole
    assert part.take(torch.tensor(3.0)) == 3.0
