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


def run(out: Path, *words: str, visible: str | None = None) -> list[dict[str, object]]:
    """The records of a run."""
    variables = dict(os.environ) if visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, "-m", "shoal", "run", *words, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("job", [["examples/digits.py"], GPT], ids=["digits", "gpt"])
def test_first_loss_is_the_cpus(job: list[str], tmp_path: Path) -> None:
    """The first step's loss on the GPU is the CPU's; dropout is left out, since devices draw differently."""
    extra = ["--set", "dropout=0.0"] if job is GPT else []
    gpu = run(tmp_path / "gpu", *job, *extra, "--steps", "2")
    cpu = run(tmp_path / "cpu", *job, *extra, "--steps", "2", visible="")
    assert gpu[0]["loss"] == pytest.approx(cpu[0]["loss"], rel=FIRST_LOSS_TOLERANCE)
    assert gpu[-1]["digest"] == cpu[-1]["digest"]


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
