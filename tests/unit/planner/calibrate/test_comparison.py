"""Predictions beside measurements, and what is learned from them."""

import pytest

from shoal.planner.calibrate.comparison import PARTS, MeasuredStep, against, as_line, beside, section
from shoal.planner.predict.workload import TERMS, Prediction
from shoal.runs.records import SPANS


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
    found = beside(predicted(compute=2.0, bubble=0.5), steps, 20, "cpu")
    assert found["num_steps"] == 5
    assert found["parts"]["compute"] == {"predicted": 2.5, "measured": 3.0}
    assert found["step_seconds"] == {"predicted": 2.5, "measured": 3.0}
    assert found["peak_bytes"] == {"predicted": 10, "measured": 20}
    assert "20% longer than the 2500.0 predicted: compute 3000.0 instead of 2500.0" in as_line(found)


def test_without_spans_the_step_alone_is_compared() -> None:
    found = beside(predicted(compute=1.0), [MeasuredStep(2.0, {})], None, "cpu")
    assert found["step_seconds"]["measured"] == 2.0
    assert found["parts"]["compute"]["measured"] is None
    assert as_line(found).endswith("2 times as long as the 1000.0 predicted")


def test_a_run_elsewhere_says_so() -> None:
    steps = [step(forward=1.0)]
    planned = {**predicted(compute=1.0), "cluster": "8xH100", "device_kind": "gpu"}
    assert "8xH100, which is not what it ran on" in as_line(beside(planned, steps, None, "cpu"))
    assert "not what" not in as_line(beside(planned, steps, None, "gpu"))


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (1.04, "4% longer than the 1000.0 predicted"),
        (0.8, "20% shorter than the 1000.0 predicted"),
        (21.0, "21 times as long as the 1000.0 predicted"),
        (0.05, "5.0% of the 1000.0 predicted"),
    ],
)
def test_errors_in_words(measured: float, words: str) -> None:
    assert against(measured, 1.0) == words
