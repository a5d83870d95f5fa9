"""Spans sum to the step, and a record that cannot be written never stops a training."""

import errno
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.training.observe.telemetry
from shoal.runs.records import SPANS, StepRecord, read_steps
from shoal.training.observe.telemetry import RecordWriter, StepClock, peak_memory_bytes

CPU = torch.device("cpu")
RECORD = StepRecord(
    step=1,
    epoch=0,
    samples=8,
    num_samples=8,
    loss=0.5,
    weight=8.0,
    grad_norm=1.0,
    learning_rate=0.1,
    loss_scale=None,
    seconds=1.0,
    spans={},
    ranks={},
    memory_bytes=1,
    digest="",
)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which reading the time takes as long as everything else together: 1, 2, 4, 8 ... seconds."""
    times = itertools.accumulate(2**n for n in itertools.count())
    monkeypatch.setattr(shoal.training.observe.telemetry.time, "perf_counter", lambda: float(next(times)))


@pytest.mark.usefixtures("ticking")
def test_each_span_has_its_own_time_and_all_sum_to_the_step() -> None:
    clock = StepClock(CPU)
    clock.begin()  # at 1
    clock.mark("data_wait")  # at 3
    clock.mark("forward")  # at 7
    clock.mark("backward")  # at 15
    clock.mark("forward")  # at 31
    total, spans = clock.end()  # at 63, which ends the step too
    wanted = {"other": 2.0, "data_wait": 4.0, "forward": 8.0 + 32.0, "backward": 16.0}
    assert {name: s for name, s in spans.items() if s} == wanted
    assert set(spans) == set(SPANS)
    assert sum(spans.values()) == 63.0 - 1.0
    assert total == 63.0 - 1.0


@pytest.mark.usefixtures("ticking")
def test_a_step_begins_anew() -> None:
    clock = StepClock(CPU)
    clock.begin()
    clock.mark("forward")
    _, first = clock.end()
    clock.begin()
    _, second = clock.end()
    assert first["forward"] > 0
    assert second["forward"] == 0.0


def test_a_clock_that_is_off_measures_the_step_alone() -> None:
    clock = StepClock(CPU, enabled=False)
    clock.begin()
    clock.mark("forward")
    total, spans = clock.end()
    assert total > 0
    assert spans == dict.fromkeys(SPANS, 0.0)


def test_memory_of_the_host_is_in_bytes() -> None:
    assert 2**24 < peak_memory_bytes(CPU) < 2**44


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
    monkeypatch.setattr(shoal.training.observe.telemetry.time, "monotonic", lambda: now[0])
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
    monkeypatch.setattr(shoal.training.observe.telemetry.time, "monotonic", lambda: now[0])
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
    monkeypatch.setattr(writer, "_file", Refusing(writer._file, 0))
    with pytest.warns(RuntimeWarning, match="kept until"):
        writer.write(replace(RECORD, step=1))
    for step in (2, 3):
        writer.write(replace(RECORD, step=step))
    writer.forget_after(1)
    writer.write(replace(RECORD, step=2, epoch=9))
    writer.close()
    assert [(record.step, record.epoch) for record in read_steps(path)] == [(1, RECORD.epoch), (2, 9)]


def test_short_steps_share_a_reading_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1 << 20, 2 << 20])
    monkeypatch.setattr(shoal.training.observe.telemetry, "peak_memory_bytes", lambda device: next(readings))
    clock = StepClock(CPU)
    assert [clock.peak_memory_bytes(), clock.peak_memory_bytes()] == [1 << 20, 1 << 20]
    clock._memory_until = 0.0
    assert clock.peak_memory_bytes() == 2 << 20


def test_a_damaged_file_of_records_warns(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("{}\n")
    writer = RecordWriter(path)
    with pytest.warns(RuntimeWarning, match="no more step records"):
        writer.forget_after(1)
    writer.write(RECORD)
    assert path.read_text() == "{}\n"


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
