"""What older versions left on disk: runs, a Session's folder, a plan, a certificate, a machine file, a job file."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from tests.launching import start_command
from tests.usual import needs_zero23

FORMATS = Path(__file__).parents[1] / "fixtures" / "formats"
STOPPED = ["stopped-data", "stopped-one-copy", pytest.param("stopped-zero3", marks=needs_zero23())]
RUNS = ["finished", *STOPPED]


def called(folder: Path, *words: str, code: int = 0) -> str:
    """What a command in a copy of the files says, which has to end with this code."""
    with start_command([sys.executable, *words], folder / "out", cwd=folder) as started:
        ended = started.wait()
    assert ended.code == code, ended.output
    return ended.stdout if code == 0 else ended.stderr


@pytest.fixture
def formats(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FORMATS, tmp_path / "formats"))


def metrics(run: Path) -> dict[str, float]:
    """What the run's last evaluation gave."""
    last: dict[str, dict[str, float]] = json.loads((run / "records.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return last["metrics"]


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run_goes_on_to_the_finished_ones_metrics(formats: Path, name: str) -> None:
    called(formats, "-m", "shoal", "run", "job.py", "--resume", "--out", name)
    assert metrics(formats / name) == pytest.approx(metrics(FORMATS / "finished"), rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_reported_exported_and_evaluated(formats: Path, name: str) -> None:
    called(formats, "-m", "shoal", "report", name, "-o", "page.html")
    assert "<html" in (formats / "page.html").read_text(encoding="utf-8")
    called(formats, "-m", "shoal", "export", name, "-o", "weights")
    assert (formats / "weights" / "model.safetensors").stat().st_size > 0
    evaluated = json.loads(called(formats, "-m", "shoal", "evaluate", "job.py", name, "--json"))
    assert evaluated["metrics"] == pytest.approx(metrics(FORMATS / name), rel=1e-4)


def test_a_session_goes_on(formats: Path) -> None:
    said = called(formats, "loop.py", "session")
    assert [line.split()[0] for line in said.splitlines()] == ["3", "4", "5", "6"]


def test_a_plan_a_machine_and_a_certificate_are_read(formats: Path) -> None:
    called(formats, "-m", "shoal", "plan", "job.py", "--cluster", "machine.toml", "-o", "new.toml")
    called(formats, "-m", "shoal", "run", "job.py", "--plan", "plan.toml", "--steps", "1", "--out", "planned")
    certified = ("-m", "shoal", "run", "job.py", "--devices", "2", "--require-certificate", "certificate.json")
    assert "shoal verify" in called(formats, *certified, code=2)  # of another version: it says how to make another
