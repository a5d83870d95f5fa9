"""What each command says of a small run fits 80 columns, in a pipe without control codes and in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest
from tests import forks
from tests.launching import unlaunched
from tests.sharing import Shared
from tests.usual import parametrize

_WIDTH = 80
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_JOB = """
import torch
import shoal
from torch.utils.data import TensorDataset


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[0])


class Failing(torch.nn.Linear):
    def forward(self, x):
        raise ValueError("this layer was given a value that it cannot take, and it says so in a rather long sentence")


def job(lr: float = 0.1, epochs: int = 3, fails: bool = False) -> shoal.Job:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = (lambda: Failing(8, 2)) if fails else (lambda: torch.nn.Sequential(torch.nn.Linear(8, 2)))
    return shoal.Job(
        model=model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        train_data=data,
        eval_data=data,
        metrics={"accuracy": accuracy},
        global_batch=16,
        length=shoal.Epochs(epochs),
    )
"""


def _command(folder: Path, words: str) -> tuple[list[str], dict[str, str]]:
    variables = {**unlaunched(os.environ), "COLUMNS": str(_WIDTH), "TERM": "xterm"}
    variables["XDG_CACHE_HOME"] = str(folder / "cache")
    return [sys.executable, "-m", "shoal", *words.split()], variables


def in_pipe(folder: Path, words: str) -> str:
    """What a command writes to both of its streams, into a pipe."""
    command, variables = _command(folder, words)
    with forks.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        return process.communicate()[0].decode()


def in_terminal(folder: Path, words: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    command, variables = _command(folder, words)
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, _WIDTH, 0, 0))
    process = forks.Popen(command, cwd=folder, env=variables, stdin=its, stdout=its, stderr=its)
    os.close(its)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # all writers are gone
            break
        if not part:
            break
        written += part
    os.close(ours)
    process.wait()
    return written.decode()


def too_long(text: str) -> list[str]:
    """Lines of more than 80 columns, but for commands to copy and for a path or a name that fills a line."""
    lines = re.split(r"[\r\n]+", _ESCAPES.sub("", text))
    return [
        line.rstrip()
        for line in lines
        if len(line.rstrip()) > _WIDTH and "shoal run " not in line and max(map(len, line.split())) < 40
    ]


@pytest.fixture(scope="module")
def folder(shared: Shared) -> Path:
    def make(path: Path) -> None:
        (path / "toy.py").write_text(_JOB, encoding="utf-8")
        for name, words in (("a", ""), ("b", "--devices 2 --set lr=0.2")):
            said = in_pipe(path, f"run toy.py --out runs/{name} {words}")
            assert "completed after step 12" in said, said
            (path / f"{name}.txt").write_text(said, encoding="utf-8")

    return shared.once("terminal words", make)


_COMMANDS = {
    "start": ("run toy.py --devices 2 --out runs/c", "completed after step 12"),
    "resume": ("run toy.py --devices 2 --out runs/b --set lr=0.2 --set epochs=4 --resume", "after step 16"),
    "start that fails": ("run toy.py --devices 2 --out runs/d --set fails=true", "UserCodeError: it raised ValueError"),
    "directory in use": ("run toy.py --out runs/a", "it holds a run, and nothing is overwritten"),
    "no file": ("run nowhere.py", "there is no such file"),
    "verify": ("verify toy.py --devices 2", "verified"),
    "watch": ("watch runs/a --once", "wall clock"),
    "runs": ("runs --sort -loss", "2 runs"),
    "show": ("runs show runs/a", "training loss"),
    "compare": ("runs compare runs/a runs/b", "settings.lr"),
    "reproduce": ("runs reproduce runs/a", "shoal runs compare"),
    "report": ("report runs/a runs/b -o both.html", "page -> both.html"),
    "doctor": ("doctor", "versions"),
    "doctor of a run": ("doctor runs/b", "a step on 2 processes"),
    "evaluate": ("evaluate toy.py runs/b", "64 samples evaluated"),
    "predict": ("predict toy.py runs/b -o outputs.npz", "64 samples of eval_data"),
    "export": ("export runs/b -o exported", "2 tensors"),
    "resize": ("resize runs/b 1", "no run trains there now"),
}


@parametrize("name", list(_COMMANDS), usual=["start that fails", "verify", "compare"])
def test_lines_fit_and_none_is_there_twice(folder: Path, name: str, tmp_path: Path) -> None:
    words, expected = _COMMANDS[name]
    for way in (in_pipe, in_terminal):
        own = tmp_path / way.__name__
        shutil.copytree(folder, own)
        text = way(own, words)
        assert expected in " ".join(_ESCAPES.sub("", text).split()), text
        assert too_long(text) == [], text
        if way is in_pipe:
            assert not set("\x1b\r\x08") & set(text), text
            lines = Counter(line for line in text.splitlines() if not line.startswith(" "))  # but for the rest of one
            twice = [line for line, number in lines.items() if number > 1 and len(line) > 20]
            assert twice == [], text


def test_a_run_fits(folder: Path) -> None:
    for name in ("a", "b"):
        text = (folder / f"{name}.txt").read_text("utf-8")
        assert too_long(text) == []
        assert not set("\x1b\r\x08") & set(text)
