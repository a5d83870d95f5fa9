"""Mixtures whose experts ranks divide: rows, bytes and sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.planner.made import DEVICE, LINK, block, cluster, predict, work
from tests.unit.planner.models import mixture

from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.experts import DEEPEP, exchange_seconds
from shoal.planner.predict.lower_bounds import Costs
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Prediction, Program
from shoal.planner.profile.values import Amount, Body, Dispatch, Profile, Unit
from shoal.plans.plan import Plan

QUIET = Program(contention=0.0, call_seconds=0.0, host_seconds=0.0, fragmentation=0.0, dispatch_share=1.0)
ROWS = 2 * 4e6  # bytes of a sample that go to its two experts


def of_experts(body: Body) -> Body:
    """The made block, whose two matmuls are those of four experts, and a matmul of the whole model."""
    profile = mixture(Profile((Unit("blocks.0", replace(body, output_bytes=Amount(0, ROWS / 2))),)))
    mixed = profile.units[0].body
    return replace(mixed, weights=(*mixed.weights, block(cut=False).weights[0]))


def predicted(
    program: Program = QUIET,
    *,
    imbalance: float = 1.0,
    hosts: int = 1,
    rate: float = 1e10,
    level: Any = "parameters",
    **layout: int,
) -> Prediction:
    case = replace(work(blocks=2, batch=8, body=of_experts(block(cut=False))), imbalance=imbalance)
    num_devices = Plan().with_sections(layout=layout).layout.world_size
    plan = Plan().with_sections(layout=layout, batch={"grains_per_microbatch": 0}, shard={"level": level})
    link = replace(LINK, bytes_per_second=rate)
    return predict(plan, case, cluster(num_devices // hosts, hosts, link=link), program)


def test_a_rank_computes_as_many_rows_for_fewer_experts() -> None:
    whole, divided = predicted(data=4), predicted(data=4, expert=4)
    assert divided.terms["compute"] == pytest.approx(whole.terms["compute"])
    assert divided.flops_per_device == whole.flops_per_device
    of_experts, beside = 2 * 2 * 4 * 4e6, 2 * 4e6  # bytes of two blocks: of two weights and four experts, and beside
    assert whole.memory["parameters"] == of_experts + beside
    assert divided.memory["parameters"] == of_experts / 4 + beside
    assert divided.memory["optimizer"] == 2 * (of_experts / 4 + beside)


def test_rows_travel_four_times() -> None:
    # Two samples, two blocks, and three quarters of a rank's rows at 10 GB/s; counts take next to nothing.
    assert predicted(data=4, expert=4).terms["experts"] == pytest.approx(2 * 2 * 4 * ROWS * 0.75 / 1e10, rel=1e-3)
    assert predicted(data=4).terms["experts"] == 0.0
    half = predicted(replace(QUIET, dispatch_share=0.5), data=4, expert=4)
    assert half.terms["experts"] == pytest.approx(2 * 2 * 4 * ROWS * 0.75 / 0.5e10, rel=1e-3)


def test_counts_of_rows_travel_once_before_a_forward() -> None:
    network = Network(cluster(4, link=replace(LINK, call_seconds=1e-3)))
    forward, backward = exchange_seconds(network, QUIET, Dispatch(Amount(0, ROWS), 4, 2, 4), 1.0, 1)
    assert forward - backward == pytest.approx(1e-3, rel=1e-3)
    assert backward == pytest.approx(2e-3 + 2 * ROWS * 0.75 / 1e10, rel=1e-3)


def test_a_token_crosses_the_network_once_a_host() -> None:
    """Of two hosts' four ranks the other host has one of a token's two experts with a chance of 3 in 4."""
    once = predicted(replace(QUIET, dispatch=DEEPEP), data=4, expert=4, hosts=2)
    at_network = 2 * 2 * 4 * (ROWS / 2) * 0.75 / (1e9 / 2)
    assert once.terms["experts"] == pytest.approx(at_network, rel=1e-3)
    assert once.terms["experts"] < predicted(data=4, expert=4, hosts=2).terms["experts"]


def exact(*, trained: bool = True, shard: bool = False, **layout: int) -> Prediction:
    """Two microbatches of each of four ranks in exact mode. `trained`: whether the experts are."""
    body = of_experts(block(cut=False))
    frozen = tuple(replace(w, trainable=trained or not w.of_experts) for w in body.weights)
    case = work(blocks=2, batch=8, body=replace(body, weights=frozen))
    case = replace(case, profile=replace(case.profile, optimizer_passes=7.0))
    layout = {"shard" if shard else "data": 4, **layout}
    sections: dict[str, Any] = {"execution": {"exact": True}, "batch": {"grains_per_microbatch": 1}}
    plan = Plan().with_sections(layout=layout, shard={"level": "optimizer"}, **sections)
    program = replace(QUIET, overlap=False)
    predictor = Predictor(case, cluster(4, 1), program)
    prediction, costs = predictor.predict(plan), Costs(predictor, DEVICE)
    assert costs.nearly(plan) <= prediction.step_seconds * (1 + 1e-9)
    return prediction


EXPERT_BYTES, BESIDE = 2 * 2 * 4 * 4e6, 2 * 4e6  # of two blocks: of two weights of four experts, and of the others


def test_in_exact_mode_the_experts_travel() -> None:
    divided, whole = exact(expert=4), exact()
    assert divided.terms["compute"] == whole.terms["compute"]
    assert whole.terms["experts"] == 0.0
    # Two microbatches gather all experts twice and send all gradients, three quarters of the bytes at 10 GB/s.
    assert divided.terms["experts"] == pytest.approx(2 * 3 * EXPERT_BYTES * 0.75 / 1e10, rel=1e-2)
    assert divided.memory["parameters"] == EXPERT_BYTES / 4 + BESIDE
    assert divided.memory["gathered"] == EXPERT_BYTES / 2
    assert divided.memory["optimizer"] == 2 * (EXPERT_BYTES / 4 + BESIDE)
    # All gradients of a microbatch, until they travel, and the sums of the rank's own.
    assert divided.memory["gradients"] == pytest.approx(EXPERT_BYTES * 5 / 4 + BESIDE, rel=1e-4)


def test_in_exact_mode_a_rank_sums_and_updates_its_own_experts() -> None:
    whole, copies, alone = exact(), exact(expert=2), exact(expert=4)
    # Half of the experts on two ranks each, against none; the other parameters on all four in each case.
    of_copies, of_all = 2 * (EXPERT_BYTES / 2) / 2 / 1e10, 2 * EXPERT_BYTES * 0.75 / 1e10
    assert copies.terms["gradients"] - alone.terms["gradients"] == pytest.approx(of_copies, rel=1e-3)
    assert whole.terms["gradients"] - alone.terms["gradients"] == pytest.approx(of_all, rel=1e-3)
    assert alone.terms["optimizer"] < copies.terms["optimizer"] < whole.terms["optimizer"]


def test_in_exact_mode_ranks_with_the_same_experts_divide_their_states() -> None:
    copies, alone = exact(shard=True, expert=2), exact(shard=True, expert=4)
    assert copies.memory["parameters"] - alone.memory["parameters"] == EXPERT_BYTES / 4
    of_owner = EXPERT_BYTES / 4 + BESIDE / 2  # a quarter of the experts, and one of the two other weights
    assert copies.memory["optimizer"] == alone.memory["optimizer"] == 2 * of_owner


def test_in_exact_mode_frozen_experts_travel_without_gradients() -> None:
    frozen = exact(trained=False, expert=4)
    assert frozen.terms["experts"] == pytest.approx(2 * 2 * EXPERT_BYTES * 0.75 / 1e10, rel=1e-2)
    assert frozen.memory["gradients"] == pytest.approx(BESIDE, rel=1e-4)
    assert frozen.memory["parameters"] == EXPERT_BYTES / 4 + BESIDE


def test_gradients_of_experts_are_summed_over_the_ranks_with_the_same_ones() -> None:
    quiet = replace(QUIET, overlap=False)
    alone, copies = predicted(quiet, data=4, expert=4), predicted(quiet, data=4, expert=2)
    of_copies = 2 * 2 * 4 * 4e6 / 2  # bytes of a rank's experts, which two ranks have
    more = copies.terms["gradients"] - alone.terms["gradients"]
    assert more == pytest.approx(2 * of_copies / 2 / 1e10, rel=1e-3)


def test_ranks_with_the_same_experts_divide_their_states_under_zero_1() -> None:
    whole, divided = (predicted(shard=4, expert=n, level="optimizer") for n in (4, 2))
    of_experts = 2 * 2 * 4 * 4e6  # bytes of all experts, of which a rank has a quarter or a half
    assert divided.memory["parameters"] - whole.memory["parameters"] == of_experts / 4
    assert divided.memory["optimizer"] == whole.memory["optimizer"]
    assert divided.terms["optimizer"] > whole.terms["optimizer"]  # their new values travel


def test_sums_of_experts_and_others_share_the_backward() -> None:
    """Either of both would be hidden behind the backward alone; together they are not."""
    apart, together = (
        predicted(replace(QUIET, overlap=overlap), data=4, expert=2, rate=5e7) for overlap in (False, True)
    )
    backward = 2 / 3 * apart.terms["compute"] + apart.terms["experts"] / 2
    assert apart.terms["gradients"] > backward
    hidden = apart.terms["gradients"] - together.terms["gradients"]
    assert 0.5 * backward < hidden <= backward * (1 + 1e-6)


def test_uneven_routing_takes_as_long_as_the_busiest_rank() -> None:
    even, uneven = predicted(data=4, expert=4), predicted(data=4, expert=4, imbalance=1.5)
    assert uneven.terms["compute"] == pytest.approx(1.5 * even.terms["compute"])
    assert predicted(data=4, imbalance=1.5).terms["compute"] == pytest.approx(even.terms["compute"])


def test_tensor_ranks_send_a_part_of_their_tokens_each() -> None:
    one, two = predicted(data=4, expert=4), predicted(data=2, tensor=2, expert=4)
    assert two.terms["compute"] == pytest.approx(one.terms["compute"])  # twice the samples, half of the rows of each
    whole = 4 * 2 * 2 * (ROWS / 2) / 2 / 1e10  # each rank gathers the results that the other one has
    assert two.terms["experts"] - one.terms["experts"] == pytest.approx(whole, rel=1e-2)
