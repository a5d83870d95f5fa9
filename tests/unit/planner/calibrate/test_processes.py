"""What a run on one process is told of several, from predictions that this machine's planner kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.run import start
from shoal.hardware.detect import measured_file
from shoal.jobs.job_file import JobRequest
from shoal.planner.calibrate.processes import faster, processes_file, record

MACHINE = Path(__file__).parents[3] / "fixtures" / "formats" / "machine.toml"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobRequest:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.py").write_text("")
    return JobRequest(tmp_path / "job.py")


def measured() -> None:
    measured_file().parent.mkdir(parents=True)
    shutil.copy(MACHINE, measured_file())


def test_more_processes_are_named_where_they_are_predicted_to_pay(
    job: JobRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured()
    assert faster(job, None) is None
    record(job, None, {1: 1.0, 2: 0.8, 4: 0.9})
    assert faster(job, None) == (2, pytest.approx(1.25))
    assert faster(job, "bf16") is None, "another precision"
    request: Any = SimpleNamespace(what=SimpleNamespace(job=job))
    monkeypatch.setattr(start, "cores", lambda: 4)
    start.note_processes(request, None)
    assert "2 processes of 2 threads are predicted to be 25% faster" in (said := capsys.readouterr().err)
    assert "write --devices 2" in said.replace("\n", " ")
    monkeypatch.setattr(start, "cores", lambda: 1)
    start.note_processes(request, None)
    assert not capsys.readouterr().err
    record(job, None, {1: 1.0, 2: 0.95})
    assert faster(job, None) is None
    job.path.write_text("other")
    record(job, None, {1: 1.0})
    assert faster(job, None) is None


def test_nothing_is_kept_or_read_where_the_machine_was_not_measured(job: JobRequest) -> None:
    record(job, None, {1: 1.0, 2: 0.5})
    assert not processes_file().exists()
    measured()
    record(job, None, {1: 1.0, 2: 0.5})
    assert faster(job, None) == (2, 2.0)
    processes_file().write_text("[]")
    assert faster(job, None) is None
    measured_file().unlink()
    assert faster(job, None) is None
