import json
import os
import shutil
from pathlib import Path

import pytest

from shoal.errors import InUseError, RunDirectoryError
from shoal.runs.collection import check_removable, entry_of, remove, runs_below, size_of
from shoal.runs.directory import claim

FORMATS = Path(__file__).parents[2] / "fixtures" / "formats"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs that an earlier version wrote, one of them a level deeper, and a certificate."""
    shutil.copytree(FORMATS / "finished", tmp_path / "runs" / "finished")
    shutil.copytree(FORMATS / "stopped-data", tmp_path / "runs" / "sweep" / "stopped")
    (tmp_path / "runs" / "checked").mkdir()
    shutil.copy(FORMATS / "certificate.json", tmp_path / "runs" / "checked")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_runs_are_listed_with_their_kind(folder: Path) -> None:
    entries = {one.name: one for one in runs_below(folder)}
    assert list(entries) == ["checked", "finished", "sweep/stopped"]
    assert (entries["checked"].kind, entries["checked"].state) == ("verify", "verified")
    done, stopped = entries["finished"], entries["sweep/stopped"]
    result = json.loads((folder / "finished" / "result.json").read_text())
    assert (done.state, done.steps, done.devices) == ("completed", result["steps"], result["world_size"])
    assert done.loss == pytest.approx(result["train_loss"])
    assert done.job == "job.py"
    assert done.seconds is not None
    assert done.seconds > 0
    assert stopped.state == "preempted"
    assert stopped.steps == 3
    assert done.size == sum(path.stat().st_size for path in (folder / "finished").rglob("*") if path.is_file())
    json.dumps([one.to_json() for one in entries.values()], allow_nan=False)


def test_a_run_without_an_end_was_killed_and_a_held_one_runs(folder: Path) -> None:
    path = folder / "finished"
    attempts = (path / "attempts.jsonl").read_text().splitlines()
    (path / "attempts.jsonl").write_text(attempts[0] + "\n")
    assert entry_of(path, "a").state == "killed"
    lock = claim(path, print)
    try:
        assert entry_of(path, "a").state == "running"
    finally:
        lock.release()


@pytest.mark.parametrize("name", ["job.json", "result.json", "attempts.jsonl", "records.jsonl"])
def test_a_damaged_file_leaves_its_part_empty(folder: Path, name: str) -> None:
    (folder / "finished" / name).write_bytes(b'{"a": [1\xff')
    assert entry_of(folder / "finished", "a").kind == "run"


def test_the_last_complete_record_counts(folder: Path) -> None:
    path = folder / "finished" / "records.jsonl"
    line = json.loads(path.read_text().splitlines()[-1])
    with path.open("w") as file:
        for step in range(1000):
            file.write(json.dumps({**line, "step": step, "loss": 1.0}) + "\n")
        file.write('{"step": 99')
    entry = entry_of(folder / "finished", "a")
    assert entry.steps == 999
    assert entry.loss == 1.0


def test_links_to_one_file_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to("/etc")
    assert size_of(tmp_path) == 1000


def test_a_run_is_removed_and_nothing_else(folder: Path) -> None:
    remove(folder / "finished")
    assert not (folder / "finished").exists()
    assert (folder / "sweep" / "stopped" / "job.json").exists()
    (folder / "checked" / "mine.txt").write_text("")
    for path in (folder / "notes", folder / "checked", folder / "missing"):
        with pytest.raises(RunDirectoryError):
            remove(path)
    (folder / "notes" / "job.json").write_text('{"title": "my own"}')
    with pytest.raises(RunDirectoryError, match=r"no job\.json of shoal"):
        remove(folder / "notes")
    assert (folder / "notes").exists()


def test_nothing_is_removed_through_a_link_or_under_a_running_command(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "finished")
    (folder.parent / "linked").symlink_to(folder)
    for path in (folder / "link", folder.parent / "linked" / "finished"):
        with pytest.raises(RunDirectoryError, match="through a link"):
            remove(path)
    lock = claim(folder / "finished", print)
    try:
        with pytest.raises(InUseError):
            check_removable(folder / "finished")
    finally:
        lock.release()
    assert (folder / "finished" / "result.json").exists()


def test_links_out_of_a_run_are_removed_and_not_what_they_lead_to(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept.txt").write_text("a")
    for name in ("data", "lock.json"):
        (folder / "finished" / name).symlink_to(tmp_path / "data")
    remove(folder / "finished")
    assert not (folder / "finished").exists()
    assert (tmp_path / "data" / "kept.txt").read_text() == "a"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["kept.txt"]


def test_other_runs_checkouts_and_the_current_folder_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "finished", folder / "outer" / "finished")
    shutil.copy(folder / "finished" / "job.json", folder / "outer")
    with pytest.raises(RunDirectoryError, match="other runs are in it"):
        remove(folder / "outer")
    (folder / "finished" / ".git").mkdir()
    with pytest.raises(RunDirectoryError, match="a checkout"):
        remove(folder / "finished")
    monkeypatch.chdir(folder / "sweep" / "stopped")
    for path in (Path(), folder / "sweep" / "stopped"):
        with pytest.raises(RunDirectoryError, match="current folder"):
            remove(path)


@pytest.mark.parametrize("text", ['{"status": 3, "best": [1], "metrics": 7}', "[]", "", '{"best": {"value": "x"}}'])
def test_odd_values_leave_their_part_empty(folder: Path, text: str) -> None:
    (folder / "finished" / "result.json").write_text(text)
    (folder / "finished" / "records.jsonl").write_text('{"step": "seven"}\n')
    assert [one.name for one in runs_below(folder)] == ["checked", "finished", "sweep/stopped"]


def test_a_certificate_alone_and_the_traceback_of_a_failed_start_are_removed(folder: Path) -> None:
    for name in ("generations", "errors"):
        (folder / "broken" / name).mkdir(parents=True)
    (folder / "broken" / "errors" / "rank-0.txt").write_text("RuntimeError")
    assert {one.name: one.state for one in runs_below(folder)}["broken"] == "failed"
    for name in ("broken", "checked"):
        remove(folder / name)
    assert sorted(path.name for path in folder.iterdir()) == ["finished", "notes", "sweep"]
