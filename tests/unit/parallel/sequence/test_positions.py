"""Positions of a divided sequence that are no padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.errors import JobError
from shoal.parallel.sequence.positions import Stream


def stream(place: int) -> Any:
    """Of a sequence of 5 positions on two ranks: three and two, and one of padding."""
    return SimpleNamespace(span=SimpleNamespace(size=3, length=5, place=place))


def test_indices_in_each_shape() -> None:
    indices = torch.arange(12).view(2, 3, 2)  # samples, positions, k
    for shape in ((2, 3, 2), (6, 2)):
        assert Stream.without_padding(stream(1), indices.view(shape)).tolist() == indices[:, :2].tolist()
    assert Stream.without_padding(stream(1), torch.arange(6)).flatten().tolist() == [0, 1, 3, 4]
    assert Stream.without_padding(stream(0), torch.arange(6)).flatten().tolist() == list(range(6))


@pytest.mark.parametrize("shape", [(3, 2, 2), (7, 2), (1, 2, 3, 2)])
def test_indices_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(JobError, match="indices of the shape"):
        Stream.without_padding(stream(0), torch.zeros(shape))
