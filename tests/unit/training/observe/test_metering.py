"""What a plan's maker said of activations is taken over where it was said of such a run."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.plans.plan import Plan
from shoal.training.observe.metering import planned_activations

TRACED = {"kept_bytes": [300, 200], "device_kind": "cpu"}


def of(prediction: dict[str, Any], pipeline: int = 2) -> Plan:
    return Plan().with_sections(layout={"data": 2, "pipeline": pipeline}, prediction=prediction)


def test_each_rank_has_that_of_its_stages() -> None:
    plan = of(TRACED)
    found = {plan.layout.coordinate(rank).pipeline: planned_activations(plan, "cpu", rank) for rank in range(4)}
    assert found == {0: 300, 1: 200}


@pytest.mark.parametrize(
    ("plan", "device"),
    [
        (of({}), "cpu"),  # by hand
        (of(TRACED), "cuda"),  # whose kernels keep other things
        (of(TRACED, pipeline=4), "cpu"),  # cut otherwise since
        (of({"kept_bytes": [1, 2]}), "cpu"),  # of nobody knows what
        (of(TRACED).with_sections(memory={"recompute": "selective"}), "cpu"),  # which the meter does not see
    ],
)
def test_nothing_is_said_of_another_run(plan: Plan, device: str) -> None:
    assert planned_activations(plan, device, 0) is None
