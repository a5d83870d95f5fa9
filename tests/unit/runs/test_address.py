"""A run directory at an address: its own files come here, and what is changed here goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import CommandError, RunDirectoryError, StorageError
from shoal.runs.address import RunAddress, copy_to_read, fetch_to_read, is_address, working_copy


def test_a_path_is_no_address() -> None:
    assert [is_address(text) for text in ("runs/a", "C:/a", None, "s3://bucket/run")] == [False, False, False, True]


def test_what_is_changed_is_written_back(tmp_path: Path) -> None:
    text, there = f"file://{tmp_path}/run", tmp_path / "run"
    with working_copy(text) as folder:
        (folder / "job.json").write_text("1")
        (folder / "logs").mkdir()
        (folder / "logs" / "rank-1.txt").write_text("said")
        for name in ("lock.json", ".hidden"):
            (folder / name).write_text("")
    assert not folder.exists()
    assert sorted(p.relative_to(there).as_posix() for p in there.rglob("*.*")) == ["job.json", "logs/rank-1.txt"]
    with working_copy(text) as folder:
        assert [path.name for path in folder.iterdir()] == ["job.json"]
        (there / "job.json").write_text("2")  # by another process, and this one has not touched it
        (folder / "events.jsonl").write_text("lost\n")
    assert (there / "job.json").read_text() == "2"
    assert (there / "events.jsonl").read_text() == "lost\n"


def test_an_address_that_nothing_reaches(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nothing here reaches that address"):
        RunAddress("nowhere://bucket/run").fetch(tmp_path)


def test_an_address_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"it cannot be read: .*refused"):
        RunAddress("ftp://127.0.0.1:9/run").fetch(tmp_path)


def test_what_one_has_fetched_another_does_not_send_back(tmp_path: Path) -> None:
    """As a launcher beside the working copy that it was given."""
    text, there = f"file://{tmp_path}/run", tmp_path / "run"
    there.mkdir()
    (there / "result.json").write_text("old")
    with working_copy(text) as folder:
        (there / "result.json").write_text("newer")
        (folder / "events.jsonl").write_text("lost\n")
        RunAddress(text).send(folder)
        assert (there / "result.json").read_text() == "newer"
        assert (there / "events.jsonl").read_text() == "lost\n"
        RunAddress(text).fetch(folder)
        (there / "result.json").write_text("newest")
    assert (there / "result.json").read_text() == "newest"


def test_an_address_that_refuses_does_not_hide_what_was_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no way there")

    monkeypatch.setattr(RunAddress, "send", refuse)
    with pytest.raises(KeyError, match="the run's own"), working_copy(f"file://{tmp_path}/run"):
        raise KeyError("the run's own")
    assert "the run's own files could not be written there: no way there" in capsys.readouterr().err
    with pytest.raises(StorageError, match="no way there"), working_copy(f"file://{tmp_path}/run"):
        pass


def test_a_key_that_leads_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunAddress, "paths", lambda *_: ["../outside"])
    with pytest.raises(RunDirectoryError, match="leads out of the folder"):
        RunAddress("memory://keys/run").fetch_folder("model", tmp_path / "model")


def test_a_copy_to_read_is_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    with copy_to_read(f"file://{tmp_path}"):
        assert f"file://{tmp_path}" not in {text for text, _ in RunAddress._known}


def test_a_copy_is_made_again_only_while_the_run_is_there(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    for folder in (run, copy):
        folder.mkdir()
    (run / "job.json").write_text("{}")
    fetch_to_read(f"file://{run}", copy)
    (run / "job.json").unlink()
    with pytest.raises(RunDirectoryError) as caught:
        fetch_to_read(f"file://{run}", copy)
    assert caught.value.__cause__ is None, "the way there is no cause"
