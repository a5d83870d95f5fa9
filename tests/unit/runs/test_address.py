"""A run directory at an address: its own files come here, and what is changed here goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import CommandError, RunDirectoryError
from shoal.runs.address import RunAddress, is_address, working_copy


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
