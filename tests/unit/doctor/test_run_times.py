"""Times of a run are read from its directory, with what comes now and then apart from the steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.run_folders import RunFolder

from shoal.doctor.causes import causes
from shoal.doctor.run_times import RunTimes, run_times, seconds_per_step
from shoal.report.account import account
from shoal.runs.run_files import read_run


def read(run: RunFolder) -> RunTimes | None:
    files = read_run(run.written(), lambda: run.now)
    return run_times(files, account(files))


def test_evaluations_and_checkpoints_are_apart_from_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", prediction=False)
    run.begins()
    for _ in range(10):
        run.steps(9)
        run.one_step(0.1, checkpoint=0.4)
        run.evaluates(0.5)
    run.ends()
    times = read(run)
    assert times is not None
    assert (times.evaluation.every, times.checkpoint.every) == (10.0, 10.0)
    assert times.evaluation.each == pytest.approx(0.5)
    assert times.checkpoint.each == pytest.approx(0.4)
    assert times.step == pytest.approx(0.11, rel=0.05)
    assert sum(times.spans.values()) == pytest.approx(times.step, rel=0.05)
    assert times.asks_evaluations  # in the midst of an epoch of a hundred steps
    assert times.total == pytest.approx(times.step + 0.1 * 0.9, rel=0.1)
    first, second = causes(times)[:2]
    assert {first.cause, second.cause} == {"evaluation", "checkpoints"}


def test_the_first_evaluation_is_no_measure_of_the_others(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", prediction=False)
    run.begins()
    for number in range(5):
        run.steps(10)
        run.evaluates(0.5 if number else 3.0)
    run.ends()
    times = read(run)
    assert times is not None
    assert times.evaluation.each == pytest.approx(0.5)


def test_steps_beside_an_event_are_longer_by_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", prediction=False)
    run.begins()
    run.random.random = lambda: 0.0  # type: ignore[method-assign]
    for _ in range(10):
        run.one_step(0.13)
        run.steps(8)
        run.one_step(0.12)
        run.evaluates(0.5)
    run.ends()
    times = read(run)
    assert times is not None
    assert times.step == pytest.approx(0.1)
    assert times.evaluation.each == pytest.approx(0.5)
    assert times.evaluation.per_step == pytest.approx(0.9 * (0.05 + 0.002 + 0.003), rel=0.05)
    assert seconds_per_step(read_run(run.path).records) == times.total


def test_checkpoints_have_three_causes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", prediction=False)
    run.begins()
    for _ in range(10):
        run.steps(4)
        run.records[-1] = run.records[-1].followed_by("checkpoint", 0.2)  # which a callback asked for
        run.one_step(0.1, checkpoint=0.4)
        run.steps(5)
        run.evaluates(0.5)
        run.records[-1] = run.records[-1].followed_by("checkpoint", 0.3)  # of the best state
    run.log.ended("completed", run.step, run.now, {}, checkpoint_cpu=0.05)
    times = read(run)
    assert times is not None
    events = (times.checkpoint, times.requested, times.best)
    assert [round(event.each, 3) for event in events] == [0.4, 0.2, 0.3]
    assert times.writing == 0.05


def test_a_step_that_something_held_up_changes_little(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", prediction=False)
    run.begins()
    run.steps(50)
    run.one_step(30.0)
    run.steps(50)
    run.ends()
    times = read(run)
    assert times is not None
    assert times.step == pytest.approx(0.11, rel=0.05)
    assert times.spans["forward"] == pytest.approx(0.3 * times.step, rel=0.05)


def test_few_records_say_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(3)
    run.ends()
    assert read(run) is None
