"""The account of a run: parts of the wall clock against run directories whose every second is known."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.run_folders import BEGAN, STORIES, RunFolder, one_process, resumed_twice, served

from shoal.cli.main import main
from shoal.errors import RunDirectoryError
from shoal.planner.calibrate.comparison import account_of
from shoal.report.account import Account, account, causes
from shoal.report.wall_clock import PARTS
from shoal.runs.records import Spread
from shoal.runs.run_files import RunReader, read_run

# What the issue promises of the sum; a part's own seconds are rounded to a millisecond where an instant is written.
SUM, ROUNDED = 0.005, 0.01


def accounted(run: RunFolder) -> Account:
    return account(read_run(run.written(), lambda: run.now))


def assert_as_told(found: Account, run: RunFolder) -> None:
    """Each part is as the story has it, and all of them are the whole."""
    assert abs(sum(part.share for part in found.wall.parts) - 1.0) < SUM
    told = {name: run.seconds[name] for name in PARTS}
    assert {part.name: part.seconds for part in found.wall.parts} == pytest.approx(told, abs=ROUNDED)
    assert found.wall.seconds == pytest.approx(run.now - BEGAN, abs=ROUNDED)


@pytest.mark.parametrize("story", [name for name in STORIES if name != "long"])
def test_parts_sum_to_the_wall_clock(tmp_path: Path, story: str) -> None:
    run = STORIES[story](tmp_path / "run")
    assert_as_told(accounted(run), run)


def test_parts_of_a_long_run_sum_to_the_wall_clock(tmp_path: Path) -> None:
    run = STORIES["long"](tmp_path / "run", 500)  # type: ignore[call-arg]
    found = accounted(run)
    assert_as_told(found, run)
    assert found.checkpoints == (49, 99, 149, 199, 249, 299, 349, 399, 449, 499, 500)


def test_a_run_that_goes_on_is_counted_until_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(10)
    run.takes("between_steps", 0.07)  # in the midst of a step
    monkeypatch.setattr("shoal.runs.run_files.is_held", lambda folder: True)
    found = accounted(run)
    assert (found.status, found.num_steps, found.steps) == ("running", 100, 10)
    assert_as_told(found, run)


def test_a_call_that_is_about_to_go_on_starts_up_after_a_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(9)
    run.one_step(0.1, between=0.0)  # killed
    run.takes("idle", 3600.0)
    since = run.now
    run.takes("start_up", 4.0)  # up to now
    monkeypatch.setattr("shoal.runs.run_files.is_held", lambda folder: True)
    monkeypatch.setattr("shoal.runs.run_files.held_since", lambda folder: since)
    found = accounted(run)
    assert (found.status, found.num_steps, found.steps) == ("running", 100, 10)
    assert_as_told(found, run)


def test_ranks_that_are_about_to_start_again_start_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run", ranks=2)
    run.begins()
    run.steps(9)
    run.one_step(0.1)
    run.is_lost(4.0)
    at = datetime.fromtimestamp(run.now, UTC).isoformat(timespec="milliseconds")
    (run.path / "events.jsonl").write_text(json.dumps({"kind": "lost", "at": at, "rank": 0}) + "\n")
    run.takes("start_up", 3.0)  # up to now
    monkeypatch.setattr("shoal.runs.run_files.is_held", lambda folder: True)
    monkeypatch.setattr("shoal.runs.run_files.held_since", lambda folder: BEGAN)
    found = accounted(run)
    assert found.status == "running"
    assert_as_told(found, run)
    run.one_step(0.1)  # without a start that is told of: somebody else went on
    run.now = (run.records[-1].at or 0.0) + 1.0
    assert len(read_run(run.written(), lambda: run.now).attempts) == 1


def test_a_plan_with_values_of_other_kinds_is_read_without_them(tmp_path: Path) -> None:
    run = one_process(tmp_path / "run")
    wrong = 'schema = 1\nbatch = "x"\n[layout]\ndata = "many"\ntensor = 1\n[prediction]\nstep_seconds = 2001-01-01\n'
    wrong += 'device_kind = 3\nprice_per_hour = "a"\nmfu = {}\nterms = {compute = "x"}\nsample_tokens = [1]\n'
    wrong += "peak_bytes = true\n"
    run.written()
    (run.path / "plan.toml").write_text(wrong)
    assert account_of(read_run(run.path)).plan == {"schema": 1, "layout": {"tensor": 1}, "prediction": {}}
    assert main(["report", str(run.path)]) == 0
    assert main(["watch", "--once", str(run.path)]) == 0


def test_a_killed_run_ends_with_its_last_record(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(9)
    run.one_step(0.1, between=0.0)
    found = accounted(run)
    assert found.status == "killed"
    assert_as_told(found, run)


def test_a_result_of_an_earlier_call_is_not_that_of_a_killed_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(5)
    run.ends("preempted")
    run.begins(idle=10.0)
    run.steps(5)
    assert accounted(run).status == "killed"


def test_a_rollback_within_a_call_is_told_apart(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(10)
    run.goes_back_to(4)
    run.steps(10)
    run.ends()
    found = accounted(run)
    assert found.samples.trained_again == 6 * run.batch
    assert found.wall.of("trained_again") > 0.6
    assert_as_told(found, run)


def test_lines_that_are_damaged_are_left_out_and_told(tmp_path: Path) -> None:
    run = one_process(tmp_path / "run")
    path = run.written() / "records.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "{", '{"step": "x"}', "[]", *lines[3:], lines[-1][:40]]))
    found = account(read_run(run.path))
    assert found.steps == 100
    assert [i.text for i in found.incidents] == ["records.jsonl: 3 lines could not be read"]
    assert abs(sum(part.share for part in found.wall.parts) - 1.0) < SUM


def test_lines_beyond_the_limit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = one_process(tmp_path / "run")
    monkeypatch.setattr("shoal.runs.run_files.MOST_LINES", 90)
    run.written()
    found = read_run(run.path)
    assert len(found.records) == 90
    assert found.damaged["records.jsonl"].startswith("only its first 90 lines were read, and the limit is 90 lines")


def older(run: RunFolder) -> Path:
    """The directory as an earlier version would have left it."""
    path = run.written()
    (path / "attempts.jsonl").unlink()
    lines = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key not in ("at", "after")} for line in lines]
    (path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return path


def test_a_run_of_an_older_version_is_read(tmp_path: Path) -> None:
    run = one_process(tmp_path / "run")
    found = account(read_run(older(run)))
    assert found.wall.seconds == pytest.approx(run.now - BEGAN)
    assert found.wall.of("forward") == pytest.approx(run.seconds["forward"])
    assert found.wall.of("not_recorded") > 0.0
    assert abs(sum(part.share for part in found.wall.parts) - 1.0) < SUM
    assert found.status == "completed"


def test_without_telemetry_the_rest_is_not_recorded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.takes("not_recorded", 20.0)
    run.ends()
    found = accounted(run)
    assert_as_told(found, run)
    assert found.rates.step_samples is None


def test_rates_share_of_the_peak_and_cost(tmp_path: Path) -> None:
    run = resumed_twice(tmp_path / "run")
    found = accounted(run)
    seconds = sum(record.seconds for record in run.records[2:])
    rate = 98 * run.batch / seconds
    assert found.rates.step_samples == pytest.approx(rate)
    assert found.rates.step_tokens == pytest.approx(1024 * rate)
    assert found.rates.peak_share == pytest.approx(rate * 1e12 / 989e12 / 4)
    assert found.cost is not None
    assert found.cost.dollars == pytest.approx(3.0 * 4 * found.wall.busy_seconds / 3600)
    assert found.wall.busy_seconds == pytest.approx(found.wall.seconds - 3600.0, abs=ROUNDED)


def test_incidents_of_a_run(tmp_path: Path) -> None:
    found = accounted(resumed_twice(tmp_path / "run"))
    assert [(i.kind, i.step) for i in found.incidents] == [("resumed", 30), ("resumed", 40), ("lost", 55)]
    assert found.incidents[1].text == "ranks started again after step 40; 15 steps were trained again"
    assert "rank 2 on node was lost: it was killed by SIGKILL" in found.incidents[2].text
    assert "it cost" in found.incidents[2].text
    told = {i.kind: i.text for i in accounted(served(tmp_path / "served")).incidents}
    assert told == {"server": "worker 1 is gone; it was computing part 1 of step 9"}
    told = {i.kind: i.text for i in accounted(STORIES["failed"](tmp_path / "failed")).incidents}
    assert told == {"skipped": "no update: nonfinite; on rank 1, samples 7, 9", "error": "step 22: the loss is nan"}


def test_the_effective_share_of_time(tmp_path: Path) -> None:
    """Of the time of training: neither the first start of a call counts nor what lies between calls."""
    run = resumed_twice(tmp_path / "run")
    spans = ("data_wait", "host_to_device", "forward", "backward", "exposed_communication", "optimizer", "other")
    productive = sum(run.seconds[name] for name in (*spans, "evaluation"))
    rest = ("between_steps", "trained_again", "lost", "checkpoint")
    whole = productive + sum(run.seconds[name] for name in rest) + run.seconds["start_up"] / 3  # the third of three
    assert accounted(run).wall.ettr == pytest.approx(productive / whole, rel=1e-3)


def test_a_rank_is_the_slowest_where_ranks_differ(tmp_path: Path) -> None:
    """Steps of one process, before a resume on several, tell nothing of ranks."""
    run = RunFolder(tmp_path / "run", ranks=2)
    run.begins()
    same = {"busy_seconds": Spread(0.1, 0.1, 0)}
    run.steps(50, ranks=same)
    run.steps(10, ranks={"busy_seconds": Spread(0.1, 0.2, 1)})
    (busy,) = accounted(run).ranks
    assert (busy.rank_of_most, busy.share_of_steps) == (1, {1: 1.0})
    assert busy.least == pytest.approx(0.1)


def test_what_limits_a_run_is_named(tmp_path: Path) -> None:
    found = accounted(STORIES["divided"](tmp_path / "run"))
    assert sum(causes(found.wall).values()) == pytest.approx(1.0, abs=SUM)
    assert found.limit.startswith("38% of the time went to the model's forward and backward; next is start-up")


def test_json_has_no_number_that_json_lacks(tmp_path: Path) -> None:
    for story in ("one process", "failed"):
        text = json.dumps(accounted(STORIES[story](tmp_path / story)).to_json(), allow_nan=False)
        assert json.loads(text)["wall"]["parts"][0]["name"] == "start_up"


def test_a_reader_reads_what_was_appended(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(3)
    reader = RunReader(run.written())
    assert len(reader.read().records) == 3
    path = run.path / "records.jsonl"
    run.steps(1)
    line = run.records[-1].to_line()
    with path.open("a") as file:
        file.write(line[:50])
    assert len(reader.read().records) == 3
    with path.open("a") as file:
        file.write(line[50:] + "\n")
    assert [r.step for r in reader.read().records] == [1, 2, 3, 4]
    aside = path.with_suffix(".tmp")  # as a resume replaces them
    aside.write_text("".join(r.to_line() + "\n" for r in run.records[:2]))
    os.replace(aside, path)
    assert [r.step for r in reader.read().records] == [1, 2]


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run began there"):
        read_run(tmp_path)
