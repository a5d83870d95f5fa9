"""Layouts of two and four ranks: those that share one GPU over Gloo, and those with a GPU each over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.usual import needs_zero23

from shoal.plans import Plan
from shoal.plans.plan import plan_text

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NEEDS_GPU = pytest.mark.skipif(NUM_GPUS == 0, reason="torch sees no CUDA device (or tests/conftest.py hides it)")
SIZES = ("batch=8", "layers=4", "width=32", "block=16", "dropout=0.0", "steps=40")
JOB = ("examples/gpt.py", *(word for size in SIZES for word in ("--set", size)))

Sections = dict[str, dict[str, Any]]


def zero(stage: int, **layout: int) -> Sections:
    return {"layout": layout, "shard": {"level": ("optimizer", "gradients", "parameters")[stage - 1]}}


PLANS: dict[str, Sections] = {
    "2-ranks-data": {"layout": {"data": 2}},
    "2-ranks-exact": {"layout": {"data": 2}, "execution": {"exact": True}},
    "2-ranks-ZeRO-1": zero(1, shard=2),
    "2-ranks-ZeRO-2": zero(2, shard=2),
    "2-ranks-ZeRO-3": zero(3, shard=2),
    "2-ranks-tensor": {"layout": {"tensor": 2}},
    "2-ranks-sequence": {"layout": {"tensor": 2}, "tensor": {"sequence": True}},
    "2-ranks-context": {"layout": {"context": 2}},
    "2-ranks-pipeline": {"layout": {"pipeline": 2}, "batch": {"grains_per_microbatch": 2}},
    "4-ranks-data": {"layout": {"data": 4}},
    "4-ranks-ZeRO-1": zero(1, data=2, shard=2),
    "4-ranks-ZeRO-2": zero(2, shard=4),
    "4-ranks-ZeRO-3": zero(3, data=2, shard=2),
    "4-ranks-tensor": {"layout": {"tensor": 4}},
    "4-ranks-sequence": {"layout": {"data": 2, "tensor": 2}, "tensor": {"sequence": True}},
    "4-ranks-context": {"layout": {"data": 2, "context": 2}},
    "4-ranks-pipeline": {"layout": {"pipeline": 4}, "batch": {"grains_per_microbatch": 2}},
    "4-ranks-pipeline-of-tensor": {
        "layout": {"pipeline": 2, "tensor": 2},
        "pipeline": {"schedule": "1f1b"},
        "batch": {"grains_per_microbatch": 2},
    },
}
EACH = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[needs_zero23()] if n[8:] in ("ZeRO-2", "ZeRO-3") else []) for n in PLANS]
)


def ended(command: str, out: Path, sections: Sections, *words: str) -> Counter[str]:
    """How often words are in what a command of shoal prints that ends well."""
    out.parent.mkdir(exist_ok=True)
    plan = out.with_suffix(".toml")
    plan.write_text(plan_text(Plan().with_sections(**sections)))
    line = [sys.executable, "-m", "shoal", command, *JOB, "--plan", str(plan), "--out", str(out), *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Counter({"replayed": (done.stdout + done.stderr).count("steps are replayed from step")})


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "records.jsonl").read_text().splitlines()]


@NEEDS_GPU
@EACH
def test_ranks_that_share_one_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)
    ended("verify", tmp_path / "out", PLANS[name], "--share-gpu", "--steps", "2")
    assert json.loads((tmp_path / "out/certificate.json").read_text())["verdict"] == "verified"


@EACH
def test_ranks_with_a_gpu_each(name: str, tmp_path: Path) -> None:
    if int(name[0]) > NUM_GPUS:
        pytest.skip(f"{name[0]} GPUs are needed, and torch sees {NUM_GPUS}")
    ended("verify", tmp_path / "out", PLANS[name], "--steps", "2")
    assert json.loads((tmp_path / "out/certificate.json").read_text())["verdict"] == "verified"


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"2 GPUs are needed, and torch sees {NUM_GPUS}")
@pytest.mark.parametrize("name", ["2-ranks-data", "2-ranks-ZeRO-1"])
def test_a_captured_step_with_nccl_in_the_graph(name: str, tmp_path: Path) -> None:
    captured = PLANS[name] | {"execution": {"cuda_graph": True}}
    assert ended("run", tmp_path / "captured", captured, "--steps", "20")["replayed"] == 1
    ended("run", tmp_path / "queued", PLANS[name], "--steps", "20")
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "queued"), rel=1e-3)


@NEEDS_GPU
def test_an_nccl_group_of_one_is_captured_replayed_and_destroyed(tmp_path: Path) -> None:
    """In a process of its own: a teardown that hangs ends at the time limit."""
    line = [sys.executable, "-m", "benchmarks.gpu_parts", "nccl group of one", str(tmp_path / "found.json")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(found["satisfied"].values()), found
