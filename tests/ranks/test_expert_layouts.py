"""The expert axis: ranks that hold some experts of each mixture train the run of one process, in products of axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.jobs import experts
from tests.launching import JOBS, Run, run
from tests.usual import parametrize

import shoal
from shoal.runs.records import last_records
from shoal.training.setup.preflight import judged
from shoal.verification.forked import trace_forked
from shoal.verification.judge import judge_traces

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'experts.py'}:job"
# By name: the model, and the sections of the plan. Step 4 has two samples, so that some ranks have none.
LAYOUTS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "data 2, expert 2": ("stacked", {"layout": {"data": 2, "expert": 2}}),
    "data 4, expert 2": ("stacked", {"layout": {"data": 4, "expert": 2}}),
    "data 4, expert 4": ("listed", {"layout": {"data": 4, "expert": 4}}),
    "data 3, expert 3": ("three", {"layout": {"data": 3, "expert": 3}}),
    "ZeRO-1, expert 2": ("listed", {"layout": {"shard": 2, "expert": 2}, "shard": {"level": "optimizer"}}),
    "ZeRO-2 x 2, expert 4": (
        "stacked",
        {"layout": {"data": 2, "shard": 2, "expert": 4}, "shard": {"level": "gradients"}},
    ),
    "ZeRO-3 x 2, expert 2": ("listed", {"layout": {"data": 2, "shard": 2, "expert": 2}}),
    "tensor 2, expert 2": ("listed", {"layout": {"tensor": 2, "expert": 2}}),
    "tensor 2 x data 2, expert 4": ("stacked", {"layout": {"tensor": 2, "data": 2, "expert": 4}}),
    "pipeline 2 x data 2, expert 2": (
        "stacked",
        {"layout": {"pipeline": 2, "data": 2, "expert": 2}, "batch": {"grains_per_microbatch": 1}},
    ),
    "zero bubble x ZeRO-3, expert 2": (
        "stacked",
        {
            "layout": {"pipeline": 2, "shard": 2, "expert": 2},
            "batch": {"grains_per_microbatch": 1},
            "pipeline": {"schedule": "zero_bubble"},
        },
    ),
    "context 2, expert 2": ("stacked", {"layout": {"context": 2, "expert": 2}}),
    "context 2, listed, expert 2": ("listed", {"layout": {"context": 2, "expert": 2}}),
    "context 2 x data 2, listed, expert 4": ("listed", {"layout": {"context": 2, "data": 2, "expert": 4}}),
    "Mixtral, bf16": ("mixtral", {"layout": {"data": 2, "expert": 2}, "precision": {"compute": "bfloat16"}}),
    "balanced, data 2, expert 2": ("routed", {"layout": {"data": 2, "expert": 2}}),
    "balanced, data 4, expert 2, twice": (
        "routed, listed",
        {"layout": {"data": 4, "expert": 2}, "batch": {"grains_per_microbatch": 1}},
    ),
    "balanced, data 3, expert 3, a block unused": (
        "unused",
        {"layout": {"data": 3, "expert": 3, "shares": [2, 1, 1]}, "batch": {"grains_per_microbatch": 1}},
    ),
    "balanced routers, context 2 x data 2, expert 2": ("biased", {"layout": {"context": 2, "data": 2, "expert": 2}}),
    "ZeRO-1 of copies, expert 2": (
        "stacked",
        {"layout": {"data": 2, "shard": 2, "expert": 2}, "shard": {"level": "optimizer"}},
    ),
    "context 2, listed": ("listed", {"layout": {"context": 2}}),
    "balanced, ZeRO-3 x 2, expert 2, recomputed": (
        "routed",
        {"layout": {"data": 2, "shard": 2, "expert": 2}, "memory": {"recompute": "full"}},
    ),
    "balanced, Mixtral": ("mixtral, router logits", {"layout": {"data": 2, "expert": 2}}),
    "exact": ("routed", {"layout": {"data": 4, "expert": 2}, "execution": {"exact": True}}),
    "recomputed": ("stacked", {"layout": {"data": 2, "expert": 2}, "memory": {"recompute": "full"}}),
}


USUAL = ["ZeRO-3 x 2, expert 2", "context 2, listed, expert 2"]
USUAL += ["balanced, data 2, expert 2"]


@parametrize("name", LAYOUTS, usual=USUAL)
def test_verified(name: str, tmp_path: Path) -> None:
    model, sections = LAYOUTS[name]
    job = experts.job(model)
    plan = judged(job, shoal.Plan().with_sections(**sections)).plan
    trace_forked(lambda: job, plan, tmp_path, 4)
    verdict = judge_traces(job, plan, tmp_path)
    assert verdict.verified, verdict.render()
    names = {check.name for check in verdict.checks if check.phase == "reduction"}
    assert any("experts" in name for name in names), names


def test_resumed_under_other_degrees_and_exported(tmp_path: Path) -> None:
    out, alone = tmp_path / "run", tmp_path / "alone"
    run(Run(JOB, out, None, arguments=("--layout", "data=4,expert=4", "--steps", "2"))).expect(0)
    first = last_records(out / "records.jsonl")[0].expert_imbalance
    assert first is not None
    plan = tmp_path / "plan.toml"
    plan.write_text('[layout]\nshard = 4\nexpert = 2\n[shard]\nlevel = "optimizer"\n', encoding="utf-8")
    run(Run(JOB, out, None, arguments=("--plan", str(plan), "--resume", "--steps", "4"))).expect(0)
    states = (file for rank in (2, 3) for file in out.glob(f"checkpoints/step-*4/optimizer-0000{rank}-*"))
    assert any("experts" in name for file in states for name in load_file(file))  # ranks 0 and 1 have the same experts
    run(Run(JOB, out, 1, arguments=("--resume", "--steps", "5"))).expect(0)
    run(Run(JOB, alone, 1, arguments=("--steps", "5"))).expect(0)
    found, wanted = (
        load_file(sorted((o / "checkpoints").glob("step-*"))[-1] / "model.safetensors") for o in (out, alone)
    )
    assert found.keys() == wanted.keys()
    assert found["blocks.0.mixture.experts.up"].shape == (4, 64, 32)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], atol=1e-5, rtol=1e-4)
