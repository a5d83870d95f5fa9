"""A run directory is never written over, and files in it are whole or not there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import DataError, RunDirectoryError
from shoal.runs.directory import RunDirectory, default_directory, read_json, write_file


def run_in(path: Path, result: dict[str, Any] | None = None) -> RunDirectory:
    path.mkdir(parents=True, exist_ok=True)
    directory = RunDirectory(path)
    write_file(directory.job, "{}")
    if result is not None:
        write_file(directory.result, json.dumps(result))
    return directory


def test_a_new_or_empty_directory_may_be_used(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "a" / "b").check(resume=False)
    RunDirectory(tmp_path).check(resume=False)


@pytest.mark.parametrize(
    ("result", "holds"),
    [
        (None, True),
        ({"status": "completed", "steps": 10}, True),
        ({"status": "failed", "steps": 3}, True),
        ({"status": "failed", "steps": 0}, False),
        ({"status": "completed", "steps": 0}, True),
        ({}, True),
    ],
)
def test_a_run_is_not_written_over(tmp_path: Path, result: dict[str, Any] | None, holds: bool) -> None:
    directory = run_in(tmp_path, result)
    assert directory.holds_run() is holds
    directory.check(resume=True)
    if holds:
        with pytest.raises(RunDirectoryError, match="nothing is overwritten"):
            directory.check(resume=False)
    else:
        directory.check(resume=False)


def test_a_resume_needs_a_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new"):
        with pytest.raises(RunDirectoryError, match=r"it has no job\.json"):
            RunDirectory(path).check(resume=True)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(RunDirectoryError, match="that is a file"):
        RunDirectory(tmp_path / "f").check(resume=False)


def test_nothing_lies_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(RunDirectoryError):
        RunDirectory(tmp_path / "f" / "run").check(resume=False)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(RunDirectoryError, match="is not writable"):
        RunDirectory(tmp_path / "a" / "b").check(resume=False)


def test_the_default_is_the_first_that_holds_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_directory("mnist", resume=False) == default_directory("mnist", resume=True) == Path("runs/mnist")
    run_in(Path("runs/mnist"))
    run_in(Path("runs/mnist-2"))
    assert default_directory("mnist", resume=False) == Path("runs/mnist-3")
    assert default_directory("mnist", resume=True) == Path("runs/mnist-2")


def test_a_file_is_written_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_file(path, "old")
    write_file(path, '{"ä": 1}')
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert read_json(path) == {"ä": 1}


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"3"])
def test_a_damaged_file_reads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert read_json(tmp_path / "a.json") is None
    assert read_json(tmp_path / "nowhere.json") is None


def test_where_a_traceback_is_kept_is_told(tmp_path: Path) -> None:
    error = DataError(given="train_data", conflict="it raised", remedy="mend it")
    RunDirectory(tmp_path / "run").keep_traceback("rank-0", error)
    assert not (tmp_path / "run").exists(), "there is none"
    assert "traceback:" not in error.render()
    error.traceback_text = "Traceback ..."
    RunDirectory(tmp_path / "run").keep_traceback("rank-0", error)
    assert error.render().endswith(f"\n  traceback:      {tmp_path}/run/errors/rank-0.txt")
    assert (tmp_path / "run/errors/rank-0.txt").read_text() == "Traceback ..."


def test_a_file_is_written_through_no_link(tmp_path: Path) -> None:
    other, target = tmp_path / "other", tmp_path / "report.html"
    other.write_text("kept")
    (tmp_path / ".report.html.tmp").symlink_to(other)
    with pytest.raises(OSError, match=r"report\.html\.tmp"):
        write_file(target, "page")
    assert other.read_text() == "kept"


@pytest.mark.parametrize(
    ("files", "stays"),
    [
        ({"job.json": "{}", "result.json": '{"status": "failed", "steps": 0}', "attempts.jsonl": "{}"}, False),
        ({"generations/000001": "", "plan.toml": ""}, False),
        ({"job.json": "{}", "attempts.jsonl": "{}"}, True),  # killed: it may have trained
        ({"job.json": "{}", "result.json": "damaged", "attempts.jsonl": "{}"}, True),
        ({"result.json": '{"status": "failed", "steps": 0}', "errors/rank-0.txt": "why"}, True),
        ({"result.json": '{"status": "failed", "steps": 0}', "logs/rank-1.txt": ""}, True),
        ({"result.json": '{"status": "failed", "steps": 0}', "events.jsonl": "{}"}, True),
        ({"result.json": '{"status": "failed", "steps": 0}', "trace-1-2.json.gz": ""}, True),
        ({"result.json": '{"status": "failed", "steps": 0}', "notes.txt": ""}, True),
        ({"result.json": '{"status": "completed", "steps": 0}'}, True),
        ({"certificate.json": "{}"}, True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_a_failed_start_leaves(tmp_path: Path, files: dict[str, str], stays: bool) -> None:
    for name, text in {**files, "lock.json": "{}"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    RunDirectory(tmp_path).discard_failed_start()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == ({*files, "lock.json"} if stays else {"lock.json"})


def test_settings_of_a_job_are_read_exactly(tmp_path: Path) -> None:
    settings = {"clip": float("-inf"), "separator": "\1", "seed": 1 << 100}
    write_file(tmp_path / "job.json", json.dumps(settings))
    assert read_json(tmp_path / "job.json", exactly=True) == settings
    shown = {"clip": None, "separator": "\N{REPLACEMENT CHARACTER}", "seed": 1 << 100}
    assert read_json(tmp_path / "job.json") == shown
