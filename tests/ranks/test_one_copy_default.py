"""One copy of the parameters where nobody says: chosen where the job allows it, and no result is another one."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Run, run, run_all, start_command
from tests.usual import parametrize

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'tiny.py'}:wide"
SAME = ("weights_sha256", "sample_digest", "metrics", "train_loss", "steps", "samples")
COPIES = "each rank has a copy of the model and the optimizer's state"


def same(ended: Ended) -> dict[str, Any]:
    return {key: ended.expect(0).result[key] for key in SAME}


def shared(out: Path) -> tuple[bool, str]:
    """What the run's complete plan says."""
    kept = tomllib.loads((out / "plan.toml").read_text(encoding="utf-8"))
    return kept["memory"]["shared"], kept["collectives"]["all_reduce"]


def copies(folder: Path, exact: bool) -> tuple[str, ...]:
    path = folder / "copies.toml"
    text = (
        f'[layout]\ndata = 2\n[collectives]\nall_reduce = "shared_memory"\n[execution]\nexact = {str(exact).lower()}\n'
    )
    path.write_text(text, encoding="utf-8")
    return ("--plan", str(path))


@parametrize("exact", [False, True], usual=["False"], ids=str)
def test_the_default_changes_no_result(exact: bool, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    wanted = [Run(JOB, first, 2, exact=exact), Run(JOB, second, None, arguments=copies(tmp_path, exact))]
    ended = run_all(wanted)
    assert same(ended[0]) == same(ended[1])
    assert shared(first) == (True, "shared_memory")
    assert shared(second) == (False, "shared_memory")
    assert COPIES not in ended[0].output


@parametrize(
    ("optimizer", "arguments", "told"),
    [
        ("hooked", (), f"{COPIES}: an optimizer with hooks"),
        ("own", (), f"{COPIES}: optimizer Own"),
        ("torch", ("--check-replicas", "2"), f"{COPIES}: --check-replicas"),
    ],
    ids=["hooked", "own", "checked"],
    usual=["hooked"],
)
def test_a_job_that_needs_copies_has_them_and_goes_on(
    optimizer: str, arguments: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    wanted = Run(JOB, out, 2, settings={"optimizer": optimizer}, arguments=arguments)
    ended = run(wanted).expect(0)
    assert told in ended.output
    assert shared(out) == (False, "shared_memory")


def test_a_run_of_one_copy_goes_on_with_an_optimizer_that_needs_copies(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(Run(JOB, out, 2, arguments=("--steps", "3"))).expect(0)
    assert shared(out)[0]
    arguments = ("--resume", "--accept-changes", "--steps", "6")
    ended = run(Run(JOB, out, None, settings={"optimizer": "hooked"}, arguments=arguments)).expect(0)
    assert f"{COPIES}: an optimizer with hooks" in ended.output
    assert not shared(out)[0]
    assert ended.result["steps"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["torch", "hooked"])
def test_the_certificate_is_of_the_run(optimizer: str, tmp_path: Path) -> None:
    out, setting = tmp_path / "verify", ("--set", f"optimizer={optimizer}")
    command = [sys.executable, "-m", "shoal", "verify", JOB, "--devices", "2", *setting, "--out", str(out)]
    with start_command(command, out) as started:
        started.wait().expect(0)
    document = json.loads((out / "certificate.json").read_text(encoding="utf-8"))
    assert document["plan"]["memory"]["shared"] is (optimizer == "torch")
    arguments = ("--require-certificate", str(out / "certificate.json"))
    run(Run(JOB, tmp_path / "run", 2, settings={"optimizer": optimizer}, arguments=arguments)).expect(0)
