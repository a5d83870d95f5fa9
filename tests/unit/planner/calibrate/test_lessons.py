"""What runs teach about predictions."""

from __future__ import annotations

import pytest
from tests.unit.planner.calibrate.test_comparison import predicted, step

from shoal.planner.calibrate.comparison import PARTS, beside
from shoal.planner.calibrate.lessons import (
    CORRECTED,
    Correction,
    Observation,
    calibration_file,
    error,
    learn,
    observation,
)
from shoal.planner.predict.workload import TERMS


def seen(told: dict, *, factors: dict | None = None, host: float = 0.0, **spans: float) -> Observation:
    return observation(beside({**told, "factors": factors or {}, "host_seconds": host}, [step(**spans)], None, "cpu"))


def test_every_term_is_corrected_by_one_name() -> None:
    assert sorted(term for terms, _ in CORRECTED.values() for term in terms) == sorted(TERMS)
    assert {part for _, part in CORRECTED.values()} == set(PARTS)


def test_the_median_ratio_is_learned() -> None:
    runs = [seen(predicted(compute=1.0, optimizer=0.2), forward=r, optimizer=0.1, other=0.2) for r in (1.9, 2.0, 4.0)]
    lesson = learn(runs)
    assert lesson.correction.factors == pytest.approx({"compute": 2.0, "optimizer": 0.5})
    assert lesson.num_runs == {"compute": 3, "optimizer": 3}
    assert lesson.correction.of_terms["bubble"] == pytest.approx(2.0)
    assert "tensor" not in lesson.correction.of_terms


def test_what_the_host_takes_is_added() -> None:
    lesson = learn([seen(predicted(compute=1.0), forward=1.0, other=0.2)])
    assert lesson.correction.host_seconds == pytest.approx(0.2)
    again = seen(predicted(compute=1.0, host=0.2), host=0.2, forward=1.0, other=0.3)
    assert learn([again]).correction.host_seconds == pytest.approx(0.3)


def test_a_host_that_is_predicted_of_some_runs_is_not_added_as_well() -> None:
    """As of small models on a GPU, beside large ones whose device hides it."""
    small = seen(predicted(compute=1.0, host=0.2), forward=1.0, other=0.2)
    large = seen(predicted(compute=9.0), forward=9.0, other=0.1)
    correction = learn([small, large]).correction
    assert correction.host_seconds == 0.0
    assert correction.factors["host"] == pytest.approx(1.0)


def test_a_small_part_is_corrected_too() -> None:
    lesson = learn([seen(predicted(compute=1.0, gradients=0.005), forward=1.0, exposed_communication=0.05)])
    assert lesson.correction.factors["communication"] == pytest.approx(10.0)


def test_a_part_that_did_not_show_is_not_forgotten() -> None:
    factor = learn([seen(predicted(compute=1.0, gradients=0.5), forward=1.0)]).correction.factors["communication"]
    assert 0.0 < factor < 0.01


def test_exchanges_are_told_from_computing_by_runs_without_them() -> None:
    alone = seen(predicted(compute=1.0), forward=1.5)
    divided = seen(predicted(compute=0.5, tensor=0.2), forward=0.75, backward=0.6)
    factors = learn([alone, divided]).correction.factors
    assert factors == pytest.approx({"compute": 1.5, "exchanges": 3.0})
    lesson = learn([divided])
    assert lesson.together
    assert lesson.correction.factors == pytest.approx(dict.fromkeys(("compute", "exchanges"), 1.35 / 0.7))


def test_what_was_corrected_already_is_not_corrected_twice() -> None:
    run = seen(predicted(compute=2.0), factors={"compute": 2.0}, forward=3.0)
    lesson = learn([run])
    assert lesson.correction.factors == pytest.approx({"compute": 3.0})
    assert error(run, None) == pytest.approx(1 / 3)
    assert error(run, lesson.correction) == pytest.approx(0.0)


def test_a_correction_that_says_nothing_is_false() -> None:
    assert not Correction()
    assert Correction({"compute": 2.0})
    assert Correction(host_seconds=1.0)


def test_file_names() -> None:
    by_name, by_file = calibration_file("4x8xA100@200Gb"), calibration_file("../my cluster.toml")
    assert by_name.name == "4x8xA100@200Gb.calibration.toml"
    assert by_file == by_name.with_name("my-cluster.toml.calibration.toml")
