"""Random numbers of captured steps: a GrainScope's, bit for bit, from keys that are filled in before a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.captured_draws import CapturedScope, NotCapturableError
from shoal.numerics.generators import all_generators
from shoal.numerics.grain_randomness import GrainScope
from shoal.plans.grains import Grain

CPU = torch.device("cpu")
GRAINS = (Grain(0, 0, 3), Grain(1, 3, 3), Grain(2, 6, 2))
ROWS = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(2))
HEADS = torch.randn(8, 2, 6, 4, generator=torch.Generator().manual_seed(3))

DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(ROWS, 0.4),
    "dropout in place": lambda: F.dropout(ROWS.clone(), 0.4, inplace=True),
    "dropout of channels": lambda: F.dropout2d(IMAGES, 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(ROWS, 0.3, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(IMAGES, 0.3, training=True),
    "attention": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, dropout_p=0.2),
    "rrelu": lambda: F.rrelu(ROWS, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(ROWS),
    "bernoulli": lambda: torch.bernoulli(torch.full((8, 4), 0.3)),
    "bernoulli_": lambda: torch.empty(8, 4).bernoulli_(0.3),
    "rand_like": lambda: torch.rand_like(ROWS),
    "randn_like": lambda: torch.randn_like(ROWS),
    "normal_": lambda: torch.empty(8, 4).normal_(),
    "uniform_": lambda: torch.empty(8, 4).uniform_(),
    "rand": lambda: torch.rand(8, 3),
    "two of them": lambda: F.dropout(ROWS, 0.5) * F.alpha_dropout(torch.randn(8, 5), 0.5, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_bits_are_those_of_a_step_that_is_not_captured(name: str) -> None:
    """Of each step, also when the first forward under the scope was of another; and what is left behind is the same."""
    scope = CapturedScope(7, GRAINS, CPU)
    for step in (5, 0, 1, 2):
        with GrainScope(7, step, GRAINS) as usual:
            expected = DRAWS[name]()
        left = all_generators()
        torch.manual_seed(99)
        scope.seed(step)
        with scope:
            found = DRAWS[name]()
        assert torch.equal(found, expected)
        assert scope.sites.in_order == usual.sites.in_order
        assert all_generators() == left
        scope.seed(step)
        assert all_generators() == left
    assert not torch.equal(found, ROWS)


def test_a_step_that_is_not_seeded_draws_the_numbers_of_the_step_before() -> None:
    """A graph reads the keys from one tensor."""
    scope = CapturedScope(7, GRAINS, CPU)
    drawn = []
    for step in (0, None, 1):
        if step is not None:
            scope.seed(step)
        with scope:
            drawn.append(F.dropout(ROWS, 0.4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_what_no_replay_repeats_is_refused() -> None:
    scope = CapturedScope(7, GRAINS, CPU)
    scope.seed(0)
    with scope:
        F.dropout(ROWS, 0.4)
    with pytest.raises(NotCapturableError, match="as often"), scope:
        F.dropout(F.dropout(ROWS, 0.4), 0.4)
    with pytest.raises(NotCapturableError, match="on the host"), CapturedScope(7, GRAINS, torch.device("meta")):
        torch.rand(8, 3)
    with pytest.raises(NotCapturableError, match="by poisson"), CapturedScope(7, GRAINS, CPU):
        torch.poisson(torch.ones(8, 3))
