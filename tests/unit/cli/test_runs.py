import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.cli.runs import table
from shoal.runs.collection import runs_below

FORMATS = Path(__file__).parents[2] / "fixtures" / "formats"


def add_run(folder: Path, name: str, lr: float, accuracy: float | None, **more: Any) -> None:
    """A copy of a finished run with other settings and another result."""
    shutil.copytree(FORMATS / "finished", folder / name)
    job, result = (
        json.loads((folder / name / "job.json").read_text()),
        json.loads((folder / name / "result.json").read_text()),
    )
    job |= {"settings": {"lr": lr}, "watch": "accuracy:max"}
    result |= {"best": {"metric": "accuracy", "value": accuracy, "step": 6} if accuracy is not None else None, **more}
    (folder / name / "job.json").write_text(json.dumps(job))
    (folder / name / "result.json").write_text(json.dumps(result))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for place in range(9):
        add_run(tmp_path / "runs", f"lr-{place}", 0.1 * place, 0.5 + 0.01 * place)
    add_run(
        tmp_path / "runs",
        "lr-bad",
        9.0,
        None,
        status="failed",
        metrics={"accuracy": None},
        error={"kind": "NonFinite", "conflict": "a loss of nan"},
    )
    return tmp_path / "runs"


def test_ten_runs_are_listed_within_80_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13
    assert max(map(len, lines)) <= 80
    assert lines[0] == "job job.py, devices 2, layout dp2"
    assert lines[-1].startswith("10 runs, ")


def test_a_narrow_table_loses_columns_and_no_name(folder: Path) -> None:
    entries = list(runs_below(folder))
    lines = table(entries, 30)
    assert max(map(len, lines[1:])) <= 30
    assert [line.split()[0] for line in lines[2:]] == [one.name for one in entries]


def test_settings_that_differ_have_columns_and_can_be_sorted_by(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--sort=-lr", "--filter", "state=completed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "lr" in lines[1].split()
    assert [line.split()[0] for line in lines[2:-1]] == [f"lr-{place}" for place in reversed(range(9))]
    assert max(map(len, lines)) <= 80


def test_layouts_are_shown_and_filtered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "lr-1" / "plan.toml").write_text("[layout]\ntensor = 2\n")
    (folder / "lr-2" / "plan.toml").write_text("[layout]\nno = 2\n")
    (folder / "lr-3" / "plan.toml").unlink()
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    layouts = {line.split()[0]: line[lines[1].index("layout") :].split()[0] for line in lines[2:-1]}
    assert [layouts[f"lr-{place}"] for place in range(5)] == ["dp2", "tp2", "-", "-", "dp2"]
    assert max(map(len, lines)) <= 80
    assert main(["runs", "--filter", "layout=tp2", "--json"]) == 0
    assert [(one["name"], one["layout"]) for one in json.loads(capsys.readouterr().out)] == [("lr-1", "tp2")]
    assert main(["runs", "show", "lr-1"]) == 0
    assert ["layout", "tp2"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_sorted_and_filtered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--sort=-best", "--filter", "state=completed", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == [
        f"lr-{place}" for place in reversed(range(9))
    ]
    assert main(["runs", "runs", "--filter", "lr=0.2", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["lr-2"]


def test_sorted_by_a_metric_which_has_the_column_of_the_best(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, value in enumerate((0.7, 0.9, 0.8)):
        path = folder / f"lr-{place}" / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": {"f1": value}}))
    assert main(["runs", "--sort=-f1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "best f1" in lines[1]
    assert [line.split()[0] for line in lines[2:5]] == ["lr-1", "lr-2", "lr-0"]
    assert [float(line[lines[1].index("best f1") :].split()[0]) for line in lines[2:5]] == [0.9, 0.8, 0.7]


def test_differences_and_results_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "compare", "lr-1", "runs/lr-2"]) == 0
    text = capsys.readouterr().out
    assert "settings.lr   0.1   0.2" in text
    assert "weights" in text
    assert main(["runs", "compare", "lr-1", "runs/lr-2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == {"settings.lr": [0.1, 0.2]}


def test_prune_keeps_the_best(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["runs", "prune", "--keep-best", "3"]) == 2  # nobody can answer
    assert "add --yes" in capsys.readouterr().err
    assert len(list(folder.iterdir())) == 10
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["runs", "prune", "--keep-best", "3"]) == 0
    assert len(list(folder.iterdir())) == 10
    assert main(["runs", "prune", "--keep-best", "3", "--yes"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["lr-6", "lr-7", "lr-8"]


def test_prune_by_another_metric(folder: Path) -> None:
    path = folder / "lr-4" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": {"loss": -1.0}}))
    assert main(["runs", "prune", "--keep-best", "1", "--metric", "loss:min", "--yes"]) == 0
    assert [one.name for one in folder.iterdir()] == ["lr-4"]


def test_deleted_with_the_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "delete", "lr-bad", "lr-0", "--yes"]) == 0
    text = capsys.readouterr().out
    assert "runs/lr-bad  failed, step " in text
    assert " KiB" in text
    assert "deleted 2 runs" in text
    assert len(list(folder.iterdir())) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "lr-1"], "compare takes two runs or more"),
        (["remove", "lr-1"], "remove is none of list, compare"),
        (["missing"], "there is no folder missing"),
        (["show", "missing"], "no run began there"),
        (["--sort", "colour"], "no column is called colour"),
        (["--filter", "colour=red"], "no run has colour"),
        (["--filter", "colour"], "it is not NAME=VALUE"),
        (["delete", "runs", "--yes"], "no run began there"),
        (["prune"], "it does not say which runs stay"),
        (["prune", "--keep-best", "1", "--metric", "loss"], "it does not say which value is best"),
        (["prune", "--keep-best", "1", "--metric", "wer:min", "--yes"], "no run has wer, and all would go"),
        (["--yes"], "--yes is for delete and prune"),
        (["reproduce", "lr-1"], "it has no source/command.json"),
    ],
)
def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["runs", *words]) == 2
    assert said in capsys.readouterr().err
    assert len(list(folder.iterdir())) == 10


