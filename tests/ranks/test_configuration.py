"""Runs whose settings are from configuration files: bits, resumes, secrets, the list of runs, and OmegaConf."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from tests import forks
from tests.launching import JOBS, Run, run

JOB = f"""
import sys
sys.path.insert(0, {str(JOBS)!r})
from dataclasses import dataclass
import shoal, tiny

@dataclass(frozen=True)
class Optimizer:
    lr: float = 0.1
    momentum: float = 0.0

def job(steps: int = 4, optimizer: Optimizer = Optimizer(), db: dict = {{"password": "none"}}) -> shoal.Job:
    assert db["password"] != "none"
    return tiny.mlp(samples=64, batch=16, steps=steps, lr=optimizer.lr)
"""
YAML = "# of a file\noptimizer:\n  lr: 5e-1\ndb: {password: abcdefgh}\n"


def shoal(folder: Path, *words: str, code: int = 0) -> str:
    """What a command prints."""
    done = forks.run([sys.executable, "-m", "shoal", *words], cwd=folder, env=dict(os.environ), timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "small.yaml").write_text(YAML)

    def train(out: str, *arguments: str) -> Run:
        return Run("job.py", tmp_path / "runs" / out, 2, exact=True, arguments=arguments, cwd=tmp_path)

    def shown(out: str) -> dict[str, object]:
        document: dict[str, object] = json.loads((tmp_path / "runs" / out / "job.json").read_text())
        return document

    by_file = run(train("file", "--config", "small.yaml")).expect(0).result
    by_words = run(train("words", "--set", "optimizer.lr=0.5", "--set", "db.password=abcdefgh")).expect(0).result
    assert by_file["weights_sha256"] == by_words["weights_sha256"]
    assert shown("file")["settings"] == shown("words")["settings"]
    assert [one["path"] for one in shown("file")["config"]] == ["small.yaml"]  # type: ignore[index, attr-defined]
    for path in (path for path in (tmp_path / "runs").rglob("*") if path.is_file()):
        assert b"abcdefgh" not in path.read_bytes(), path

    # A resume compares values: not the file's text, nor where they are from.
    (tmp_path / "small.yaml").write_text(f"steps: 6\n{YAML.replace('of a file', 'another comment')}")
    assert run(train("file", "--resume", "--config", "small.yaml")).expect(0).result["steps"] == 6
    (tmp_path / "small.yaml").write_text(YAML.replace("5e-1", "0.25"))
    refused = run(train("file", "--resume", "--config", "small.yaml")).fails(2)
    assert "optimizer.lr: 0.5 -> 0.25, from small.yaml" in refused.stderr
    assert "steps: 6 -> 4" in refused.stderr

    # The secret is not recorded: without it no command takes the job's default.
    said = shoal(tmp_path, "predict", "job.py", "runs/file", "--data", "train", code=2)
    assert "--set db.password=..." in said
    shoal(tmp_path, "predict", "job.py", "runs/file", "--data", "train", "--set", "db.password=abcdefgh")
    other = ("--set", "db.password=abc", "-o", "other.npz")
    said = shoal(tmp_path, "predict", "job.py", "runs/file", "--data", "train", *other)
    assert "another value of db.password than the run had" in said

    listed = json.loads(shoal(tmp_path, "runs", "--filter", "optimizer.lr=0.5", "--sort=-steps", "--json"))
    assert [one["name"] for one in listed] == ["file", "words"]
    assert listed[0]["settings"]["optimizer.momentum"] == 0.0
    lines = shoal(tmp_path, "runs", "reproduce", "file").splitlines()
    words = shlex.split(next(line for line in lines if line.startswith("shoal run ")))
    assert {"steps=6", "optimizer.lr=0.5", "db.password=<hidden>"} < set(words)
    assert "--config" not in words


PROGRAM = """
import hydra
import shoal
from omegaconf import OmegaConf

@hydra.main(version_base=None, config_path=".", config_name="small")
def main(config):
    run = shoal.run("job.py", settings=config, out="runs/hydra", devices=2, exact=True)
    by_file = shoal.run("job.py", config="plain.toml", out="runs/file", devices=1, exact=True)
    print(run.result["weights_sha256"] == by_file.result["weights_sha256"], run.job["settings"]["optimizer"])
    run.model()

if __name__ == "__main__":
    main()
"""


def test_a_program_of_hydra(tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="pip install 'shoal[dev]' -c constraints.txt")
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "small.yaml").write_text(YAML.replace("5e-1", "0.5\n  momentum: ${optimizer.lr}"))
    (tmp_path / "plain.toml").write_text('optimizer = {lr = 0.25, momentum = 0.25}\ndb.password = "abcdefgh"\n')
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "optimizer.lr=0.25"]
    done = forks.run(command, cwd=tmp_path, env=dict(os.environ), timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "True {'lr': 0.25, 'momentum': 0.25}" in done.stdout
