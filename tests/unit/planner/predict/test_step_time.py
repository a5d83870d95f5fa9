"""A step's terms against what can be told in the head: four blocks of 12e9 FLOPs a sample at 1 TFLOP/s."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.made import DEVICE, LINK, block, cluster, predict, work

from shoal.hardware.values import MEMORY_MARGIN
from shoal.planner.predict.lower_bounds import Costs
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import CATEGORIES, TERMS, Program
from shoal.planner.profile.values import Amount, Body, Operation, OperationKind, Phase, Unit
from shoal.plans.plan import Plan

BLOCK = 12e-3  # seconds a sample
QUIET = Program(contention=0.0, call_seconds=0.0, fragmentation=0.0)
ROOMY = replace(DEVICE, memory_bytes=10**12, memory_bytes_per_second=1e18)


def plan(grains: int = 1, **sections: dict[str, object]) -> Plan:
    return Plan().with_sections(batch={"grains_per_microbatch": grains}, **sections)


def seconds(devices: int, given: Plan, program: Program = QUIET, **more: object) -> dict[str, float]:
    return predict(given, work(**more), cluster(devices, device=ROOMY), program).terms


def test_one_device_computes_everything():
    assert seconds(1, plan(8))["compute"] == pytest.approx(8 * 4 * BLOCK)


def test_terms_and_categories_are_all_there_and_sum():
    found = predict(plan(2, layout={"data": 2, "pipeline": 2}), work(), cluster(4), Program())
    assert tuple(found.terms) == TERMS
    assert tuple(found.memory) == CATEGORIES
    assert found.step_seconds == pytest.approx(sum(found.terms.values()))
    assert found.peak_bytes == pytest.approx(sum(found.memory.values()))


def test_data_parallelism_divides_the_work_and_sums_the_gradients():
    alone = replace(QUIET, overlap=False)
    terms = seconds(2, plan(4, layout={"data": 2}), alone)
    assert terms["compute"] == pytest.approx(4 * 4 * BLOCK)
    # 32 MB, of which a ring of 2 moves 2 x 1/2, and the step's sums
    assert terms["gradients"] == pytest.approx(4 * 8e6 / 1e10, rel=1e-4)


def test_gradients_hide_behind_the_backward():
    assert seconds(2, plan(4, layout={"data": 2}))["gradients"] < 4 * 8e6 / 1e10
    assert seconds(2, plan(4, layout={"data": 2}))["gradients"] > 0


def test_a_tensor_pair_is_divided_and_its_activations_are_summed():
    terms = seconds(2, plan(8, layout={"tensor": 2}))
    assert terms["compute"] == pytest.approx(8 * 4 * BLOCK / 2)
    assert terms["tensor"] == pytest.approx(8 * 4 * 2 * 4e6 / 1e10)  # one all_reduce forward, one backward


def test_sequence_parallelism_sends_the_same_bytes_in_twice_as_many_calls():
    whole = seconds(2, plan(8, layout={"tensor": 2}))
    cut = seconds(2, plan(8, layout={"tensor": 2}, tensor={"sequence": True}))
    assert cut["tensor"] == pytest.approx(whole["tensor"])


def test_a_pipeline_waits_for_its_first_and_last_microbatch():
    terms = seconds(4, plan(1, layout={"pipeline": 4}))
    assert terms["compute"] == pytest.approx(8 * BLOCK)
    # (p - 1) of m + p - 1, as 1F1B's papers have it, and the messages on the way there and back
    assert terms["bubble"] == pytest.approx(3 * BLOCK + 6 * 4e6 / 1e10)


def test_tensor_ranks_may_send_a_part_of_a_message_each():
    """Both send 4 MB between two hosts at 1e9 a second, or half of it, and then 2 MB from the neighbour at 1e10."""
    divided, hosts = plan(1, layout={"tensor": 2, "pipeline": 2}), cluster(2, hosts=2, device=ROOMY)
    whole = predict(divided, work(), hosts, QUIET).terms["pipeline"]
    parts = predict(divided, work(), hosts, replace(QUIET, scatter_messages=True)).terms["pipeline"]
    assert whole == pytest.approx(2 * 8 * 2 * 4e6 / 1e9)
    assert parts == pytest.approx(2 * 8 * (2 * 2e6 / 1e9 + 2e6 / 1e10))


def test_a_zero_bubble_schedule_waits_less():
    some = seconds(4, plan(1, layout={"pipeline": 4}))["bubble"]
    less = seconds(4, plan(1, layout={"pipeline": 4}, pipeline={"schedule": "zero_bubble"}))["bubble"]
    assert less < 0.8 * some


def test_full_recomputation_computes_the_forward_again():
    assert seconds(1, plan(8, memory={"recompute": "full"}))["recompute"] == pytest.approx(8 * 4 * BLOCK / 3)


def test_a_loss_over_the_batch_has_a_first_pass_over_several_microbatches_and_all_outputs():
    gathered = replace(work(), output_bytes=100.0)
    apart, at_once = (predict(plan(grains), gathered, cluster(1, device=ROOMY), QUIET) for grains in (1, 8))
    assert apart.terms["recompute"] == pytest.approx(8 * 4 * BLOCK / 3)
    assert at_once.terms["recompute"] == 0.0
    plain = predict(plan(8), work(), cluster(1, device=ROOMY), QUIET)
    assert at_once.memory["activations"] - plain.memory["activations"] == pytest.approx(2 * 100.0 * 8)


def test_gathered_parameters_hide_behind_the_blocks_but_for_the_first():
    sharded = {"layout": {"shard": 2}, "shard": {"level": "parameters"}}
    terms = seconds(2, plan(4, **sharded))
    once = 8e6 / 2 / 1e10  # half of a block's 8 MB
    assert terms["parameters"] == pytest.approx(3 * once, rel=0.01)  # the first gather of each pass, the last scatter


def test_a_host_that_starts_operators_too_slowly_is_waited_for():
    slow = replace(ROOMY, dispatch_seconds=1.0)
    found = predict(plan(8), work(), cluster(1, device=slow), QUIET)
    assert found.terms["launch"] == pytest.approx(4 * 6 - 8 * 4 * BLOCK)


def test_what_zero_divides():
    def of(level: str) -> dict[str, float]:
        given = plan(1, layout={"shard": 4}, shard={"level": level})
        return predict(given, work(), cluster(4), QUIET).memory

    whole = predict(plan(1, layout={"data": 4}), work(), cluster(4), QUIET).memory
    weights = 4 * 8e6
    assert whole["parameters"] == weights
    assert whole["optimizer"] == 2 * weights
    assert of("optimizer")["optimizer"] == of("parameters")["optimizer"] == 2 * weights / 4
    assert of("optimizer")["parameters"] == weights
    assert of("parameters")["parameters"] == weights / 4
    assert of("parameters")["gradients"] < of("optimizer")["gradients"]
    assert of("gradients")["gathered"] == weights + weights / 4  # and the buffer in which the last block arrives


def test_activations_are_held_for_as_many_microbatches_as_the_schedule_says():
    def of(schedule: str) -> float:
        given = plan(1, layout={"pipeline": 4}, pipeline={"schedule": schedule})
        return predict(given, work(), cluster(4), replace(QUIET, pipeline_fragmentation=0.0)).memory["activations"]

    assert of("1f1b") == pytest.approx(4 * 8e6, rel=0.01)  # rank 0 of 4: four microbatches of one block's 8 MB
    assert of("gpipe") == pytest.approx(8 * 8e6, rel=0.01)


def test_the_last_stage_of_an_interleaved_pipeline_holds_one_microbatch_of_its_logits():
    """Of two ranks of two stages rank 1 holds three microbatches: of its last stage one, 8 MB and 1 GB of logits."""
    whole = work()
    *blocks, last = whole.profile.units
    logits = Operation("o", "", OperationKind.MEMORY, Phase.FORWARD, saved_bytes=Amount(0, 1e9), launches=0)
    heavy = replace(last, body=replace(last.body, operations=(*last.body.operations, logits)))
    whole = replace(whole, profile=replace(whole.profile, units=(*blocks, heavy)))
    schedule = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
    given = plan(1, layout={"pipeline": 2}, pipeline=schedule)
    found = predict(given, whole, cluster(2), replace(QUIET, pipeline_fragmentation=0.0)).memory["activations"]
    assert found == pytest.approx(1e9 + 3 * 8e6, rel=0.01)


def test_recomputation_keeps_the_input_of_a_block():
    kept = predict(plan(8, memory={"recompute": "full"}), work(), cluster(1), QUIET).memory["activations"]
    whole = predict(plan(8), work(), cluster(1), QUIET).memory["activations"]
    assert whole == pytest.approx(8 * 4 * 8e6, rel=0.01)
    assert kept == pytest.approx(8 * (4 * 4e6 + 4e6), rel=0.01)  # four inputs, and one block's other half back


def test_a_heap_keeps_a_share_of_all_that_a_rank_holds():
    on_cores = cluster(1, device=replace(DEVICE, kind="cpu"))
    memory = dict(predict(plan(), work(), on_cores, replace(QUIET, heap_share=0.5)).memory)
    allocator, reserved = memory.pop("allocator"), memory.pop("reserved")
    assert reserved == DEVICE.reserved_bytes
    assert allocator == pytest.approx(0.5 * sum(memory.values()))
    assert allocator > 0


def test_what_does_not_fit_says_by_how_much():
    found = predict(plan(8), work(blocks=40), cluster(1), QUIET)
    assert not found.fits
    usable = (1 - MEMORY_MARGIN) * DEVICE.memory_bytes
    assert found.missing_bytes == pytest.approx(found.peak_bytes - usable)


def test_what_a_margin_leaves_free_is_not_planned():
    peak = predict(plan(8), work(blocks=40), cluster(1), QUIET).peak_bytes
    device = replace(DEVICE, memory_bytes=round(peak / 0.97))

    def fits(margin: float) -> bool:
        return predict(plan(8), work(blocks=40), replace(cluster(1, device=device), memory_margin=margin), QUIET).fits

    assert [fits(margin) for margin in (0.0, 0.02, 0.04, MEMORY_MARGIN)] == [True, True, False, False]


layouts = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 4]) for axis in ("data", "shard", "tensor", "pipeline")})


@given(
    layouts, st.sampled_from([1, 2]), st.sampled_from(["none", "full"]), st.sampled_from(["optimizer", "parameters"])
)
def test_the_bounds_are_bounds(layout, grains, recompute, level):
    given_plan = plan(grains, layout=layout, memory={"recompute": recompute}, shard={"level": level})
    predictor = Predictor(work(batch=16), cluster(8, 32), Program())
    found = predictor.predict(given_plan)
    bounds = Costs(predictor, predictor.cluster.device)
    assert bounds.staged(given_plan) <= bounds.at(given_plan) * (1 + 1e-9)
    assert bounds.at(given_plan) <= found.step_seconds * (1 + 1e-9)
    assert bounds.least_bytes(given_plan) <= found.peak_bytes * (1 + 1e-9)


@pytest.mark.parametrize("level", ["gradients", "parameters"])
@pytest.mark.parametrize("layout", [{"shard": 4}, {"data": 2, "shard": 2}])
def test_the_bound_of_sums_holds_where_the_first_unit_has_no_weights(layout, level):
    whole, slow = work(blocks=2), cluster(4, link=replace(LINK, bytes_per_second=1e6))
    bare = replace(whole.profile, units=(Unit("input", Body(())), *whole.profile.units))
    predictor = Predictor(replace(whole, profile=bare), slow, QUIET)
    given_plan = plan(2, layout=layout, shard={"level": level})
    found = predictor.predict(given_plan)
    bounds = Costs(predictor, predictor.cluster.device)
    assert bounds.staged(given_plan) < bounds.at(given_plan) <= found.step_seconds * (1 + 1e-9)


def test_a_body_without_cuts_is_whole_on_every_tensor_rank():
    found = predict(plan(8, layout={"tensor": 2}), work(body=block(cut=False)), cluster(2, device=ROOMY), QUIET)
    assert found.terms["compute"] == pytest.approx(8 * 4 * BLOCK)


def test_utilisation_is_of_the_peak_that_multiplies_and_of_what_is_executed():
    """A GPU whose float32 products run in tf32, ten times as fast, and 3 x 3 convolutions with 1.7 times fewer."""
    both = replace(ROOMY, flops={"float32": 1e12, "tf32": 1e13}, multiprocessors=1, tile=(1, 1))
    fast = predict(plan(8), work(), cluster(1, device=both), replace(QUIET, fast_float32=True))
    assert fast.mfu == pytest.approx(fast.flops_per_device / fast.step_seconds / 1e13)
    counted = predict(plan(8), work(), cluster(1, device=both), QUIET)
    body = block()
    spared = replace(body, operations=tuple(replace(o, winograd=True) for o in body.operations))
    fewer = predict(plan(8), work(body=spared), cluster(1, device=both), QUIET)
    assert fewer.mfu == pytest.approx(counted.mfu)
    assert fewer.step_seconds < 0.7 * counted.step_seconds


def test_stages_beyond_the_units_of_a_model_are_empty():
    assert seconds(4, plan(1, layout={"pipeline": 4}), blocks=2)["compute"] == pytest.approx(8 * BLOCK)


def test_states_of_a_program_may_be_divided_over_context_ranks_too():
    layout = {"shard": 2, "context": 2}
    given_plan = plan(2, layout=layout, shard={"level": "parameters"})
    one, other = (
        predict(given_plan, work(), cluster(4), replace(QUIET, shards_context=shards)) for shards in (False, True)
    )
    assert other.memory["optimizer"] == one.memory["optimizer"] / 2
    assert other.memory["parameters"] == one.memory["parameters"] / 2
    assert other.memory["activations"] == one.memory["activations"]


def test_of_an_exchange_that_a_product_hides_one_part_is_waited_for():
    shown = predict(plan(8, layout={"tensor": 4}), work(), cluster(4), replace(QUIET, contention=0.0))
    hidden = predict(
        plan(8, layout={"tensor": 4}), work(), cluster(4), replace(QUIET, contention=0.0, overlaps_exchanges=True)
    )
    assert hidden.terms["tensor"] == pytest.approx(shown.terms["tensor"] / 4)


def test_parameters_that_are_gathered_apart_are_waited_for_and_copied_by_rank():
    def seconds(ranks, **program):
        found = predict(plan(8 // ranks, layout={"shard": ranks}), work(), cluster(8), replace(QUIET, **program))
        return found.terms["parameters"]

    apart = {"gathers_apart": True}
    assert seconds(4, **apart) > seconds(4)
    # Each of 4 blocks has 2 parameters, gathered twice and scattered once.
    for ranks in (2, 4):
        sliced = seconds(ranks, **apart, slice_seconds=1e-3) - seconds(ranks, **apart)
        assert sliced == pytest.approx(4 * 2 * 3 * ranks * 1e-3)


def test_images_with_their_channels_last_take_what_was_measured_of_them() -> None:
    """Also beside the same plan with channels first; a lower bound of the search is one of both."""
    operators = {"pool": 0.01, "pool_channels_last": 0.1}
    core = replace(DEVICE, kind="cpu", memory_bytes=10**12, operators=operators)
    pool = Operation("pool", "", OperationKind.MEMORY, Phase.FORWARD, read_bytes=Amount(0, 1e9))
    of_pools = Unit("0", Body((pool,)))
    case = work()
    case = replace(case, profile=replace(case.profile, units=(of_pools,)))
    predictor = Predictor(case, cluster(1, device=core), QUIET)
    first, last = (plan(8, execution={"channels_last": each}) for each in (False, True))
    told = [predictor.predict(each).terms["compute"] for each in (first, last, first)]
    assert told == pytest.approx([0.8, 0.08, 0.8])
    assert Costs(predictor, core).floor(8.0, 1, 1, 1, 1) <= 0.08 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("layout", "level"), [({"shard": 4}, "parameters"), ({"shard": 4}, "gradients"), ({"tensor": 4}, "optimizer")]
)
def test_whole_parameters_go_to_their_owners_and_back(layout: dict[str, int], level: str) -> None:
    """A rank has 8 MB of 32: it sends three quarters of values and gradients, and receives as many values."""
    made = work(batch=8)
    whole = replace(made, profile=replace(made.profile, optimizer_whole=8_000_000))
    times = [
        Predictor(one, cluster(4), QUIET).predict(plan(layout=layout, shard={"level": level})).terms["optimizer"]
        for one in (made, whole)
    ]
    assert times[1] - times[0] == pytest.approx(3 * 8e6 * 3 / 4 / 1e10)
