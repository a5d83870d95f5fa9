"""DeepSeek-V3's balance: the bias of a router moves by the counts of the whole batch, on any layout."""

from __future__ import annotations

import pytest
from tests.jobs.balanced_experts import job
from tests.usual import parametrize

import shoal

pytestmark = pytest.mark.ranks


@parametrize(
    ("layout", "exact"),
    [({"data": 2}, False), ({"data": 3}, True), ({"shard": 2}, False)],
    usual=["data"],
    ids=["data", "exact", "shard"],
)
def test_verified(layout: dict[str, int], exact: bool) -> None:
    verdict = shoal.verify(job(), shoal.Plan.model_validate({"layout": layout, "execution": {"exact": exact}}), steps=3)
    assert verdict.verified, verdict.render()
