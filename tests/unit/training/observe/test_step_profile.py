"""A profile has the steps that were asked for, on the clock of their records, and costs the others nothing."""

import time
from pathlib import Path

import pytest
import torch

from shoal.distributed.mesh import alone
from shoal.runs.chrome_trace import read
from shoal.runs.options import TraceSteps
from shoal.training.observe.step_profile import StepProfile
from shoal.training.observer import StepClock

CPU = torch.device("cpu")
# Rounding of a trace is to nanoseconds, and of a record to float32.
ROUNDING = 1e-5


def steps(profile: StepProfile, count: int) -> list[dict[str, float]]:
    """Spans of so many steps of one product each."""
    clock, found = StepClock(CPU, listener=profile), []
    for step in range(1, count + 1):
        clock.begin(step)
        clock.mark("forward")
        with clock.labelled("grain 0", samples=4):
            torch.ones(8, 8) @ torch.ones(8, 8)
        clock.mark("optimizer")
        found.append(clock.end()[1])
    return found


def test_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    said: list[str] = []
    profile = StepProfile(TraceSteps(2, 3), alone(CPU), tmp_path / "trace.json.gz")
    profile.attach(said.append)
    spans = steps(profile, 4)
    events = read(tmp_path / "trace.json.gz")["traceEvents"]
    assert [event["name"] for event in events if event["name"].startswith("step ")] == ["step 2", "step 3"]
    for step in (2, 3):
        for span in ("forward", "optimizer"):
            own = [e for e in events if e["name"] == span and e.get("args", {}).get("step") == step]
            assert sum(e["dur"] for e in own) / 1e6 == pytest.approx(spans[step - 1][span], rel=ROUNDING, abs=ROUNDING)
    forwards = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "forward"]
    products = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "aten::mm"]
    assert len(products) == 2
    for (began, ended), (first, last) in zip(products, forwards, strict=True):
        assert first <= began
        assert ended <= last
    assert len([e for e in events if e["name"] == "grain 0"]) == 2
    assert len(said) == 1
    assert "trace.json.gz" in said[0]
    profile.conclude()
    assert len(said) == 1


def test_a_run_that_ends_before_the_last_of_them(tmp_path: Path) -> None:
    profile = StepProfile(TraceSteps(2, 30), alone(CPU), tmp_path / "trace.json.gz")
    steps(profile, 2)
    assert not (tmp_path / "trace.json.gz").exists()
    profile.conclude()
    assert any(event["name"] == "step 2" for event in read(tmp_path / "trace.json.gz")["traceEvents"])


def test_steps_that_were_never_trained_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    profile = StepProfile(TraceSteps(20, 30), alone(CPU), tmp_path / "trace.json.gz")
    profile.attach(said.append)
    steps(profile, 2)
    profile.conclude()
    assert said == ["--trace 20-30: no such step was trained; nothing is written"]


def test_a_folder_that_is_gone_ends_no_training(tmp_path: Path) -> None:
    said: list[str] = []
    profile = StepProfile(TraceSteps(1, 1), alone(CPU), tmp_path / "gone" / "trace.json.gz")
    profile.attach(said.append)
    steps(profile, 1)
    assert len(said) == 1
    assert "was not written" in said[0]


def test_hosts_with_other_clocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Hosts:
        """A mesh of two hosts, of which the other, rank 0's, is 3 s behind; seen from rank 1."""

        host, rank = "b", 1

        def gather_json(self, value: object) -> list[object]:
            if isinstance(value, str):
                return ["a", "b"]
            assert isinstance(value, list)
            return [[float(end) - 3.0 for end in value], value]

        def all_gather(self, values: list[float]) -> None:
            time.sleep(0)

    profile = StepProfile(TraceSteps(1, 1), Hosts(), tmp_path / "t")  # type: ignore[arg-type]
    assert profile._behind() == pytest.approx(-3.0)
