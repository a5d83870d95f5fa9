"""A record that cannot be written never stops a training."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.run_folders import RECORD

import shoal.training.observe.step_records
import shoal.training.observer
from shoal.runs.records import last_records, read_steps
from shoal.training.observe.step_records import RecordWriter


def test_records_are_appended_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for steps in ((1, 2), (3,)):
        writer = RecordWriter(path)
        for step in steps:
            writer.write(replace(RECORD, step=step))
        assert read_steps(path)  # the first one's line at once, those of short steps after it together
        writer.flush()
        assert [r.step for r in read_steps(path)] == list(range(1, steps[-1] + 1))  # on the disk before `close`
        writer.close()
    writer.write(RECORD)  # after the end: nothing
    assert len(list(read_steps(path))) == 3


def test_lines_wait_no_longer_than_a_time_or_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "records.jsonl", [100.0]
    monkeypatch.setattr(shoal.training.observe.step_records.time, "monotonic", lambda: now[0])
    writer = RecordWriter(path)

    def after(*seconds: float) -> int:
        for pause in seconds:
            now[0] += pause
            writer.write(RECORD)
        return len(list(read_steps(path)))

    assert after(1.0) == 1  # a step that took long
    assert after(0.01, 0.01) == 1
    assert after(0.04) == 4
    assert after(*[0.0] * 63) == 4
    assert after(0.0) == 68
    writer.close()


def test_steps_that_are_trained_again_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    for step in (1, 2, 3, 4):
        writer.write(replace(RECORD, step=step))
    writer.forget_after(2)
    writer.write(replace(RECORD, step=3, loss=0.25))
    writer.close()
    assert [(r.step, r.loss) for r in read_steps(path)] == [(1, 0.5), (2, 0.5), (3, 0.25)]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_line_cut_short_by_a_kill_is_gone_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(RECORD.to_line() + "\n" + RECORD.to_line()[:30])
    writer = RecordWriter(path)
    writer.forget_after(1)
    writer.write(replace(RECORD, step=2))
    writer.close()
    assert [r.step for r in read_steps(path)] == [1, 2]


class Refusing:
    """A file on a disk that takes so many bytes; of more a part."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken: int = self.file.write(content[: self.room])
        self.room -= taken
        return taken

    def fileno(self) -> int:
        found: int = self.file.fileno()
        return found

    def close(self) -> None:
        self.file.close()


@pytest.mark.parametrize("room", [0, 40], ids=["nothing", "half a line"])
def test_a_full_disk_warns_once_and_gets_the_records_later(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(shoal.training.observe.step_records.time, "monotonic", lambda: now[0])
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    disk = Refusing(writer._file, room)
    monkeypatch.setattr(writer, "_file", disk)

    def write_three() -> None:
        for step in (1, 2, 3):
            now[0] += 2.0
            writer.write(replace(RECORD, step=step))

    with pytest.warns(RuntimeWarning, match="kept until they can be written: .*No space left") as caught:
        write_three()
    assert len(caught) == 1
    assert path.read_bytes() == b""
    disk.room = 1 << 20
    now[0] += 2.0
    writer.write(replace(RECORD, step=4))
    writer.close()
    assert [record.step for record in read_steps(path)] == [1, 2, 3, 4]


def test_late_records_of_steps_that_are_trained_again_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    disk = Refusing(writer._file, 0)
    monkeypatch.setattr(writer, "_file", disk)
    with pytest.warns(RuntimeWarning, match="kept until"):
        writer.write(replace(RECORD, step=1))
    for step in (2, 3):
        writer.write(replace(RECORD, step=step))
    writer.forget_after(1)
    writer.write(replace(RECORD, step=2, epoch=9))
    disk.room = 1 << 20
    writer.close()
    assert [(record.step, record.epoch) for record in read_steps(path)] == [(1, RECORD.epoch), (2, 9)]


def test_a_mark_stays_where_late_records_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.training.observe.step_records, "_MOST_LATE", 4)
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    for step in (1, 2, 3):
        writer.write(replace(RECORD, step=step))
    writer.flush()
    disk = Refusing(writer._file, 0)
    monkeypatch.setattr(writer, "_file", disk)
    with pytest.warns(RuntimeWarning, match="kept until"):
        writer.forget_after(1)
    for step in range(2, 8):
        writer.write(replace(RECORD, step=step, epoch=9))
    disk.room = 1 << 20
    writer.close()
    assert [(one.step, one.epoch) for one in read_steps(path)] == [(1, 0), (5, 9), (6, 9), (7, 9)]


def test_records_go_on_after_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("{}\n")
    writer = RecordWriter(path)
    writer.write(replace(RECORD, step=7))
    writer.forget_after(1)
    writer.write(replace(RECORD, step=2))
    writer.close()
    assert path.read_text().startswith("{}\n")
    assert [record.step for record in last_records(path, after=0)] == [2]


def test_a_file_that_is_gone_warns(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    path.unlink()
    with pytest.warns(RuntimeWarning, match="no more step records"):
        writer.forget_after(1)
    writer.write(RECORD)
    assert not path.exists()


def test_a_writer_without_a_file_does_nothing() -> None:
    writer = RecordWriter(None)
    writer.write(RECORD)
    writer.forget_after(3)
    writer.close()


def test_a_record_with_nan_does_not_raise(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records.jsonl")
    try:
        writer.write(replace(RECORD, weight=float("nan")))
    finally:
        writer.close()
