"""Commands that read a run whose directory is an address: as of one on disk, and nothing is written there."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Run, run, start_command
from tests.sharing import Shared

import shoal
from shoal.cli.main import main
from shoal.errors import RunDirectoryError

pytestmark = pytest.mark.ranks

JOB = str(JOBS / "tiny.py")


@pytest.fixture
def ended(shared: Shared) -> Ended:
    return shared.run(Run(JOBS / "tiny.py", Path(), 1, exact=True))


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_pages_weights_and_python(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at, before = f"file://{ended.out}", files_of(ended.out)
    monkeypatch.chdir(tmp_path)
    assert main(["report", at]) == 0
    assert main(["watch", at]) == 0
    said = capsys.readouterr().out
    assert f"{at}: completed after step 16" in said
    assert (tmp_path / "report.html").exists()
    assert main(["report", "--json", at]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["name"], told["status"]) == (at, ended.out.name, "completed")
    assert main(["doctor", "--json", at]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == at
    assert main(["export", at]) == 0
    assert shoal.weights_sha256(shoal.load(tmp_path / "export")) == ended.result["weights_sha256"]
    assert shoal.weights_sha256(shoal.load(at)) == ended.result["weights_sha256"]
    found = shoal.Run(at)
    assert (found.out, found.result, len(found.records)) == (at, ended.result, 16)
    assert main(["resize", at, "2"]) == 2
    assert f"--resume --out {at} --devices 2" in capsys.readouterr().err
    assert files_of(ended.out) == before


def test_what_is_no_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: Ended) -> None:
    for command in ("report", "watch", "doctor", "export"):
        assert main([command, f"file://{tmp_path}/none"]) == 2
        assert "no run began there" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError, match="there are checkpoints of the steps"):
        shoal.load(f"file://{ended.out}", step=999)


def test_a_run_that_has_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At an address nobody holds a lock, so that what is there does not tell a killed run from one that trains."""
    at = f"file://{tmp_path}/run"
    run(Run(JOB, tmp_path, 1, True, ("--out", at, "--steps", "4"))).expect(0)
    kept = tmp_path / "run" / "attempts.jsonl"
    lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if "ended" not in line), encoding="utf-8")
    assert main(["report", "--json", at]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["ending"][:37]) == ("running", "no end of it is at the address: it tr")


def test_evaluated_predicted_and_trained_from_python(ended: Ended, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(ended.out, here)
    at, new, before, program = f"file://{here}", f"file://{tmp_path}/new", files_of(here), tmp_path / "program.py"
    program.write_text(
        "import shoal\n"
        f"job, at, new, there = {JOB!r}, {at!r}, {new!r}, {str(ended.out)!r}\n"
        "run = shoal.run(job, exact=True, devices=2, out=new, steps=16)\n"
        f"assert run.out == new and run.result['weights_sha256'] == {ended.result['weights_sha256']!r}, run\n"
        "both = [shoal.evaluate(job, one) for one in (at, run)]\n"
        "assert [one.pop('run') for one in both] == [at, new] and both[0] == both[1], both\n"
        "found, wanted = (shoal.predict(job, one, devices=2) for one in (at, run))\n"
        "assert found.keys() == wanted.keys() and all((found[n] == wanted[n]).all() for n in found)\n"
    )
    with start_command([sys.executable, str(program)], tmp_path, {"PYTHONPATH": str(JOBS)}, cwd=tmp_path) as started:
        started.wait().expect(0)
    assert files_of(here) == before


def test_verified(tmp_path: Path) -> None:
    at = f"file://{tmp_path}/run"
    command = [sys.executable, "-m", "shoal", "verify", JOB, "--devices", "2", "--steps", "1", "--out", at]
    with start_command(command, tmp_path, cwd=tmp_path) as started:
        said = started.wait().expect(0).stdout
    assert f"written            {at}/certificate.json" in said
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["certificate.json", "source"]


def test_a_watch_that_is_asked_to_end_leaves_no_copy(ended: Ended, tmp_path: Path) -> None:
    going, temporary = tmp_path / "run", tmp_path / "tmp"
    shutil.copytree(ended.out, going)
    (going / "result.json").unlink()
    kept = going / "attempts.jsonl"
    kept.write_text(kept.read_text(encoding="utf-8").splitlines(keepends=True)[0], encoding="utf-8")
    temporary.mkdir()
    command = [sys.executable, "-m", "shoal", "watch", f"file://{going}"]
    with start_command(command, going, {"TMPDIR": str(temporary)}, fresh=True) as started:
        started.until(lambda: any(temporary.rglob("job.json")), "a copy")
        started.send(signal.SIGTERM)
        started.wait().expect(128 + signal.SIGTERM)
    assert not list(temporary.iterdir())
