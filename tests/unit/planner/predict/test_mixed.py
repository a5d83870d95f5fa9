"""Predictions on several kinds of devices: whole grains of the slowest rank, memory of each kind, stages by speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.planner.made import DEVICE, LINK, cluster, work

from shoal.hardware.catalogue import joined
from shoal.hardware.values import Cluster
from shoal.planner.predict.mixed import MixedPredictor, by_speed, costs_of_kinds, devices_of, kinds_of, views
from shoal.planner.predict.step_time import Predictor
from shoal.plans.grains import share_sizes
from shoal.plans.plan import Layout, Plan

HALF = replace(DEVICE, name="half", flops={"float32": 0.5e12}, memory_bytes_per_second=0.5e12)
QUARTER = replace(DEVICE, name="quarter", flops={"float32": 0.25e12}, memory_bytes_per_second=0.25e12)


def of(*kinds: tuple[str, int]) -> Cluster:
    devices = {"fast": DEVICE, "half": HALF, "quarter": QUARTER}
    return joined([replace(cluster(n, device=devices[name]), name=f"{n}x{name}") for name, n in kinds], "several")


def plan(per: int = 1, **degrees: int) -> Plan:
    return Plan().with_sections(layout=degrees, batch={"grains_per_microbatch": per})


def test_shares_follow_three_speeds_and_the_step_is_that_of_the_slowest_rank() -> None:
    predictor = MixedPredictor(work(batch=28), of(("fast", 2), ("half", 2), ("quarter", 2)))
    shared = predictor.shared_out(plan(data=6))
    assert share_sizes(28, 6, shared.layout.shares) == (8, 8, 4, 4, 2, 2)
    assert shared.layout.shares == pytest.approx((100, 100, 50, 50, 25, 25), abs=3)
    step = predictor.predict(shared).step_seconds
    alone = Predictor(work(batch=28), views(predictor.cluster)[0]).predict(plan(data=6), 8)  # 8, 4 and 2 grains
    assert step == pytest.approx(alone.step_seconds, rel=0.01)
    equal = predictor.predict(plan(data=6)).step_seconds
    assert step < 0.5 * equal  # the slowest rank would have 5 grains, as long as 20


def test_ranks_of_a_layer_have_one_kind_and_others_stay_idle() -> None:
    several = of(("fast", 6), ("half", 8))
    layout = Layout(data=3, tensor=4)
    assert devices_of(several, layout) == [4, 8]
    assert kinds_of(several, layout) == [(0,), (1,), (1,)]
    assert kinds_of(several, Layout(data=4, tensor=4)) == []


def test_a_slow_stage_has_fewer_blocks() -> None:
    predictor = MixedPredictor(work(blocks=6, batch=8), of(("fast", 2), ("half", 2)))
    staged = predictor.shared_out(plan(data=2, pipeline=2))
    assert staged.pipeline.split == ("blocks.4",)
    assert staged.layout.shares == ()  # both replicas have a fast and a slow rank
    even = staged.with_sections(pipeline={"split": ["blocks.3"]})
    assert predictor.predict(staged).step_seconds < 0.8 * predictor.predict(even).step_seconds


def test_stages_by_speed_leave_a_part_to_each() -> None:
    assert by_speed([[1.0] * 9, [2.0] * 9]) == [6, 3]
    assert by_speed([[1.0] * 3, [100.0] * 3, [1.0] * 3]) == [1, 1, 1]
    assert by_speed([[1.0, 5.0, 1.0], [1.0, 5.0, 1.0]]) in ([1, 2], [2, 1])


def test_memory_is_that_of_each_kind() -> None:
    small = replace(HALF, memory_bytes=DEVICE.memory_bytes // 100)
    several = joined([cluster(2), replace(cluster(2, device=small), name="small")], "several")
    predictor = MixedPredictor(work(), several)
    prediction = predictor.predict(plan(data=4))
    assert prediction.fullest_kind == 1
    assert not prediction.fits
    assert prediction.missing_bytes == pytest.approx(prediction.peak_bytes - several.usable_bytes(small))


def test_the_network_is_no_faster_than_the_slowest_host() -> None:
    narrow = replace(cluster(4, device=HALF), within=replace(LINK, bytes_per_second=2e9, shared=True))
    for view in views(joined([cluster(4), replace(narrow, name="narrow")], "several")):
        assert view.between is not None
        assert view.between.bytes_per_second == 2e9 / 4


def test_more_memory_keeps_the_margin_free() -> None:
    several = replace(of(("fast", 2), ("half", 2)))
    several = replace(several, kinds=tuple(replace(kind, memory_margin=0.25) for kind in several.kinds))
    costs = costs_of_kinds(work(), several)(4)
    assert costs.with_more_memory(10**8).memory_bytes - costs.memory_bytes == pytest.approx(0.75e8)
