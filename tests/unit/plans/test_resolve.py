"""Wishes and plans become one complete plan, or are refused where they contradict each other."""

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError, SettingWarning
from shoal.plans import Plan
from shoal.plans.legal import idle
from shoal.plans.resolve import PRECISIONS, CompletePlan, Wishes, apply_wishes, complete, sets_step, without_step


def of(**sections: dict[str, Any]) -> Plan:
    return Plan().with_sections(**sections)


def test_no_wishes_change_nothing() -> None:
    plan = of(layout={"data": 3})
    assert apply_wishes(plan, Wishes(), from_file=True) == plan


def test_devices_become_the_data_axis() -> None:
    assert apply_wishes(Plan(), Wishes(devices=6), from_file=False).layout.data == 6
    with pytest.raises(PlanError, match="at least one process"):
        apply_wishes(Plan(), Wishes(devices=0), from_file=False)


def test_devices_that_contradict_a_plan_file_are_refused() -> None:
    plan = of(layout={"data": 2, "shard": 2})
    assert apply_wishes(plan, Wishes(devices=4), from_file=True) == plan
    with pytest.raises(PlanError) as caught:
        apply_wishes(plan, Wishes(devices=3), from_file=True)
    assert caught.value.given == "--devices 3 with a plan whose layout is data = 2, shard = 2"
    assert "world of 4" in caught.value.conflict
    with pytest.raises(PlanError, match="layout is data = 1"):
        apply_wishes(Plan(), Wishes(devices=3), from_file=True)


def test_other_wishes_are_written_into_the_plan() -> None:
    plan = apply_wishes(Plan(), Wishes(exact=True, precision="bf16", workers=2), from_file=True)
    assert plan.execution.exact
    assert plan.precision.compute == "bfloat16"
    assert plan.data.workers == 2
    assert not apply_wishes(plan, Wishes(exact=False), from_file=True).execution.exact


@pytest.mark.parametrize(
    ("name", "same"),
    [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"), ("bf16-mixed", "bf16"), ("fp8", "fp8")],
)
def test_precision_names(name: str, same: str) -> None:
    wished = [apply_wishes(Plan(), Wishes(precision=n), from_file=False) for n in (name, same)]
    assert wished[0] == wished[1]
    section = wished[0].precision
    own = (section.parameters, section.compute, section.reduce, section.loss_scale, section.products)
    assert own == PRECISIONS[same]


def test_only_half_precision_scales_the_loss_and_only_pure_narrows_parameters() -> None:
    assert {n for n, v in PRECISIONS.items() if v[3] != "none"} == {"fp16"}
    assert {n for n, v in PRECISIONS.items() if v[0] != "float32"} == {"bf16-pure"}
    assert {n: v[4] for n, v in PRECISIONS.items() if v[4] != "same"} == {"fp8": "float8_rows"}
    assert {v[2] for v in PRECISIONS.values()} == {"float32"}


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(PlanError, match="did you mean 'bf16'"):
        apply_wishes(Plan(), Wishes(precision="bf61"), from_file=False)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 70), st.none() | st.integers(1, 500))
