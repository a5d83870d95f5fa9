"""The command: verdicts, explanations, certificates, and runs that demand one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Run, run, start_command

pytestmark = pytest.mark.ranks


def verify(job: str, out: Path, *arguments: str) -> Ended:
    command = [sys.executable, "-m", "shoal", "verify", str(JOBS / job), "--out", str(out), *arguments]
    with start_command(command, out) as started:
        return started.wait()


def test_a_certificate_opens_the_way_for_its_own_run_only(tmp_path: Path) -> None:
    ended = verify("tiny.py:gpt", tmp_path / "verify", "--devices", "2").expect(0)
    assert "verdict            verified" in ended.stdout
    assert "cost " in ended.stdout
    path = tmp_path / "verify" / "certificate.json"
    certificate = json.loads(path.read_text())
    assert certificate["verdict"] == "verified"
    assert certificate["plan"]["layout"]["data"] == 2
    assert {name.partition("/")[0] for name in certificate["worst"]} >= {"forward", "reduction", "update"}
    assert max(certificate["worst"].values()) <= 1.0
    assert not (tmp_path / "verify" / "traces").exists()
    demand = ("--require-certificate", str(path), "--steps", "2")
    job = f"{JOBS / 'tiny.py'}:gpt"
    trained = run(Run(job, tmp_path / "run", 2, arguments=demand)).expect(0)
    assert len(trained.result["certificate"]) == 64
    refused = run(Run(job, tmp_path / "other", 3, arguments=demand)).expect(2)
    assert "it speaks of another run: plan.layout" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_exact_mode_is_held_to_the_bit(tmp_path: Path) -> None:
    ended = verify("tiny.py:convnet", tmp_path / "verify", "--devices", "3", "--exact").expect(0)
    assert "exact" in ended.stdout


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        ("ragged", 1, "a mean over tokens or samples taken for a sum"),
        ("bare", 2, "without its weight a mean cannot be put together over grains"),
        ("seeded", 1, "randomness by rank or by place in the batch"),
        ("tied_late", 2, "tensors that are not trainable parameters of the model"),
        ("unseeded", 2, "module last came out differently"),
    ],
)
def test_mistakes_in_the_users_own_code(job: str, code: int, said: str, tmp_path: Path) -> None:
    ended = verify(f"planted.py:{job}", tmp_path / "verify", "--devices", "2")
    assert ended.code == code, ended.output
    assert said in ended.output
    assert "Traceback" not in ended.output
