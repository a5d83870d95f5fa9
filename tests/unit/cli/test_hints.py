"""Hints: of words that a command does not know, only what that very command takes is told."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shoal.cli.hints import _SAME, hints
from shoal.cli.main import _options, _parser, main

OPTIONS = _options(_parser())


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("def job(lr: float = 0.1, num_epochs: int = 3): ...\ndef other(batch_size=3): ...\n")
    return "net.py"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("run net.py --gpus 2", "--devices 2"),
        ("run net.py --nproc_per_node=4", "--devices 4"),
        ("run --num-processes 4 net.py", "--devices 4"),
        ("verify net.py --world-size 2", "--devices 2"),
        ("plan net.py --gpus 2", "--max-devices 2"),
        ("plan net.py --devices 2", "--max-devices 2"),
        ("run net.py --config-file a.toml", "--config a.toml"),
        ("run net.py --output-dir here", "--out here"),
        ("run net.py --output here", "--out here"),
        ("plan net.py --out here", "--output here"),
        ("run net.py --fp16", "--precision fp16"),
        ("run net.py --tp 2", "--layout tensor=2"),
        ("verify net.py --layout data=2,shard=2", "--plan FILE, in which [layout] says data = 2 and shard = 2"),
        ("run net.py --lr 0.3", "--set lr=0.3"),
        ("run net.py --epochs 5", "--set num_epochs=5"),
        ("plan net.py:other --batch-size 5", "--set batch_size=5"),
        ("run net.py --batch-size 5", "it in the job: give the job function a parameter batch, then --set batch=5"),
    ],
)
def test_words_of_other_tools(job: str, capsys: pytest.CaptureFixture[str], line: str, wanted: str) -> None:
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr().err
    assert re.search(rf"for --[\w-]+ write {re.escape(wanted)}$", said, re.MULTILINE), said


def test_an_option_of_another_command_is_told_as_that(job: str) -> None:
    assert hints("run", OPTIONS, ["run", job, "--aim", "cheapest"]) == "; --aim is an option of shoal plan"
    assert hints("plan", OPTIONS, ["plan", job, "--resume"]) == "; --resume is an option of shoal run"


@pytest.mark.parametrize("command", list(OPTIONS))
def test_what_is_hinted_exists(command: str) -> None:
    for word in [*(word for words in _SAME.values() for word in words), "outputs", "lern", "foo"]:
        told = hints(command, OPTIONS, [command, f"--{word}", "7"]) if f"--{word}" not in OPTIONS[command] else ""
        meant = re.findall(r"(?:write|mean) '?(--[\w-]+)", told)
        assert set(meant) <= set(OPTIONS[command]), word


def test_a_word_like_none_has_no_hint() -> None:
    assert hints("run", OPTIONS, ["run", "a.py", "--foo"]) == ""


def test_commands() -> None:
    assert hints(None, OPTIONS, ["train", "a.py"]) == "; did you mean 'shoal run'?"
    assert hints(None, OPTIONS, ["verfy", "a.py"]) == "; did you mean 'verify'?"
    assert hints(None, OPTIONS, []) == ""
