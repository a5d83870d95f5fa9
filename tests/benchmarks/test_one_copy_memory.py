"""What ranks hold that share one copy of parameters and state: the kernel's count beside the formulas."""

from __future__ import annotations

import pytest
from benchmarks.one_copy_memory import measure
from benchmarks.sharded_memory import TOLERANCE


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_pages_of_all_ranks_are_those_of_one_copy(ranks: int) -> None:
    told = measure(ranks, shared=True, layers=3)
    pss, predicted = (sum(rank[name] for rank in told) for name in ("pss", "predicted"))
    assert pss == pytest.approx(predicted, rel=TOLERANCE)
