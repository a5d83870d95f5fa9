"""What ranks exchange outside of their passes, against what can be told in the head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.planner.made import DEVICE, LINK, cluster, matmul, work

from shoal.hardware.values import DIVIDED, Cluster, Curve, Link
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Program, Workload
from shoal.planner.profile.values import Amount, Weight
from shoal.plans.plan import Plan

WEIGHTS = 4 * 8e6  # bytes of four blocks


def beside(num_tensors: int, ranks: int) -> float:
    """Bytes that travel with the last bucket: flags, which tensors were used, the step's sums, each rank's row."""
    return 4.0 * (2 + num_tensors + 45 + 15 * ranks)


CORE = replace(DEVICE, kind="cpu", memory_bytes=10**12, memory_bytes_per_second=1e18)
QUIET = Program(call_seconds=0.0)


def terms(given: Workload, on: Cluster, program: Program = QUIET, **sections: Any) -> dict[str, float]:
    plan = Plan().with_sections(batch={"grains_per_microbatch": 4}, **sections)
    return Predictor(given, on, program).predict(plan).terms


def test_on_cores_nothing_is_hidden() -> None:
    found = terms(work(), cluster(2, device=CORE), layout={"data": 2})
    assert found["gradients"] == pytest.approx(WEIGHTS / 1e10, rel=1e-3)  # a ring of two moves 2 x 1/2 of them
    gpu = terms(work(), cluster(2, device=replace(CORE, kind="gpu")), layout={"data": 2})
    assert gpu["gradients"] < 0.6 * found["gradients"]


def test_gathers_and_scatters_on_cores_are_not_hidden_either() -> None:
    sharded = {"layout": {"shard": 2}, "shard": {"level": "parameters"}}
    found = terms(work(), cluster(2, device=CORE), **sharded)
    # Parameters for the forward and the backward, and the gradients: half of each comes from the other rank.
    assert found["parameters"] == pytest.approx(3 * WEIGHTS / 2 / 1e10, rel=0.01)


def test_totals_are_the_sums_of_all_units() -> None:
    plan = Plan().with_sections(layout={"data": 2, "shard": 4}, shard={"level": "parameters"})
    predictor = Predictor(work(), cluster(8), QUIET)
    part, shard = predictor.staging.ranks(plan).busiest.part, predictor.exchanged.shard
    units = shard.exchanges(plan, plan.layout, part)
    assert sum(units.scatters) > sum(units.gathers) > 0
    assert shard.totals(plan, plan.layout, part) == pytest.approx((sum(units.gathers), sum(units.scatters)))


def test_what_is_gathered_and_scattered_is_copied_on_cores() -> None:
    slow = replace(CORE, memory_bytes_per_second=1e9)
    for level, gathers in (("parameters", 2), ("gradients", 1)):
        sharded = {"layout": {"shard": 2}, "shard": {"level": level}}
        quick, copied = (terms(work(), cluster(2, device=core), **sharded) for core in (CORE, slow))
        # Half of them into what is sent and all into parameters; gradients into what is sent, and half of them back.
        assert copied["parameters"] - quick["parameters"] == pytest.approx((gathers + 1) * 2 * 1.5 * WEIGHTS / 1e9)


def test_the_engines_own_time_and_memory_are_those_of_the_axis_that_divides_the_model() -> None:
    own = {axis: {"step_seconds": 3e-3, "tensor_seconds": 2e-3, "reserved_bytes": 7e8} for axis in DIVIDED}
    core = replace(CORE, step_seconds=1e-3, tensor_seconds=1e-6, reserved_bytes=10**8, divided=own)
    predictor = Predictor(work(), cluster(2, device=core), QUIET)
    for axis in DIVIDED:
        found = predictor.predict(Plan().with_sections(batch={"grains_per_microbatch": 1}, layout={axis: 2}))
        num_tensors = 4 if axis == "pipeline" else 8
        assert found.terms["host"] == pytest.approx(3e-3 + num_tensors * 2e-3)
        assert found.memory["reserved"] == 7e8
    whole = predictor.predict(Plan().with_sections(batch={"grains_per_microbatch": 1}, layout={"data": 2}))
    assert whole.terms["host"] == pytest.approx(1e-3 + 8e-6)
    assert whole.memory["reserved"] == 1e8
    little = replace(core, divided={"shard": {"step_seconds": 1e-9}})
    assert little.beside("shard") == (1e-3, 1e-6, 1e8)  # bounds of a search rest on these


def test_small_buckets_are_gathered_and_added_on_cores() -> None:
    body = replace(work().profile.units[0].body, weights=(Weight("w", (1000, 100)),))
    slow = replace(CORE, memory_bytes_per_second=1e9)
    small = terms(replace(work(), profile=work(1, body=body).profile), cluster(2, device=slow), layout={"data": 2})
    bucket = 4e5 + beside(1, 2)
    # 0.4 MB copied into the bucket, gathered from both (half of 0.8 MB comes from the other), and added up.
    assert small["gradients"] == pytest.approx((2 + 3) * bucket / 1e9 + bucket / 1e10)


def test_gradients_are_copied_into_their_buckets_on_cores() -> None:
    slow = replace(CORE, memory_bytes_per_second=1e9)
    found = terms(work(), cluster(2, device=slow), layout={"data": 2})
    buckets = WEIGHTS + beside(8, 2)
    assert found["gradients"] == pytest.approx(buckets / 1e10 + 2 * buckets / 1e9)


def test_the_all_reduce_of_the_plan_is_as_fast_as_it_was_measured() -> None:
    shared = Link("memory", bytes_per_second=1e11, latency_seconds=0.0, call_seconds=1e-3)
    on = replace(cluster(2, device=CORE), algorithms={"shared_memory": shared})
    layout, collectives = {"data": 2}, {"all_reduce": "shared_memory"}
    buckets = 5  # of eight matrices of 4 MB the first, three pairs (beyond 4 MiB), and the last
    found = terms(work(), on, layout=layout, collectives=collectives)
    assert found["gradients"] == pytest.approx(WEIGHTS / 1e11 + buckets * 1e-3)
    assert terms(work(), on, layout=layout)["gradients"] == pytest.approx(WEIGHTS / 1e10, rel=1e-3)


GROUP = Link("a group", bytes_per_second=1e10, latency_seconds=0.0, collectives={"all_gather": Curve(((1.0, 4.0),))})


@pytest.mark.parametrize("algorithm", ["native", "shared_memory"])
def test_what_fully_shard_asks_for_is_as_fast_as_a_process_group_was_measured(algorithm: str) -> None:
    on = replace(cluster(2, device=CORE), algorithms={"process_group": GROUP})
    sections = {"layout": {"shard": 2}, "shard": {"level": "parameters"}, "collectives": {"all_reduce": algorithm}}
    # Half of the parameters twice, four times as fast there, and half of the gradients.
    parts = (2 / 4 + 1) / 2 if algorithm == "shared_memory" else 3 / 2
    assert terms(work(), on, **sections)["parameters"] == pytest.approx(parts * WEIGHTS / 1e10, rel=0.01)


def test_what_a_tensor_axis_exchanges_is_as_fast_as_a_process_group_was_measured() -> None:
    shared = {"layout": {"tensor": 2}, "collectives": {"all_reduce": "shared_memory"}}
    slow = replace(LINK, bytes_per_second=1e9)
    on = replace(cluster(2, device=CORE, link=slow), algorithms={"process_group": GROUP})
    native = terms(work(), on, layout={"tensor": 2})["tensor"]
    assert terms(work(), on, **shared)["tensor"] == pytest.approx(native / 10)
    # Two hosts share no memory.
    apart = replace(on, devices_per_host=1, num_hosts=2, within=None, between=slow)
    assert terms(work(), apart, **shared)["tensor"] == terms(work(), apart, layout={"tensor": 2})["tensor"] > 0


@pytest.mark.parametrize("scheme", ["bfloat16", "float16"])
def test_the_last_bucket_of_casts_shows_whole_and_small_sums_are_no_buckets(scheme: str) -> None:
    """Behind a long backward all but the last bucket is hidden: a matrix of 4 MB as 2 MB, and what goes as it is."""
    halved = {"layout": {"data": 2}, "collectives": {"compression": scheme}}
    quick = replace(LINK, bytes_per_second=1e11)
    found = terms(work(), cluster(2, link=quick), replace(QUIET, contention=0.0), **halved)
    assert found["gradients"] == pytest.approx((2e6 + beside(8, 2)) / 1e11, rel=0.01)
    asked = terms(
        work(),
        cluster(2, link=quick, device=replace(DEVICE, dispatch_seconds=1.0)),
        Program(call_seconds=1.0),
        **halved,
    )
    assert asked["gradients"] == pytest.approx(3.0, rel=1e-3)


def test_the_first_bucket_on_a_gpu_is_small() -> None:
    called = replace(LINK, call_seconds=1.0)
    apart = replace(QUIET, contention=1.0)  # so that all of them show
    found = terms(work(), cluster(2, link=called), apart, layout={"data": 2})
    # The first matrix by itself (beyond 1 MiB), six more until 25 MiB are full, the last by itself.
    assert found["gradients"] == pytest.approx(3.0, rel=0.01)
    assert terms(work(), cluster(2, link=called), replace(apart, own_buckets=False), layout={"data": 2})[
        "gradients"
    ] == pytest.approx(2.0, rel=0.01)


def test_what_does_not_travel_with_the_gradients_is_summed_apart() -> None:
    slow = replace(LINK, latency_seconds=1.0)
    on = cluster(2, device=CORE, link=slow)
    assert terms(work(), on, layout={"pipeline": 2})["gradients"] == pytest.approx(2 + 1 + 2)  # sums, agreement, norm
    others = Program(own_buckets=False)
    assert terms(work(), on, others, layout={"pipeline": 2})["gradients"] == 0.0


def test_zero_1_hands_parameters_out_in_pieces() -> None:
    called = replace(LINK, call_seconds=1.0)
    sections = {"layout": {"shard": 2}, "shard": {"level": "optimizer"}}
    free = replace(QUIET, gradient_passes=0.0)
    found = terms(work(), cluster(2, device=CORE, link=called), free, **sections)
    assert found["optimizer"] == pytest.approx(2 + 8, rel=0.01)  # an agreement in two calls, and eight matrices


def test_an_update_reads_the_gradients_for_their_norm_and_scales_them() -> None:
    slow = replace(CORE, memory_bytes_per_second=1e9)
    rate = 1.5e9  # what is written was read before: a stream's traffic is half more than its bytes
    assert terms(work(), cluster(1, device=slow))["optimizer"] == pytest.approx(3 * WEIGHTS / rate)
    sections = {"layout": {"shard": 2}, "shard": {"level": "optimizer"}}
    passes = replace(work(), profile=replace(work().profile, optimizer_passes=5.0))
    halved = terms(passes, cluster(2, device=slow), **sections)  # the update is divided, the norm is not
    handed = WEIGHTS / 1e10
    assert halved["optimizer"] == pytest.approx((3 + 5 / 2) * WEIGHTS / rate + handed, rel=1e-3)


def test_an_update_computes_its_products_and_a_host_that_is_ahead_hides_its_launches() -> None:
    own = work()
    product = replace(matmul("x", 1000, 1000, 1000), m=Amount(1000), launches=3)
    multiplied = replace(own, profile=replace(own.profile, optimizer_products=(product,)))
    free = replace(QUIET, gradient_passes=0.0)
    assert terms(multiplied, cluster(1), free)["optimizer"] == pytest.approx(3 * 2e-3)
    sections = {"layout": {"shard": 2}, "shard": {"level": "optimizer"}}
    halves, without = (terms(one, cluster(2), free, **sections)["optimizer"] for one in (multiplied, own))
    assert halves - without == pytest.approx(3 * 2e-3 / 2)
    compute = terms(own, cluster(1), free)["compute"]  # 64 launches: in 4 blocks and 2 microbatches 6 and 2 for sums
    host = cluster(1, device=replace(DEVICE, dispatch_seconds=compute / 80))
    for launches, exposed in ((10, 0.0), (40, compute * (64 + 40 - 80) / 80)):
        launched = replace(own, profile=replace(own.profile, optimizer_launches=launches))
        assert terms(launched, host, free)["optimizer"] == pytest.approx(exposed)


def test_the_engines_own_time_of_a_step() -> None:
    engine = replace(CORE, step_seconds=1.0, tensor_seconds=0.25)
    assert terms(work(), cluster(1, device=engine))["host"] == pytest.approx(1.0 + 8 * 0.25)


def test_cores_fetch_their_samples_before_they_compute() -> None:
    slow = replace(work(), sample_seconds=1e-3)
    assert terms(slow, cluster(1, device=CORE))["data"] == pytest.approx(8e-3)
    assert terms(slow, cluster(1))["data"] == 0.0  # a GPU computes meanwhile, and longer


def test_a_context_axis_sums_the_gradients_of_its_blocks_and_gathers_its_ends() -> None:
    found = terms(work(), cluster(2, device=CORE), layout={"context": 2})
    assert found["gradients"] == pytest.approx(WEIGHTS / 1e10, rel=1e-3)
    hidden = 4 * 4e6  # bytes of four samples, half of which come from the other rank
    assert found["context"] == pytest.approx(2 * 2 * hidden / 2 / 1e10)  # there and back, in two microbatches


def test_tied_weights_are_summed_between_their_stages() -> None:
    profile = replace(work().profile, tied=(("blocks.0.up", "blocks.3"),))
    called = cluster(2, device=CORE)
    plain = terms(work(), called, layout={"pipeline": 2})["gradients"]
    tied = terms(replace(work(), profile=profile), called, layout={"pipeline": 2})["gradients"]
    assert tied - plain == pytest.approx(4e6 / 1e10, rel=1e-3)


def test_buckets_in_shared_memory_are_mapped_by_every_rank() -> None:
    def held(algorithm: str) -> float:
        sections = {"layout": {"data": 4}, "collectives": {"all_reduce": algorithm}}
        plan = Plan().with_sections(batch={"grains_per_microbatch": 2}, **sections)
        return Predictor(work(), cluster(4, device=CORE), QUIET).predict(plan).memory["communication"]

    assert held("native") == 0.0
    assert held("shared_memory") == 3 * WEIGHTS
