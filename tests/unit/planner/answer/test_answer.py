"""The plan of an answer is the one that was predicted, so that the run is the one of the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.planner.models import facts, gpus, transformer
from tests.unit.plans.checking import check

from shoal.planner.answer.display import hints
from shoal.planner.answer.outlook import (
    Case,
    Change,
    Question,
    ScalingCurve,
    SearchResult,
    UnalignedProducts,
    unaligned_products,
)
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Workload
from shoal.planner.profile.values import OperationKind
from shoal.planner.search.search import Candidate, choose, parse
from shoal.planner.search.space import Space
from shoal.plans.plan import Plan

STAGES = Plan().with_sections(layout={"pipeline": 2}, batch={"grains_per_microbatch": 1})


@pytest.fixture(scope="module")
def whole() -> SearchResult:
    work = Workload(transformer(layers=4, width=256, ffn=512, vocabulary=4096, positions=64, heads=4), 8, 8)
    case = Case(work, gpus(1, 2), Space(Plan(), facts(8, layers=4, heads=4, positions=64), (1, 2)))
    choice = choose(case.search(), parse("fastest"))
    return SearchResult(Question(case, 10), choice, ScalingCurve((), None, ""), (), None, 0.0, "job")


def of_stages(whole: SearchResult) -> SearchResult:
    prediction = Predictor(whole.question.case.work, whole.question.case.cluster).predict(STAGES)
    return replace(whole, choice=replace(whole.choice, chosen=Candidate(STAGES, prediction)))


def test_a_pipeline_is_cut_where_it_was_predicted(whole: SearchResult) -> None:
    staged = of_stages(whole)
    assert staged.plan.pipeline.split == staged.chosen.prediction.split
    assert len(staged.plan.pipeline.split) == 1
    check(staged.plan, whole.question.case.space.facts)


def test_a_place_where_no_stage_can_begin_is_not_written(whole: SearchResult) -> None:
    case = whole.question.case
    elsewhere = replace(case, space=replace(case.space, facts=replace(case.space.facts, cuts=("head",))))
    assert of_stages(replace(whole, question=Question(elsewhere, 10))).plan.pipeline.split == ()


def test_one_stage_has_no_split(whole: SearchResult) -> None:
    assert whole.plan.pipeline.split == ()


def test_a_plan_has_what_a_report_needs(whole: SearchResult) -> None:
    """Peak, price and tokens of a sample, where they are known; from them a run's share of the peak, cost and rate."""
    known = replace(whole, question=replace(whole.question.at_price(2.5), sample_tokens=64)).plan.prediction
    dtype, peak = whole.peak
    assert (known["peak_dtype"], known["peak_flops"]) == (dtype, peak)
    assert (known["price_per_hour"], known["sample_tokens"]) == (2.5, 64)
    samples = whole.question.case.work.global_batch / known["step_seconds"]
    assert samples * known["flops_per_sample"] / peak / known["devices"] == pytest.approx(known["mfu"])
    assert "sample_tokens" not in whole.plan.prediction


def narrow(whole: SearchResult, name: str = "aten._grouped_mm") -> SearchResult:
    """The same answer in bfloat16, with the products of the blocks in float32 under that name."""
    plan = whole.plan.with_sections(precision={"compute": "bfloat16"})
    case = whole.question.case
    bodies = {unit.body for unit in case.work.profile.units}
    wide = {
        body: replace(
            body,
            operations=tuple(
                replace(o, name=name, dtype="float32") if o.kind is OperationKind.MATMUL else o for o in body.operations
            ),
        )
        for body in bodies
    }
    units = tuple(replace(unit, body=wide[unit.body]) for unit in case.work.profile.units)
    work = replace(case.work, profile=replace(case.work.profile, units=units))
    chosen = replace(whole.chosen, plan=plan)
    question = replace(whole.question, case=replace(case, work=work))
    return replace(whole, question=question, choice=replace(whole.choice, chosen=chosen))


