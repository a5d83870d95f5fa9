"""Predictions beside measurements, and what is learned from them."""

import pytest

from shoal.planner.comparison import PARTS, MeasuredStep, beside, file_name, learn, of_terms, section, told
from shoal.planner.workload import TERMS, Prediction
from shoal.records import SPANS


def predicted(**terms: float) -> dict:
    every = {**dict.fromkeys(TERMS, 0.0), **terms}
    found = Prediction(sum(every.values()), every, {"parameters": 10.0}, 10.0, True, 0.0, 0.0, 1.0, 0.5)
    return section(found, {"cluster": "here", "factors": {}})


def step(**spans: float) -> MeasuredStep:
    every = {**dict.fromkeys(SPANS, 0.0), **spans}
    return MeasuredStep(sum(every.values()), every)


def test_every_term_and_span_is_in_one_part() -> None:
    assert sorted(term for terms, _ in PARTS.values() for term in terms) == sorted(TERMS)
    assert sorted(span for _, spans in PARTS.values() for span in spans) == sorted({*SPANS} - {"checkpoint"})


def test_the_first_steps_are_left_out() -> None:
    steps = [step(forward=9.0), step(forward=9.0), *(step(forward=1.0, backward=2.0) for _ in range(5))]
    found = beside(predicted(compute=2.0, bubble=0.5), steps, 20)
    assert found["num_steps"] == 5
    assert found["parts"]["compute"] == {"predicted": 2.5, "measured": 3.0}
    assert found["step_seconds"] == {"predicted": 2.5, "measured": 3.0}
    assert found["peak_bytes"] == {"predicted": 10, "measured": 20}
    assert "predicted 2500.0 (-17%)" in told(found)


def test_without_spans_the_step_alone_is_compared() -> None:
    found = beside(predicted(compute=1.0), [MeasuredStep(2.0, {})], None)
    assert found["step_seconds"]["measured"] == 2.0
    assert found["parts"]["compute"]["measured"] is None
    assert told(found).endswith("(-50%)")


def test_the_median_ratio_is_learned() -> None:
    runs = [
        beside(predicted(compute=1.0, optimizer=0.2), [step(forward=r, optimizer=0.1, other=0.2)], None)
        for r in (1.9, 2.0, 4.0)
    ]
    lesson = learn(runs)
    assert lesson.factors == pytest.approx({"compute": 2.0, "optimizer": 0.5})
    assert lesson.num_runs == {"compute": 3, "optimizer": 3}
    assert lesson.unexplained == pytest.approx({"host": 0.2})
    assert lesson.error_before == pytest.approx(1 - 1.2 / 2.3)
    assert lesson.error_after == pytest.approx(1 - 2.1 / 2.3)
    assert of_terms(lesson.factors)["bubble"] == pytest.approx(2.0)
    assert "gradients" not in of_terms(lesson.factors)


def test_what_was_corrected_already_is_not_corrected_twice() -> None:
    told_before = {**predicted(compute=2.0), "factors": {"compute": 2.0}}
    lesson = learn([beside(told_before, [step(forward=3.0)], None)])
    assert lesson.factors == pytest.approx({"compute": 3.0})
    assert lesson.error_after == pytest.approx(0.0)


def test_file_names() -> None:
    assert file_name("4x8xA100@200Gb") == "4x8xA100@200Gb.calibration.toml"
    assert "/" not in file_name("../my cluster.toml")