def test_commands_that_train_a_run_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder / "lr-1" / "source"
    source.mkdir()
    commit = {"commit": "a" * 40, "branch": "main", "remote": "https://example.org/me/nets.git", "dirty": True}
    commit |= {"folder": "jobs", "untracked": ["new.py"], "left_out": {"x.pem": "its name suggests a secret"}}
    (source / "commit.json").write_text(json.dumps(commit))
    (source / "uncommitted.patch").write_text("")
    (source / "packages.txt").write_text("# mine==1.0 (installed from a local file)\nnumpy==2.1\ntorch==2.13.0+cpu\n")
    arguments = [
        "/venv/bin/shoal",
        "run",
        "job.py",
        "--devices",
        "2",
        "--out=runs/a",
        "--set",
        "token=<hidden>",
        "--resume",
    ]
    (source / "command.json").write_text(json.dumps({"arguments": arguments, "folder": "/x", "python": "3.11.7"}))
    assert main(["runs", "reproduce", "lr-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    root = folder / "lr-1"
    assert lines == [
        "set -e",
        "# the code, as it was",
        "git clone https://example.org/me/nets.git nets",
        "cd nets",
        f"git checkout --quiet {'a' * 40}",
        f"git apply {source}/uncommitted.patch",
        "cd jobs",
        "# not in the patch: x.pem: its name suggests a secret",
        "# under no version control, and not kept here: new.py",
        "# the packages",
        "python -m venv .venv",
        ". .venv/bin/activate  # Python 3.11.7",
        "# torch's own index has this build: add --extra-index-url to the next line",
        f"pip install -r {source}/packages.txt",
        "# mine==1.0 (installed from a local file): install it by hand",
        "# the run: 2 processes",
        f"shoal run job.py --set 'token=<hidden>' --plan {root}/plan.toml --out runs/lr-1-again",
        "# the same?",
        f"shoal runs compare {root} runs/lr-1-again",
    ]
