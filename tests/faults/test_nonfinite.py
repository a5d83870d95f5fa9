"""A NaN on one rank: every rank does what the policy says, the parameters stay finite, the samples are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.launching import JOBS, Ended, Run, run, run_all
from tests.usual import SLOW

pytestmark = pytest.mark.faults

JOB = JOBS / "faulty.py"
# Step 6 (from 1) holds samples 80 to 95; these two are in grains 5 and 6, which are rank 1's of two.
NAN_SAMPLES, NAN_STEP = [90, 93], 6
GRAINS, RANK = [5, 6], 1


def poisoned(out: Path, policy: str, exact: bool, *arguments: str, steps: int = 8) -> Run:
    variables = {"TEST_NAN": ",".join(map(str, NAN_SAMPLES)), "TEST_POLICY": policy}
    every = ("--checkpoint-every", "1")
    return Run(JOB, out, 2, exact, (*every, *arguments), {"steps": steps}, variables)


def checkpoint(out: Path, step: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(out / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    return tensors


def assert_finite(out: Path) -> None:
    """Parameters, BatchNorm's buffers and optimizer state of every checkpoint that is kept."""
    folders = list((out / "checkpoints").glob("step-????????"))
    assert folders
    for folder in folders:
        for name in ("model", "optimizer"):
            for key, tensor in load_file(folder / f"{name}.safetensors").items():
                assert bool(torch.isfinite(tensor).all()), (folder.name, key)


def assert_named(found: dict[str, Any]) -> None:
    assert (found["rank"], found["grains"], found["samples"]) == (RANK, GRAINS, NAN_SAMPLES)


@pytest.fixture(scope="module", params=[pytest.param(False, id="fast", marks=SLOW), pytest.param(True, id="exact")])
def skipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(poisoned(tmp_path_factory.mktemp("skip") / "run", "skip", request.param)).expect(0)


def test_skip_leaves_the_step_out(skipped: Ended) -> None:
    records = skipped.records
    assert [r["step"] for r in records if r["skipped"]] == [NAN_STEP]
    bad = records[NAN_STEP - 1]
    assert (bad["skipped"], bad["loss"]) == ("nonfinite", None)
    assert_named(bad["nonfinite"])
    assert skipped.result["skipped_steps"] == 1
    assert str(NAN_SAMPLES) in skipped.stdout
    assert f"rank {RANK}" in skipped.stdout
    assert_finite(skipped.out)


def test_skip_changes_neither_parameters_nor_statistics(skipped: Ended) -> None:
    """The checkpoints before and after the step are kept: the last three of eight steps."""
    before, after = (load_last(skipped.out, step) for step in (NAN_STEP, NAN_STEP + 1))
    assert any(not torch.equal(before[name], after[name]) for name in before), "no step changes anything: no test"
    short = run(poisoned(skipped.out.parent / "short", "skip", is_exact(skipped), "--steps", str(NAN_STEP))).expect(0)
    good, bad = (load_last(short.out, step) for step in (NAN_STEP - 1, NAN_STEP))
    assert all(torch.equal(good[name], bad[name]) for name in good)


def load_last(out: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint(out, step)


def is_exact(ended: Ended) -> bool:
    return "exact = true" in (ended.out / "plan.toml").read_text(encoding="utf-8")


def test_rollback_goes_back_and_leaves_the_step_out(tmp_path: Path) -> None:
    back, skip = run_all([poisoned(tmp_path / "back", "rollback", True), poisoned(tmp_path / "skip", "skip", True)])
    back.expect(0)
    assert f"rolled back to step {NAN_STEP - 1}" in back.stdout
    assert back.result["weights_sha256"] == skip.expect(0).result["weights_sha256"]
    assert back.result["sample_digest"] == skip.result["sample_digest"]
    assert [r["step"] for r in back.records] == list(range(1, 9))
    assert [r["step"] for r in back.records if r["skipped"]] == [NAN_STEP]
    assert str(NAN_SAMPLES) in back.stdout
    assert_finite(back.out)
    assert_named(back.records[NAN_STEP - 1]["nonfinite"])


@pytest.mark.slow
def test_rollback_over_several_steps(tmp_path: Path) -> None:
    """From step 4, the newest checkpoint; steps 5 to 7 are trained twice and recorded once."""
    variables = {"TEST_NAN": "106", "TEST_POLICY": "rollback"}
    wanted = Run(JOB, tmp_path / "run", 2, True, ("--checkpoint-every", "4"), {}, variables)
    ended = run(wanted).expect(0)
    assert "rolled back to step 4" in ended.stdout
    assert [r["step"] for r in ended.records] == list(range(1, 9))
    assert [r["step"] for r in ended.records if r["skipped"]] == [7]
    assert ended.result["samples"] == 128


def test_stop_exits_with_65_and_a_resume_may_skip(tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped, skip = run_all([poisoned(out, "stop", True), poisoned(tmp_path / "skip", "skip", True)])
    stopped.fails(65)
    for text in ("NonFiniteError", "you gave", "write instead", f"rank {RANK}", str(NAN_SAMPLES)):
        assert text in stopped.stderr, text
    assert "Traceback" not in stopped.output
    assert (stopped.result["status"], stopped.result["steps"]) == ("failed", NAN_STEP - 1)
    assert_finite(out)
    resumed = run(poisoned(out, "skip", True, "--resume")).expect(0)
    assert resumed.result["resumed_from"] == NAN_STEP - 1
    assert resumed.result["weights_sha256"] == skip.expect(0).result["weights_sha256"]
