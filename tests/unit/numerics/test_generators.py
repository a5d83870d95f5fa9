"""A watch over the generators: one look a stretch, and nothing drawn goes unseen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shoal.numerics.generators import DrawWatch

DRAWS: list[Callable[[], Any]] = [lambda: torch.rand(1), random.random, np.random.rand, lambda: random.gauss(0, 1)]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_stretch_that_draws_is_seen(draw: Callable[[], Any]) -> None:
    watch, found = DrawWatch(), []
    for draws in (False, False, True):
        watch.begin()
        if draws:
            draw()
        found.append(watch.end())
    assert found == [False, False, True]


def test_the_first_stretch_has_both_of_its_ends_looked_at() -> None:
    watch = DrawWatch()
    watch.begin()
    torch.rand(1)
    assert watch.end()
    assert not watch.is_unclear


@pytest.mark.parametrize("told", [False, True])
def test_a_draw_between_two_stretches_is_unclear_but_where_it_is_told_of(told: bool) -> None:
    watch = DrawWatch()
    watch.begin()
    assert not watch.end()
    torch.rand(1)
    if told:
        watch.forget()
    watch.begin()
    assert watch.end() is not told
    assert watch.is_unclear is not told
