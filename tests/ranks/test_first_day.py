"""What a new user types on the first day: a layout or the planner's plan in one command, and runs as things."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forks
from tests.launching import EXAMPLES, JOBS, Run, run
from tests.usual import parametrize

from shoal.plans.plan import read_plan

DIGITS = EXAMPLES / "digits.py"


def shoal(folder: Path, *words: str, code: int = 0) -> str:
    """What a command prints to a pipe."""
    done = forks.run([sys.executable, "-m", "shoal", *words], cwd=folder, env=dict(os.environ), timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def trained(
    folder: Path, name: str, *arguments: str, devices: int | None = None, **settings: object
) -> dict[str, object]:
    wanted = Run(
        DIGITS, folder / "runs" / name, devices, arguments=arguments, settings={"epochs": 1, **settings}, cwd=folder
    )
    return run(wanted).expect(0).result


def test_a_layout_is_a_plan(tmp_path: Path) -> None:
    """Degrees on the command line and a number of devices are the same run, bit for bit."""
    by_layout = trained(tmp_path, "layout", "--layout", "data=2", "--exact")
    by_devices = trained(tmp_path, "devices", "--exact", devices=2)
    assert by_layout["weights_sha256"] == by_devices["weights_sha256"]
    assert read_plan(tmp_path / "runs" / "layout" / "plan.toml").layout.data == 2


@pytest.mark.timeout(150)  # the planner profiles the job and the machine, and two steps are verified
def test_planned_verified_and_run_by_one_command(tmp_path: Path) -> None:
    arguments = ("--plan", "auto", "--verify", "--steps", "2")
    ended = run(Run(DIGITS, tmp_path / "runs" / "auto", None, arguments=arguments, cwd=tmp_path), timeout=120).expect(0)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("note: ")]
    assert lines[0].startswith("note: --plan auto: ")
    assert " a step" in lines[0]
    assert lines[1] == f"note: for the reasons: shoal plan {DIGITS}"
    assert "verdict            verified" in ended.stdout
    plan = read_plan(tmp_path / "runs" / "auto" / "plan.toml")
    assert plan.prediction["step_seconds"] > 0
    assert plan.num_processes == ended.result["world_size"]


def test_runs_are_listed_compared_and_pruned(tmp_path: Path) -> None:
    results = {name: trained(tmp_path, name, lr=lr) for name, lr in (("slow", 0.001), ("good", 0.1), ("fast", 0.05))}
    lines = shoal(tmp_path, "runs").splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines[2:-1]] == [[name, "completed"] for name in ("fast", "good", "slow")]
    compared = json.loads(shoal(tmp_path, "runs", "compare", "slow", "good", "--json"))
    assert compared["differences"] == {"settings.lr": [0.001, 0.1]}
    assert compared["results"]["weights"] == [results[name]["weights_sha256"] for name in ("slow", "good")]
    best = max(results, key=lambda name: results[name]["metrics"]["accuracy"])  # type: ignore[index]
    shoal(tmp_path, "runs", "prune", "--keep-best", "1", "--metric", "accuracy:max", "--yes")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [best]
    assert f"--out runs/{best}-again" in shoal(tmp_path, "runs", "reproduce", best)


def test_secrets_and_modes(tmp_path: Path) -> None:
    """No file of a run has a secret's text, and nobody else may write there, whatever the umask."""
    job = tmp_path / "job.py"
    text = "import tiny\n\ndef job(api_token: str = 'none'):\n    assert api_token != 'none'\n    return tiny.job()\n"
    job.write_text(f"import sys\nsys.path.insert(0, {str(JOBS)!r})\n" + text)
    before = os.umask(0)
    try:
        ended = run(Run(job, tmp_path / "open", settings={"api_token": "abcdefgh"}, cwd=tmp_path)).expect(0)
        run(
            Run(job, tmp_path / "own", settings={"api_token": "abcdefgh"}, arguments=("--private",), cwd=tmp_path)
        ).expect(0)
    finally:
        os.umask(before)
    paths = {name: [tmp_path / name, *(tmp_path / name).rglob("*")] for name in ("open", "own")}
    for path in paths["open"]:
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path
        assert path.stat().st_mode & stat.S_IROTH, path
        assert not path.is_file() or b"abcdefgh" not in path.read_bytes(), path
    assert all(not path.stat().st_mode & 0o077 for path in paths["own"])
    assert "abcdefgh" not in ended.output
    refused = run(
        Run(job, tmp_path / "open", settings={"api_token": "other"}, arguments=("--resume",), cwd=tmp_path)
    ).fails(2)
    assert "api_token: <hidden>" in refused.message.given


