"""Beyond its first steps a run has a record for each block of steps; what is read of it stays the same."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.run_folders import STORIES, RunFolder

from shoal.report.account import account
from shoal.report.curves import training_charts
from shoal.report.waits import waits
from shoal.runs.collection import entry_of
from shoal.runs.record_blocks import WHOLE_STEPS, block_of, merged
from shoal.runs.records import OwnSpreads, StepRecord, last_records, read_steps
from shoal.runs.run_files import read_run
from shoal.training.observe.step_records import RecordWriter

WHOLE = 20  # steps with a record each


def written(run: RunFolder, whole_steps: int | None = WHOLE) -> Path:
    writer = RecordWriter(run.path / "records.jsonl", whole_steps=whole_steps)
    for record, following in zip_longest(run.records, run.records[1:]):
        writer.write(record)
        if following is not None and (following.began_at or 0.0) - (record.at or 0.0) > 2.0:
            writer.saves(record.step)  # another start went on from there
    writer.close()
    return run.path


@given(st.integers(1, 10**12))
def test_a_block_follows_from_the_step_alone(step: int) -> None:
    block = block_of(step)
    assert step in block
    assert block_of(block[0]) == block == block_of(block[-1])
    assert block_of(block[-1] + 1)[0] == block[-1] + 1
    assert len(block) <= max(1, step // 500)


def test_blocks_begin_after_the_first_steps_and_double() -> None:
    assert [len(block_of(step)) for step in (1, WHOLE_STEPS)] == [1, 1]
    assert [block_of(10_001), block_of(20_000)] == [range(10_001, 10_017), range(19_985, 20_001)]
    assert [len(block_of(10_000 * 2**n + 1)) for n in range(5)] == [16, 32, 64, 128, 256]


def test_a_block_has_sums_means_extremes_and_the_slowest_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", ranks=2)
    run.steps(40)
    steps = run.records[20:36]
    (block,) = [record for record in read_steps(written(run) / "records.jsonl") if record.step == 36]
    assert (block.first, block.steps, block.digest, block.samples) == (21, 16, steps[-1].digest, steps[-1].samples)
    assert block.num_samples == sum(step.num_samples for step in steps)
    assert block.seconds == pytest.approx(sum(step.seconds for step in steps), rel=1e-15)
    assert block.loss == pytest.approx(statistics.mean(step.loss or 0.0 for step in steps))
    assert block.ranks["forward"].max == pytest.approx(statistics.mean(step.ranks["forward"].max for step in steps))
    assert block.block is not None
    assert block.block.min["loss"] == min(step.loss or 0.0 for step in steps)
    assert block.block.max["forward"] == max(step.spans["forward"] for step in steps)
    assert block.block.slowest == max(steps, key=lambda step: step.seconds)
    assert block.began_at == steps[0].began_at
    assert block.by_rank is not None
    assert block.by_rank.steps == 10
    assert block.per_step().seconds == pytest.approx(block.seconds / 16)


@given(st.integers(2, 30), st.integers(1, 29), st.booleans())
def test_parts_of_a_block_merge_as_the_whole(count: int, cut: int, is_alone: bool) -> None:
    def one(step: int) -> StepRecord:
        seconds = 1.0 + (step * 7 % 11) / 8
        own = OwnSpreads(("forward", "memory_bytes"), (seconds, float(step)))
        ranks = own if is_alone else {name: own[name] for name in own}
        rest = {"learning_rate": 0.5, "loss_scale": None, "seconds": seconds, "spans": {"forward": seconds / 2}}
        known = {"loss": float(step), "weight": 4.0, "grad_norm": None, "memory_bytes": step, "digest": f"{step}"}
        return StepRecord(step=step, epoch=0, samples=4 * step, num_samples=4, ranks=ranks, **rest, **known)  # type: ignore[arg-type]

    steps = [one(step) for step in range(1, count + 1)]
    cut = min(cut, count - 1)
    whole, parts = merged(steps), merged([merged(steps[:cut]), *steps[cut:]])
    assert parts.loss == pytest.approx(whole.loss)
    assert parts.ranks["forward"].max == pytest.approx(whole.ranks["forward"].max)
    assert replace(parts, loss=0.0, ranks={}) == replace(whole, loss=0.0, ranks={})
    line = whole.to_line()
    assert replace(StepRecord.from_line(line), ranks={}, block=None) == replace(whole, ranks={}, block=None)


@pytest.mark.parametrize("story", STORIES)
def test_sums_of_a_run_are_those_of_its_steps(story: str, tmp_path: Path) -> None:
    tell: Callable[[Path], RunFolder] = STORIES[story]
    whole = account(read_run(written(tell(tmp_path / "a" / "run"), None)))
    blocks = account(read_run(written(tell(tmp_path / "b" / "run"))))
    if whole.steps > WHOLE + 1:
        assert blocks.blocks is not None or story in ("failed", "served")
    for part, other in zip(blocks.wall.parts, whole.wall.parts, strict=True):
        assert part.seconds == pytest.approx(other.seconds, abs=1e-6), part.name
    assert blocks.samples == whole.samples
    assert blocks.checkpoints == whole.checkpoints
    assert blocks.evaluations == whole.evaluations
    assert blocks.incidents == whole.incidents
    assert (blocks.steps, blocks.loss) == (whole.steps, whole.loss)
    assert blocks.step_times.count == whole.step_times.count
    assert blocks.step_times.mean == pytest.approx(whole.step_times.mean)
    assert blocks.step_times.median == pytest.approx(whole.step_times.median, rel=0.1)
    assert blocks.rates.step_samples == pytest.approx(whole.rates.step_samples)
    assert [(e.name, e.least) for e in blocks.ranks] == [(e.name, pytest.approx(e.least)) for e in whole.ranks]


def test_waits_of_blocks_are_those_of_their_steps(tmp_path: Path) -> None:
    shares = []
    for whole_steps in (None, WHOLE):
        run = RunFolder(tmp_path / str(whole_steps), ranks=4)
        run.steps(500)
        found = waits(read_run(written(run, whole_steps)).records, 4)
        assert found is not None
        shares.append([sum(found.pairs[rank].values()) for rank in range(4)])
    assert shares[1] == pytest.approx(shares[0], rel=0.1)


def test_pages_say_where_blocks_begin(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(100)
    files = read_run(written(run))
    assert len(files.records) < 40
    told = account(files)
    assert str(told.blocks) == "from step 21 each record is of a block of up to 32 steps"
    assert all(chart.note.startswith("From step 21") for chart in training_charts(told, files.records))
    assert entry_of(run.path, "run").steps == 100


def test_checkpoints_and_stops_end_a_block(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.steps(60)
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path, whole_steps=WHOLE)
    for record in run.records[:50]:
        writer.write(record)
        if record.step == 30:
            writer.saves(30)
            assert [one.step for one in read_steps(path)][-2:] == [29, 30]  # nothing before the checkpoint can be lost
        if record.step == 31:
            writer.saves(32)  # a checkpoint of a step whose record waits for the evaluation after it
            assert [one.step for one in read_steps(path)][-1] == 31
    writer.close()
    assert [(one.first, one.step) for one in read_steps(path)][WHOLE:] == [
        (21, 29),
        (30, 30),
        (31, 31),
        (32, 32),
        (33, 36),
        (37, 40),
        (41, 49),
        (50, 50),
    ]


def test_a_kill_loses_the_open_block_and_a_resume_counts_no_step_twice(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.steps(60)
    path, undone = tmp_path / "records.jsonl", list[StepRecord]()
    for record in run.records[:44]:
        if record.step == 1:
            writer = RecordWriter(path, whole_steps=WHOLE)
        writer.write(record)
        if record.step == 25:
            writer.saves(25)
    writer.flush()  # then the process is killed within the block of steps 41 to 60
    assert writer._file is not None
    writer._file.close()
    with path.open("ab") as file:
        file.write(b'{"step":4')
    begun = path.read_bytes().rpartition(b"\n")[0]
    writer = RecordWriter(path, undone.extend, whole_steps=WHOLE)
    writer.forget_after(25)
    assert [(one.first, one.step) for one in undone] == [(26, 36), (37, 40)]
    for record in run.records[25:]:
        writer.write(record)
    writer.close()
    assert path.read_bytes().startswith(begun)  # nothing is rewritten
    found = list(read_steps(path))
    assert sum(one.steps for one in found) == 60
    assert sum(one.num_samples for one in found) == run.records[-1].samples
    assert [(one.first, one.step) for one in found][WHOLE:] == [
        (21, 24),
        (25, 25),
        (26, 36),
        (37, 40),
        (41, 59),
        (60, 60),
    ]
    assert [one.step for one in last_records(path)] == [60]


def test_a_late_line_of_an_earlier_generation_does_not_count(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.steps(9)
    path = tmp_path / "records.jsonl"
    lines = [record.to_line(2) for record in run.records[:6]]
    lines += ['{"trained_again": {"after": 4, "generation": 3}}', run.records[4].to_line(3)]
    lines += [run.records[7].to_line(2), run.records[5].to_line(3)]
    path.write_text("".join(f"{line}\n" for line in lines))
    assert [(one.step, one.generation) for one in read_steps(path)] == [
        (1, 2),
        (2, 2),
        (3, 2),
        (4, 2),
        (5, 3),
        (6, 3),
    ]
    assert [one.step for one in last_records(path, after=4)] == [5, 6]


def test_steps_that_a_paused_process_writes_before_the_next_generation_count_once(tmp_path: Path) -> None:
    """The next generation read the file at step 4, found nothing to train again, and writes no mark."""
    run = RunFolder(tmp_path / "run")
    run.steps(9)
    path = tmp_path / "records.jsonl"
    lines = [record.to_line(2) for record in run.records[:7]]
    lines += [run.records[4].to_line(3), run.records[7].to_line(2), run.records[5].to_line(3)]
    path.write_text("".join(f"{line}\n" for line in lines))
    steps = [(step, 2 if step < 5 else 3) for step in range(1, 7)]
    assert [(one.step, one.generation) for one in read_steps(path)] == steps


def test_the_end_of_a_long_file_is_read_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.steps(400)
    path = written(run, None) / "records.jsonl"
    text = path.read_text()
    path.write_text("x" + text[1:])
    assert [one.step for one in last_records(path)] == [400]
    assert [one.step for one in last_records(path, after=100)] == list(range(101, 401))


def test_with_all_records_each_step_has_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.steps(100)
    lines = (written(run, None) / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["steps"] for line in lines] == [1] * 100
