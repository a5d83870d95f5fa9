"""The doctor's words: of a machine, of a run that lost time, and of a healthy one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.launching import JOBS
from tests.run_folders import RunFolder

from shoal.cli import doctor as command
from shoal.cli.doctor import doctor
from shoal.cli.options import DoctorOptions
from shoal.doctor.health import HealthCheck, Severity
from shoal.doctor.run_diagnosis import diagnosis, trial_job
from shoal.errors import CommandError, ExitCode, SettingError
from shoal.jobs.job_file import parse_target, with_settings_of
from shoal.jobs.secret_settings import without_secrets
from shoal.plans.plan import read_plan
from shoal.runs.run_files import RunReader

pytestmark = pytest.mark.usefixtures("no_other_test")


def waiting(path: Path) -> Path:
    """A run whose every tenth step is evaluated for as long as six steps take, beside a checkpoint each step."""
    run = RunFolder(path, prediction=False, ranks=2)
    run.begins()
    for _ in range(10):
        for _ in range(10):
            run.one_step(0.1, checkpoint=0.02)
        run.evaluates(0.6)
    run.ends()
    return run.written()


def test_a_run_that_lost_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = waiting(tmp_path / "run")
    assert doctor(DoctorOptions(run=str(path))) is ExitCode.DONE
    said = capsys.readouterr().out
    first, second = said.index("1. evaluation"), said.index("2. checkpoints")
    assert first < second
    assert "an evaluation of 600 ms after every 10 steps" in said
    assert "evaluation every 100 steps instead of 10" in said
    assert "shoal run JOBFILE --checkpoint-every" in said
    assert "once a call: 3.0 s" in said


def test_as_json_with_plans_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.run_folders._SHARES", (0.5, 0.0, 0.2, 0.2, 0.04, 0.03, 0.0, 0.03))
    path = waiting(tmp_path / "run")
    doctor(DoctorOptions(run=str(path), json=True))
    found = json.loads(capsys.readouterr().out)
    assert {"data", "evaluation", "checkpoints"} <= {loss["cause"] for loss in found["causes"]}
    plans = [remedy["plan"] for loss in found["causes"] for remedy in loss["remedies"] if remedy["plan"]]
    assert plans
    for plan in plans:
        assert Path(plan).is_relative_to(path / "doctor")
    assert any(read_plan(Path(plan)).data.workers > 0 for plan in plans)


def test_a_healthy_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.run_folders._SHARES", (0.0, 0.0, 0.4, 0.55, 0.01, 0.03, 0.0, 0.01))
    run = RunFolder(tmp_path / "run", prediction=False)
    run.begins()
    run.steps(50)
    run.ends()
    doctor(DoctorOptions(run=str(run.written())))
    said = capsys.readouterr().out
    assert "healthy: nothing that could be had back" in said
    assert "1. " not in said


def test_a_trial_needs_the_job(tmp_path: Path) -> None:
    path = waiting(tmp_path / "run")
    with pytest.raises(CommandError, match=r"its job.json says job.py:job"):
        doctor(DoctorOptions(run=str(path), try_out=True))


@pytest.mark.parametrize(
    ("severity", "code"),
    [(Severity.OK, ExitCode.DONE), (Severity.WARNING, ExitCode.DONE), (Severity.ERROR, ExitCode.FAILED)],
)
def test_the_exit_code_tells_whether_training_can_work(
    severity: Severity,
    code: ExitCode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    checks = (HealthCheck("loopback", severity, "refused", "allow it"),)
    monkeypatch.setattr(command, "judged", lambda facts: checks)
    assert doctor(DoctorOptions(folder=str(tmp_path))) is code
    assert "-> allow it" in capsys.readouterr().out
    assert doctor(DoctorOptions(folder=str(tmp_path), json=True)) is code
    assert json.loads(capsys.readouterr().out)["checks"][0]["severity"] == severity.value


def test_options_of_a_run_without_one() -> None:
    with pytest.raises(CommandError, match="--try is about a run"):
        doctor(DoctorOptions(try_out=True))


def test_with_the_job_the_planner_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.run_folders._SHARES", (0.0, 0.0, 0.1, 0.1, 0.75, 0.03, 0.0, 0.02))
    run = RunFolder(tmp_path / "run", prediction=False, ranks=2, device="cpu", compute="float32")
    run.begins()
    run.steps(30)
    run.ends()
    path = run.written()
    doctor(DoctorOptions(run=str(path), job=str(JOBS / "slowed.py")))
    said = capsys.readouterr().out
    assert "of the time at" in said
    assert "of the device time: 1 device instead of 2" in said
    assert "by the planner's predictions of both plans" in said
    doctor(DoctorOptions(run=str(path), job=str(JOBS / "slowed.py"), json=True))
    found = json.loads(capsys.readouterr().out)
    remedies = {remedy["name"]: remedy for loss in found["causes"] for remedy in loss["remedies"]}
    assert remedies["fewer-devices"]["planned"] > 0.03
    assert remedies["fewer-devices"]["device_time"] < 0.5


def test_a_secret_of_the_run_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, job = waiting(tmp_path / "run"), tmp_path / "job.py"
    job.write_text("import shoal\ndef job(api_token: str = 'none'):\n    raise AssertionError(api_token)\n")
    about = json.loads((path / "job.json").read_text())
    given = without_secrets({"api_token": "abc"})
    (path / "job.json").write_text(json.dumps({**about, "given": given, "settings": given}))
    with pytest.raises(SettingError, match=r"give it again: --set api_token=\.\.\."):
        doctor(DoctorOptions(run=str(path), job=str(job)))
    slowed = f"import sys\nsys.path.insert(0, {str(JOBS)!r})\nimport slowed\n\n"
    job.write_text(f"{slowed}def job(api_token: str = 'none'):\n    return slowed.job()\n")
    doctor(DoctorOptions(run=str(path), job=str(job), set=("api_token=abd",)))
    assert "another value of api_token than the run had" in capsys.readouterr().err
    files = RunReader(path).read()
    request = with_settings_of(parse_target(str(job), ["api_token=abc"]), files.job, all_known=True)
    assert trial_job(request, files, diagnosis(files)[0], 10).arguments[:2] == ("--set", "api_token=abc")


def test_a_setting_needs_the_job(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no job is given"):
        doctor(DoctorOptions(run=str(tmp_path), set=("lr=1",)))