def test_a_start_that_fails_leaves_its_traceback_or_nothing(tmp_path: Path) -> None:
    """Settings that no job function takes are found by the ranks; an exception in the job's code has a traceback."""
    job = tmp_path / "job.py"
    job.write_text(
        f"import sys\nsys.path.insert(0, {str(JOBS)!r})\nimport tiny\n\ndef job(a: int = 1):\n    return tiny.job()\n"
    )
    for devices in (1, 2):
        run(Run(job, tmp_path / "runs" / "a", devices, settings={"b": 1}, cwd=tmp_path)).fails(2)
        assert not (tmp_path / "runs" / "a").exists()
    (tmp_path / "runs" / "b").mkdir(parents=True)
    run(Run(job, tmp_path / "runs" / "b", settings={"b": 1}, cwd=tmp_path)).fails(2)
    assert (tmp_path / "runs" / "b").exists()
    job.write_text(job.read_text().replace("return", "raise RuntimeError('no data')\n    return"))
    run(Run(job, tmp_path / "runs" / "a", 2, cwd=tmp_path)).fails(2)
    texts = [path.read_text() for path in (tmp_path / "runs" / "a" / "errors").iterdir()]
    assert any("no data" in text for text in texts)


JOB = """
import shoal
import torch
from mine.nets import net

def data():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs[:, 0] > 0).long()

def job(lr: float = 0.1, api_token: str = "none"):
    return shoal.Job(
        model=net,
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        train_data=data,
        global_batch=16,
        length=shoal.Steps(4),
    )
"""


@pytest.mark.timeout(150)
@parametrize("name", ["within", "above"], usual=["above"])
def test_another_persons_run_is_trained_again_from_its_record(name: str, tmp_path: Path) -> None:
    """A package in a src layout with uncommitted changes: the printed commands, in an empty folder, give the hash.

    Its owner started it in the checkout, or in the folder above the checkout.
    """
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    theirs, empty = tmp_path / "theirs", tmp_path / "empty"
    package = theirs / "src" / "mine"
    package.mkdir(parents=True)
    empty.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(8, 2)\n")
    (package / "train.py").write_text(JOB)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=theirs, check=True)
    nets = (package / "nets.py").read_text()
    (package / "nets.py").write_text(nets.replace("torch.nn.Linear(8, 2)", "torch.nn.Linear(8, 2, bias=False)"))
    folder = theirs if name == "within" else tmp_path
    job, out = package / "train.py", theirs / "runs" / name
    shoal(folder, "run", str(job.relative_to(folder)), "--exact", "--set", "lr=0.3", "--out", str(out))
    commands = shoal(empty, "runs", "reproduce", str(out))
    assert "api_token" not in commands, "it was not given, so its value is in the code"
    own = [line for line in commands.splitlines() if not line.startswith(("python -m venv", ". .venv", "pip "))]
    script = f'shoal() {{ "{sys.executable}" -m shoal "$@"; }}\n' + "\n".join(own)
    again = empty / name
    again.mkdir()
    done = subprocess.run(["bash", "-c", script], cwd=again, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = {
        json.loads((path / "result.json").read_text())["weights_sha256"]
        for path in (out, again / "theirs" / "runs" / f"{name}-again")
    }
    assert len(hashes) == 1
