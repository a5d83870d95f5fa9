"""What older versions left on disk: runs, a Session's folder, a plan, a certificate, a machine file, a job file."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.launching import start_command
from tests.usual import needs_zero23

from shoal.checkpoint.manifest import seal
from shoal.runs.records import read_steps

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
    metrics = list(read_steps(run / "records.jsonl"))[-1].metrics
    assert metrics is not None
    return metrics


def losses(run: Path) -> dict[int, float | None]:
    """The loss of each step."""
    return {record.step: record.loss for record in read_steps(run / "records.jsonl")}


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run_goes_on_as_the_finished_one(formats: Path, name: str) -> None:
    """The gradient of the bias before the batch norm is rounding alone, which Adam makes steps of: they cancel in a
    step of the training, but not in the evaluation's loss, whose running mean lags. It depends on the processor."""
    called(formats, "-m", "shoal", "run", "job.py", "--resume", "--out", name)
    assert losses(formats / name) == pytest.approx(losses(FORMATS / "finished"), rel=1e-6)
    assert metrics(formats / name)["accuracy"] == metrics(FORMATS / "finished")["accuracy"]


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


def test_files_of_a_later_format_are_refused_with_what_to_do(formats: Path) -> None:
    """And a checkpoint of another format is not taken for a damaged one, which a resume would rename."""
    for manifest in (formats / "stopped-data").rglob("manifest.json"):
        manifest.write_bytes(seal(json.loads(manifest.read_text())["body"] | {"format": 99}))
    for file in ("plan.toml", "machine.toml"):
        (formats / file).write_text((formats / file).read_text().replace("schema = 1", "schema = 99", 1))
    commands = {
        ("run", "job.py", "--resume", "--out", "stopped-data"): 74,
        ("export", "stopped-data", "-o", "weights"): 74,
        ("run", "job.py", "--plan", "plan.toml", "--out", "planned"): 2,
        ("plan", "job.py", "--cluster", "machine.toml"): 2,
    }
    for words, code in commands.items():
        said = " ".join(called(formats, "-m", "shoal", *words, code=code).split())
        assert "99" in said
        assert re.search("with the version (of shoal )?that wrote it", said), said
    assert not list((formats / "stopped-data").rglob("*.bad"))
