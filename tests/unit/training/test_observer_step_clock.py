"""Spans sum to the step."""

import itertools

import pytest
import torch

import shoal.training.observe.step_records
import shoal.training.observer
from shoal.runs.records import SPANS
from shoal.training.observer import StepClock, peak_memory_bytes

CPU = torch.device("cpu")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which reading the time takes as long as everything else together: 1, 2, 4, 8 ... seconds."""
    times = itertools.accumulate(2**n for n in itertools.count())
    monkeypatch.setattr(shoal.training.observer.time, "perf_counter", lambda: float(next(times)))


@pytest.mark.usefixtures("ticking")
def test_each_span_has_its_own_time_and_all_sum_to_the_step() -> None:
    clock = StepClock(CPU)
    clock.begin()  # at 1
    clock.mark("data_wait")  # at 3
    clock.mark("forward")  # at 7
    clock.mark("backward")  # at 15
    clock.mark("forward")  # at 31
    total, spans = clock.end()  # at 63, which ends the step too
    wanted = {"other": 2.0, "data_wait": 4.0, "forward": 8.0 + 32.0, "backward": 16.0}
    assert {name: s for name, s in spans.items() if s} == wanted
    assert set(spans) == set(SPANS)
    assert sum(spans.values()) == 63.0 - 1.0
    assert total == 63.0 - 1.0


@pytest.mark.usefixtures("ticking")
def test_a_step_begins_anew() -> None:
    clock = StepClock(CPU)
    clock.begin()
    clock.mark("forward")
    _, first = clock.end()
    clock.begin()
    _, second = clock.end()
    assert first["forward"] > 0
    assert second["forward"] == 0.0


def test_a_clock_that_is_off_measures_the_step_alone() -> None:
    clock = StepClock(CPU, enabled=False)
    clock.begin()
    clock.mark("forward")
    total, spans = clock.end()
    assert total > 0
    assert spans == dict.fromkeys(SPANS, 0.0)


def test_memory_of_the_host_is_in_bytes() -> None:
    assert 2**24 < peak_memory_bytes(CPU) < 2**44


def test_short_steps_share_a_reading_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1 << 20, 2 << 20])
    monkeypatch.setattr(shoal.training.observer, "peak_memory_bytes", lambda device: next(readings))
    clock = StepClock(CPU)
    assert [clock.peak_memory_bytes(), clock.peak_memory_bytes()] == [1 << 20, 1 << 20]
    clock._memory_until = 0.0
    assert clock.peak_memory_bytes() == 2 << 20
