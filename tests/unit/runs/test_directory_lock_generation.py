"""Generations: who began last may write, and a process of an earlier one writes nothing, wherever it stood still."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.run_folders import RECORD

from shoal.checkpoint.store import NewestMark, Snapshot, Store
from shoal.errors import FencedError
from shoal.runs.directory import FOLDER, Fence, claim, newest, withdraw
from shoal.runs.records import read_steps
from shoal.training.observe.step_records import RecordWriter

SNAPSHOT = Snapshot(4, {"model": {"w": torch.ones(2)}}, {"tensors": {}})


def test_each_start_is_a_generation_and_fences_the_one_before(tmp_path: Path) -> None:
    first = Fence.next(tmp_path, 2, "begun")
    first.write(tmp_path / "result.json", "1")
    second = Fence.next(tmp_path, 3, "lost ranks", after=first)
    assert (first.generation, second.generation, newest(tmp_path)) == (1, 2, 2)
    with pytest.raises(
        FencedError, match=r"generation 1(.|\n)*generation 2 has begun, by process \d+(.|\n)*lost ranks"
    ):
        first.write(tmp_path / "result.json", "2")
    with pytest.raises(FencedError):
        first.append(tmp_path / "events.jsonl", "{}")
    assert (tmp_path / "result.json").read_text() == "1"
    assert not (tmp_path / "events.jsonl").exists()
    about = json.loads((tmp_path / FOLDER / "000002").read_text())
    assert (about["world_size"], about["reason"]) == (3, "lost ranks")


def test_a_working_copy_of_an_address_goes_on_with_the_numbers_of_earlier_generations(tmp_path: Path) -> None:
    """It has the lines of earlier generations, and not their files. A lower number's records would not count."""
    record = replace(RECORD, step=4)
    (tmp_path / "records.jsonl").write_text(f"{record.to_line(3)}\n")
    lines = [json.dumps({"kind": "began", "generation": number}) for number in (1, 3, 2)]
    (tmp_path / "attempts.jsonl").write_text("\n".join([*lines, "[]", '{"kind": "beg']))
    fence = Fence.next(tmp_path, 2, "resumed")
    assert fence.generation == 4
    with contextlib.closing(RecordWriter(tmp_path / "records.jsonl", fence=fence)) as writer:
        writer.write(replace(record, step=5))
    assert [one.step for one in read_steps(tmp_path / "records.jsonl")] == [4, 5]


def test_a_launcher_that_was_replaced_begins_no_other(tmp_path: Path) -> None:
    first = Fence.next(tmp_path, 2, "begun")
    Fence.next(tmp_path, 2, "resumed")
    with pytest.raises(FencedError):
        Fence.next(tmp_path, 2, "lost ranks", after=first)
    assert newest(tmp_path) == 2


def test_two_that_begin_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked which is the newest, and one of them stood still before it made its file."""
    Fence.next(tmp_path, 1, "begun")
    Fence.next(tmp_path, 1, "resumed")
    for stale in (0, 1):  # the number of one that is there, and of one that is gone already
        monkeypatch.setattr("shoal.runs.directory.newest", _once(stale))
        with pytest.raises(FencedError):
            Fence.next(tmp_path, 1, "resumed")


def _once(stale: int):  # type: ignore[no-untyped-def]
    answers = [stale]
    return lambda folder: answers.pop() if answers else newest(folder)


class _StandsStill(Fence):
    """A process that is stopped after its last look, while the next generation begins and reads the directory."""

    @property
    def is_open(self) -> bool:
        found, folder = super().is_open, self.folder
        assert folder is not None
        if found:
            store = Store(folder / "checkpoints", fence=Fence.next(folder, 1, "resumed"))
            store.clean()
            assert store.newest_good()[0] is None
        return found


def test_stopped_between_the_look_and_the_rename(tmp_path: Path) -> None:
    fence = Fence.next(tmp_path, 1, "begun")
    stopped = _StandsStill(tmp_path, fence.generation)
    with pytest.raises(FencedError):
        Store(tmp_path / "checkpoints", fence=stopped).write(SNAPSHOT)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    stopped = _StandsStill(tmp_path, newest(tmp_path))
    with pytest.raises(FencedError):
        stopped.write(tmp_path / "result.json", "{}")
    assert not (tmp_path / "result.json").exists()


def test_checkpoint_and_mark_of_a_fenced_process(tmp_path: Path) -> None:
    fence = Fence.next(tmp_path, 1, "begun")
    mark = NewestMark(tmp_path / "saved.json", fence)
    store = Store(tmp_path / "checkpoints", mark=mark, fence=fence)
    store.write(SNAPSHOT)
    Fence.next(tmp_path, 1, "resumed")
    with pytest.raises(FencedError):
        store.write(replace(SNAPSHOT, step=8))
    with pytest.raises(FencedError):
        store.keep_best(4)
    with pytest.raises(FencedError):
        mark.note(8)
    assert store.steps() == [4]
    assert mark.step == 4
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_directory_in_which_nothing_began_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claim(folder, print):
        Fence.next(folder, 1, "begun")
        withdraw(folder)
    assert not folder.exists()
    with claim(folder, print):
        Fence.next(folder, 1, "begun")
        (folder / "job.json").touch()
        withdraw(folder)
    assert newest(folder) == 1


def test_a_vanished_directory_fences_nobody(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    fence = Fence.next(tmp_path / "run", 1, "begun")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert fence.is_open
    with pytest.raises(FileNotFoundError):
        fence.write(tmp_path / "run" / "result.json", "{}")
