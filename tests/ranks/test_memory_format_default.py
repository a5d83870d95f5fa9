"""Memory format of images where nobody says: the same on any number of processes, heeded, recorded and gone on with."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Run, run, run_all, start_command

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'pooled.py'}:job"
LAST = "images lie in memory with their channels last"
FIRST = "images lie in memory with their channels first"
# As tests/ranks/test_fast.py: kernels and sums in other orders, of float32, over a few steps.
TOLERANCE = 1e-4


def same(ended: Ended) -> dict[str, Any]:
    return {key: ended.expect(0).result[key] for key in ("weights_sha256", "sample_digest", "metrics", "train_loss")}


def channels_last(out: Path) -> bool:
    """What the run's complete plan says."""
    found: bool = tomllib.loads((out / "plan.toml").read_text(encoding="utf-8"))["execution"]["channels_last"]
    return found


def written(folder: Path, ranks: int, text: str) -> tuple[str, ...]:
    """A plan file's arguments."""
    path = folder / f"{ranks}-{len(text)}.toml"
    sums = '[collectives]\nall_reduce = "shared_memory"\n' if ranks > 1 else ""
    path.write_text(f"[layout]\ndata = {ranks}\n{sums}[execution]\n{text}\n", encoding="utf-8")
    return ("--plan", str(path))


def test_one_and_two_processes_choose_the_same_and_compute_the_same(tmp_path: Path) -> None:
    ended = run_all([Run(JOB, tmp_path / str(ranks), ranks) for ranks in (1, 2)])
    for found, ranks in zip(ended, (1, 2), strict=True):
        assert LAST in found.expect(0).output
        assert channels_last(tmp_path / str(ranks))
    one, two = (found.result for found in ended)
    assert one["sample_digest"] == two["sample_digest"]
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=TOLERANCE)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=TOLERANCE)


def test_the_choice_is_what_a_plan_would_say_and_a_plan_is_heeded(tmp_path: Path) -> None:
    """Bits of steps with each format tell them apart."""
    texts = {"last": "channels_last = true", "first": "channels_last = false"}
    asked = [Run(JOB, tmp_path / n, None, arguments=written(tmp_path, 2, text)) for n, text in texts.items()]
    default, last, first = run_all([Run(JOB, tmp_path / "default", 2), *asked])
    assert same(default) == same(last)
    assert same(default)["weights_sha256"] != same(first)["weights_sha256"]
    assert (channels_last(tmp_path / "last"), channels_last(tmp_path / "first")) == (True, False)
    assert LAST not in first.output


def test_exact_mode_keeps_channels_first_and_its_bits(tmp_path: Path) -> None:
    asked = Run(JOB, tmp_path / "asked", None, arguments=written(tmp_path, 2, "exact = true\nchannels_last = false"))
    ended = run_all([*(Run(JOB, tmp_path / str(ranks), ranks, exact=True) for ranks in (1, 2)), asked])
    assert same(ended[0]) == same(ended[1]) == same(ended[2])
    assert not any(channels_last(tmp_path / name) for name in ("1", "2", "asked"))
    assert LAST not in ended[0].output


def test_a_model_that_goes_by_strides_keeps_channels_first_and_is_told(tmp_path: Path) -> None:
    ended = run(Run(JOB, tmp_path / "run", 2, settings={"way": "view"})).expect(0)
    assert f"{FIRST}; with them last the model or loss raises RuntimeError: view size is not compatible" in ended.output
    assert not channels_last(tmp_path / "run")


@pytest.mark.parametrize("before", [True, False], ids=["last", "first"])
def test_a_run_goes_on_in_its_format(before: bool, tmp_path: Path) -> None:
    """Also where a run without a plan file would choose the other: a run from before there was a choice."""
    out, text = tmp_path / "run", f"channels_last = {str(before).lower()}"
    run(Run(JOB, out, None, arguments=(*written(tmp_path, 1, text), "--steps", "4"))).expect(0)
    ended = run(Run(JOB, out, 2, arguments=("--resume", "--steps", "8"))).expect(0)
    assert ended.result["steps"] == 8
    assert channels_last(out) is before


def test_what_is_verified_is_what_is_run(tmp_path: Path) -> None:
    out = tmp_path / "verify"
    command = [sys.executable, "-m", "shoal", "verify", JOB, "--devices", "2", "--out", str(out)]
    with start_command(command, out) as started:
        ended = started.wait().expect(0)
    assert "verdict            verified" in ended.stdout
    certificate = out / "certificate.json"
    assert json.loads(certificate.read_text())["plan"]["execution"]["channels_last"]
    demand = ("--require-certificate", str(certificate))
    assert len(run(Run(JOB, tmp_path / "run", 2, arguments=demand)).expect(0).result["certificate"]) == 64
