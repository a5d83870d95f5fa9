"""Lines of `shoal watch`: in any width, of any run, without characters that a terminal would act on."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.run_folders import STORIES, RunFolder, failed, resumed_twice

from shoal.report.account import account
from shoal.report.terminal import head, lines
from shoal.runs.run_files import read_run


def shown(run: RunFolder, width: int) -> list[str]:
    files = read_run(run.written())
    return lines(account(files), files.records, width)


@pytest.mark.parametrize("story", [name for name in STORIES if name != "long"])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_each_line_fits(tmp_path: Path, story: str, width: int) -> None:
    found = shown(STORIES[story](tmp_path / "run"), width)
    assert max(map(len, found)) <= width
    assert found[0] == "run: " + ("failed" if story == "failed" else "completed")


def test_a_run_that_was_resumed(tmp_path: Path) -> None:
    text = "\n".join(shown(resumed_twice(tmp_path / "run"), 100))
    assert "wall clock 27.68 s, and 60.0 min between calls" in text
    assert "! step 40: ranks started again after step 40; 15 steps were trained again" in text
    assert "backward                16%" in text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    assert shown(failed(tmp_path / "run"), 100)[-1] == "failed: step 22: the loss is nan"


def test_time_that_is_left_of_a_running_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins(num_steps=1000)
    assert shown(run, 80)[:2] == ["run: killed", "step 0 of 1,000"]
    run.steps(100)
    monkeypatch.setattr("shoal.runs.run_files.is_held", lambda folder: True)
    found = shown(run, 80)
    assert found[0] == "run: running"
    assert found[1] == "step 100 of 1,000, 1.7 min left"
    files = read_run(run.path)
    assert head(account(files), files.records).startswith("run: running  step 100/1000  loss 0.5")


def test_escape_sequences_are_blanks(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(5)
    run.evaluates(**{"\x1b[2J\x1b]0;title\x07": 1.0})
    run.ends("failed", error={"given": "\x1b[31m", "conflict": "a\rb", "remedy": ""})
    text = "".join(shown(run, 80))
    assert all(c.isprintable() for c in text)
    assert "]0;title" in text


def test_the_balance_of_experts_is_said(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(3)
    files = read_run(run.written())
    imbalances = 1.0, 2.0, None
    records = (replace(one, expert_imbalance=of) for one, of in zip(files.records, imbalances, strict=True))
    files = replace(files, records=tuple(records))
    text = lines(account(files), files.records, 200)
    assert "The busiest expert rank got 1.50 times the mean of rank 0's rows; plans assume 1." in text