def test_completion_leaves_nothing_open(ranks: int, grains: int, per: int, most: int | None) -> None:
    plan = of(layout={"data": ranks}, batch={"grains_per_microbatch": per})
    if ranks > grains:
        with pytest.raises(PlanError):
            complete(plan, grains, 4, most)
        return
    if most is not None and most < 4:
        with pytest.raises(PlanError, match="a grain is computed whole, and has 4 samples"):
            complete(plan, grains, 4, most)
        return
    chosen = complete(plan, grains, 4, most).batch.grains_per_microbatch
    share = -(-grains // ranks)
    assert 1 <= chosen <= share
    assert chosen <= (per or share)
    assert most is None or chosen * 4 <= most
    if most is None and not per:
        assert chosen == share


def test_more_data_ranks_than_grains_are_refused_with_the_legal_numbers() -> None:
    with pytest.raises(PlanError) as caught:
        complete(of(layout={"data": 3, "shard": 4}), 8, 4)
    assert caught.value.given == "12 data ranks for a job of grains=8"
    assert "1 to 8 (evenly: 1, 2, 4, 8)" in caught.value.remedy
    assert "Job(grains=12)" in caught.value.remedy


def test_a_pipeline_gets_as_many_microbatches_as_its_schedule_needs() -> None:
    assert complete(of(layout={"pipeline": 2}), 8, 4).batch.grains_per_microbatch == 4
    assert complete(of(layout={"pipeline": 4, "data": 2}), 8, 4).batch.grains_per_microbatch == 1
    assert complete(of(layout={"pipeline": 2}, pipeline={"schedule": "gpipe"}), 8, 4).batch.grains_per_microbatch == 4
    with pytest.raises(PlanError, match="4 a microbatch"):  # none is legal
        complete(of(layout={"pipeline": 8, "data": 2}), 8, 4)


def test_devices_of_a_layout_with_other_axes() -> None:
    plan = of(layout={"data": 2, "tensor": 4})
    assert apply_wishes(plan, Wishes(devices=12), from_file=False).layout.data == 3
    other = apply_wishes(plan, Wishes(devices=6), from_file=False)  # no multiple of 4: both degrees are chosen anew
    assert (other.layout.data, other.layout.tensor) == (3, 2)


def test_exact_mode_computes_grain_by_grain() -> None:
    plan = of(execution={"exact": True})
    assert complete(plan, 8, 4).batch.grains_per_microbatch == 1
    assert complete(plan, 8, 4, 16).batch.grains_per_microbatch == 1
    with pytest.warns(SettingWarning, match="grains_per_microbatch has no effect"):
        complete(plan.with_sections(batch={"grains_per_microbatch": 2}), 8, 4)


def test_everything_unsupported_is_named_at_once() -> None:
    plan = of(
        layout={"tensor": 2},
        execution={"exact": True},
        collectives={"all_reduce": "ring", "compression": "int8"},
        precision={"reduce": "bfloat16"},
    )
    with pytest.raises(PlanError) as caught:
        complete(plan, 8, 4)
    for key in ("execution.exact", "collectives.all_reduce", "collectives.compression", "precision.reduce"):
        assert f"{key} = " in caught.value.given
        assert f"{key} = " in caught.value.remedy


def test_what_is_supported_passes_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        complete(of(layout={"data": 8}, execution={"exact": True}), 8, 4)
        complete(apply_wishes(Plan(), Wishes(precision="fp16"), from_file=False), 8, 4)


def test_what_does_not_go_with_a_context_axis_is_refused() -> None:
    complete(of(layout={"context": 2, "tensor": 2, "shard": 2}, memory={"recompute": "full"}), 8, 4)
    complete(of(layout={"context": 2, "pipeline": 2}), 8, 4)
    with pytest.raises(PlanError, match="cannot compile"):
        complete(of(layout={"context": 2}, execution={"compile": "default"}), 8, 4)
    with pytest.raises(PlanError, match=r"execution\.exact"):
        complete(of(layout={"context": 2}, execution={"exact": True}), 8, 4)


def test_offload_is_refused_where_nothing_would_be_offloaded() -> None:
    for level in ("gradients", "parameters"):
        complete(of(layout={"shard": 2}, shard={"level": level, "offload": True}), 8, 4)
    with pytest.raises(PlanError, match=r"shard\.offload = true"):
        complete(of(layout={"shard": 2}, shard={"level": "optimizer", "offload": True}), 8, 4)


def test_compilation_that_would_break_a_promise_is_refused() -> None:
    for kind in ("default", "reduce-overhead", "max-autotune"):
        complete(of(execution={"compile": kind}, memory={"recompute": "full"}), 8, 4)
        with pytest.raises(PlanError, match="does not show its products"):
            complete(of(execution={"compile": kind}, memory={"recompute": "selective"}), 8, 4)
    complete(of(execution={"compile": "default", "exact": True}), 8, 4)
    with pytest.raises(PlanError, match="not the same bits"):
        complete(of(execution={"compile": "max-autotune", "exact": True}), 8, 4)


def test_a_loss_scale_without_effect_is_told() -> None:
    (said,) = idle(of(precision={"compute": "bfloat16", "loss_scale": "dynamic"}))
    assert "no effect on bfloat16" in said
    assert list(idle(of(precision={"compute": "float16", "loss_scale": "dynamic"}))) == []


def test_a_complete_plan_is_a_plan_of_its_own_kind() -> None:
    plan = complete(of(layout={"data": 2}, collectives={"compression": "int8"}), 8, 4)
    assert (
        type(plan) is type(plan.uncompressed) is type(plan.alone) is type(plan.with_choices(workers=2)) is CompletePlan
    )
    assert plan.uncompressed == complete(of(layout={"data": 2}), 8, 4)
    assert (plan.alone.layout.world_size, plan.with_choices(workers=2).data.workers) == (1, 2)
    assert type(plan.with_sections(layout={"data": 4})) is Plan  # another, which nobody has judged


def test_the_mode_of_steps_is_left_open_where_a_plan_has_none() -> None:
    plan = Plan().with_sections(layout={"data": 2})
    assert sets_step(plan)
    assert not sets_step(without_step(plan))
    assert without_step(plan) == plan
    compiled = plan.with_sections(execution={"compile": "default"})
    assert sets_step(without_step(compiled))