def test_an_answer_says_what_autocast_leaves_in_float32(whole: SearchResult) -> None:
    (told,) = hints(narrow(whole))
    assert "aten._grouped_mm, which autocast does not cast" in told
    assert float(told.partition("%")[0]) > 50


def test_an_answer_whose_products_are_narrow_says_nothing_of_them(whole: SearchResult) -> None:
    plan = whole.plan.with_sections(precision={"compute": "bfloat16"})
    assert hints(replace(whole, choice=replace(whole.choice, chosen=replace(whole.chosen, plan=plan)))) == []
    assert hints(whole) == []  # in float32 by choice


def unaligned(of: SearchResult) -> UnalignedProducts | None:
    return unaligned_products(of.question.case, of.chosen)


def with_vocabulary(vocabulary: int, unaligned: float = 0.25) -> SearchResult:
    """A decoder whose output layer is much of it, on two GPUs that are slow at what is not aligned."""
    profile = transformer(layers=2, width=512, ffn=2048, vocabulary=vocabulary, positions=1024, heads=8)
    base, cluster = Plan().with_sections(precision={"compute": "bfloat16"}), gpus(1, 2)
    device = replace(cluster.device, unaligned=unaligned, sources={"unaligned": "measured"})
    space = Space(base, facts(16, layers=2, heads=8, positions=1024), (1, 2))
    question = Question(Case(Workload(profile, 16, 16), replace(cluster, device=device), space), 10)
    choice = choose(question.case.search(), parse("fastest"))
    return SearchResult(question, choice, ScalingCurve((), None, ""), (), None, 0.0, "job")


def test_an_answer_says_first_what_unaligned_products_cost_and_what_padding_brings() -> None:
    found, padded = with_vocabulary(50_257), with_vocabulary(50_264)
    products = unaligned(found)
    assert products is not None
    assert [(row.length, row.padded) for row in products.rows] == [(50_257, 50_304)]
    assert products.step_seconds == found.chosen.seconds
    assert products.aligned_seconds == pytest.approx(padded.chosen.seconds, rel=0.01)
    # They take four times what they would, and all of the difference is theirs.
    lost = products.step_seconds - products.aligned_seconds
    assert products.product_seconds == pytest.approx(lost / 0.75, rel=0.05)
    told = hints(replace(found, changes=(Change("--precision fp8", 1.0, "+10% samples a second"),)))
    assert told[0].startswith("Products with rows of 50,257 numbers, no multiple of 8, take ")
    assert "Padded to 50,304 a step would take " in told[0]
    assert "(measured)" in told[0]
    assert len(told) == 2


def test_a_plan_in_float8_is_predicted_with_the_weights_gradients_in_16_bits() -> None:
    case = with_vocabulary(50_264).question.case
    programs = []
    for products in ("same", "float8_rows", "float8_blocks"):
        base = case.space.base.with_sections(precision={"compute": "bfloat16", "products": products})
        programs.append(replace(case, space=replace(case.space, base=base)).own_program)
    assert [(one.layers, one.wide_weights) for one in programs] == [(None, False), ("float8", True), (None, False)]


def test_an_answer_is_silent_on_rows_that_cost_little() -> None:
    assert unaligned(with_vocabulary(50_264)) is None
    assert unaligned(with_vocabulary(50_257, unaligned=1.0)) is None
    assert unaligned(with_vocabulary(101)) is None


def test_what_a_tensor_axis_divides_is_padded_for_all_of_its_ranks() -> None:
    whole = with_vocabulary(50_264)
    plan = whole.chosen.plan.with_sections(layout={"data": 1, "tensor": 2})
    prediction = whole.question.case.predictor.predict(plan)
    found = replace(whole, choice=replace(whole.choice, chosen=Candidate(plan, prediction)))
    products = unaligned(found)
    assert products is not None
    assert [(row.length, row.padded) for row in products.rows] == [(50_264, 50_304)]
    assert "no multiple of 8 on each rank" in str(products)
