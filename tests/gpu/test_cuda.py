"""The engine on a GPU: the same run as on the CPU within rounding, and exact mode repeats itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device (or tests/conftest.py hides it)"
    ),
]
GPT = ["examples/gpt.py", *(w for s in ("batch=8", "block=32", "layers=2", "width=64") for w in ("--set", s))]

# Convolutions and products on the GPU may use TF32 off by default: float32 throughout, so the first losses differ by
# sqrt(2^18) * 2^-24 = 3e-5 of themselves at most, doubled for two devices (docs/exactness.md).
FIRST_LOSS_TOLERANCE = 6e-5


def said(command: str, out: Path, *words: str, visible: str | None = None) -> str:
    """What a command of shoal prints that ends well."""
    variables = dict(os.environ) if visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    line = [sys.executable, "-m", "shoal", command, *words, "--out", str(out)]
    done = subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def run(out: Path, *words: str, visible: str | None = None) -> list[dict[str, object]]:
    """The records of a run."""
    said("run", out, *words, visible=visible)
    return records(out)


@pytest.mark.parametrize("job", [["examples/digits.py"], GPT], ids=["digits", "gpt"])
def test_first_loss_is_the_cpus(job: list[str], tmp_path: Path) -> None:
    """The first step's loss on the GPU is the CPU's; dropout is left out, since devices draw differently."""
    extra = ["--set", "dropout=0.0"] if job is GPT else []
    gpu = run(tmp_path / "gpu", *job, *extra, "--steps", "2")
    cpu = run(tmp_path / "cpu", *job, *extra, "--steps", "2", visible="")
    assert gpu[0]["loss"] == pytest.approx(cpu[0]["loss"], rel=FIRST_LOSS_TOLERANCE)
    assert gpu[-1]["digest"] == cpu[-1]["digest"]


@pytest.mark.parametrize("words", [[], ["--exact"], ["--precision", "bf16"]], ids=["fast", "exact", "bf16"])
def test_verify_finds_the_run_right(words: list[str], tmp_path: Path) -> None:
    said("verify", tmp_path, "examples/digits.py", *words)
    assert json.loads((tmp_path / "certificate.json").read_text())["verdict"] == "verified"


def test_a_run_replays_its_steps_from_a_graph(tmp_path: Path) -> None:
    """From the one after those that are measured; the losses are those of queued steps."""
    plan = tmp_path / "plan.toml"
    plan.write_text("[execution]\ncuda_graph = true\n")
    told = said("run", tmp_path / "captured", "examples/digits.py", "--plan", str(plan), "--steps", "20")
    assert "execution.cuda_graph: steps are replayed from step 3 on" in told
    queued = run(tmp_path / "queued", "examples/digits.py", "--steps", "20")
    losses = [record["loss"] for record in records(tmp_path / "captured")]
    assert losses == pytest.approx([record["loss"] for record in queued], rel=1e-3)


def test_exact_mode_repeats_itself(tmp_path: Path) -> None:
    """Two exact runs on the GPU give one hash."""
    hashes = set()
    for name in ("a", "b"):
        run(tmp_path / name, *GPT, "--exact", "--steps", "10")
        hashes.add(json.loads((tmp_path / name / "result.json").read_text())["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
def test_precisions_train(precision: str, tmp_path: Path) -> None:
    """Losses stay finite and fall."""
    records = run(tmp_path / "run", "examples/digits.py", "--precision", precision, "--steps", "60")
    losses = [record["loss"] for record in records if record["loss"] is not None]
    assert losses[-1] < losses[0] / 2  # type: ignore[operator]
