"""A plan file for another machine is refused on a machine without GPU, unless the user names the number."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.options import RunOptions, VerifyOptions
from shoal.cli.run import start
from shoal.errors import PlanError
from shoal.plans import Plan

FOR_GPUS = {"prediction": {"device_kind": "gpu", "cluster": "4x8xH100"}}


def plan(data: int, **sections: dict[str, object]) -> Plan:
    return Plan.from_mapping({"schema": 1, "layout": {"data": data}, **sections}, source="plan.toml")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (plan(32, **FOR_GPUS), "32 processes, made for 4x8xH100"),
        (plan(2, **FOR_GPUS), "2 processes, made for 4x8xH100"),
        (plan(9), "9 processes"),
    ],
)
def test_another_machines_plan(given: Plan, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "cores", lambda: 2)
    monkeypatch.setattr(start, "visible_gpus", lambda: 0)
    with pytest.raises(PlanError) as refused:
        start.refuse_other_machine(given, "plan.toml")
    assert refused.value.given == f"--plan plan.toml: {words}"
    assert refused.value.conflict == "this machine has 2 cores and no GPU"
    assert "--layout data=2" in refused.value.remedy
    monkeypatch.setattr(start, "visible_gpus", lambda: 1)
    start.refuse_other_machine(given, "plan.toml")


def test_this_machines_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "cores", lambda: 2)
    monkeypatch.setattr(start, "visible_gpus", lambda: 0)
    start.refuse_other_machine(plan(8), "plan.toml")


def test_before_a_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "cores", lambda: 2)
    monkeypatch.setattr(start, "visible_gpus", lambda: 0)
    (tmp_path / "job.py").write_text("def job():\n    raise NotImplementedError\n", encoding="utf-8")
    (tmp_path / "plan.toml").write_text("schema = 1\n[layout]\ndata = 32\n", encoding="utf-8")
    options = RunOptions(job=str(tmp_path / "job.py"), plan=str(tmp_path / "plan.toml"), verify=True)
    with pytest.raises(PlanError, match="32 processes"):
        start.run(options)
    with pytest.raises(PlanError, match="32 processes"):
        start.verify(VerifyOptions(job=options.job, plan=options.plan, out=str(tmp_path / "verify")))


@pytest.mark.parametrize(("devices", "is_asked"), [(None, True), (32, False)])
def test_a_number_in_words_stays_allowed(
    devices: int | None, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def run_here(_: object, unnumbered: object, **__: object) -> int:
        asked.append(unnumbered)
        return 0

    monkeypatch.setattr(start, "_run_here", run_here)
    monkeypatch.setattr(start, "detected", lambda _: None)
    (tmp_path / "job.py").write_text("def job():\n    raise NotImplementedError\n", encoding="utf-8")
    (tmp_path / "plan.toml").write_text("schema = 1\n[layout]\ndata = 32\n", encoding="utf-8")
    file = str(tmp_path / "plan.toml")
    start.run(RunOptions(job=str(tmp_path / "job.py"), out=str(tmp_path / "run"), plan=file, devices=devices))
    assert asked == [file if is_asked else None]
