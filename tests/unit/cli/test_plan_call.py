"""shoal.plan is the command's answer as a value: the same text, the same plan file, and the reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shoal
from shoal.cli.main import main
from shoal.plans.plan import read_plan

TEXT = """
import torch, shoal
def job(width: int = 16) -> shoal.Job:
    return shoal.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)),
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=lambda: (torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64)),
        global_batch=16,
        length=shoal.Steps(100),
    )
"""


def without_numbers(text: str) -> str:
    """The words: how long this machine takes to search, and to read a sample, is in some of the numbers."""
    return re.sub(r"[0-9.,]+( [mu]?s\b)?|[ █]+", " ", text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plans")
    (found / "wide_job.py").write_text(TEXT)
    return found


@pytest.mark.slow  # two searches
def test_the_answer_of_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    options = ["--cluster", "4xH100", "--aim", "cheapest", "--set", "width=512", "--price", "2.5"]
    assert main(["plan", "wide_job.py", *options, "-o", "command.toml"]) == 0
    said = capsys.readouterr().out
    found = shoal.plan("wide_job.py", cluster="4xH100", aim="cheapest", width=512, price=2.5)
    lines, printed = str(found).splitlines(), said.splitlines()
    assert printed[1] == "run       shoal run wide_job.py --set width=512 --plan command.toml"
    assert printed[-2].startswith("see       --more: ")
    assert printed[-1] == "plan written: command.toml"
    places = (0, *range(2, len(lines) - 1))
    assert [without_numbers(lines[at]) for at in places] == [without_numbers(printed[at]) for at in places]
    assert repr(found) == str(found)
    assert found.write("call.toml") == Path("call.toml")
    by_command, by_call = read_plan(Path("command.toml")), read_plan(Path("call.toml"))
    assert by_call.layout == by_command.layout == found.best.plan.layout
    assert by_call.prediction["aim"] == "cheapest"
    found.write_html("page.html")
    assert "Why not" in Path("page.html").read_text()


def test_choices_and_reasons() -> None:
    def net() -> torch.nn.Module:
        return torch.nn.Linear(8, 2)

    job = shoal.Job(
        model=net,
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=(torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64)),
        global_batch=16,
    )
    found = shoal.plan(job, cluster="4xH100", max_devices=2)
    best = found.choices[0]
    assert best.plan == found.plan == found.best.plan
    assert best.seconds == pytest.approx(sum(best.prediction.terms.values()))
    assert best.prediction.peak_bytes <= 80e9
    assert {"parameters", "gradients"} <= best.prediction.memory.keys()
    assert all(one.devices == best.devices for one in found.choices)
    assert found.refused
    assert all(one.what and one.reason for one in found.refused)
    shown = found._repr_html_()
    assert shown.startswith("<div>")
    assert "4xH100" in shown
    assert "<b>" in shown
    assert "<script" not in shown
