"""Claim: none yet: no GPU was there. On CPU processes (`--dry`) every layout trains, which shows that its plan is good.

Repeat with `python -m benchmarks.gpu_layouts` on a machine with two GPUs or more: each layout that so many GPUs allow
trains a small GPT through `shoal run`, one after the other, within a time limit of its own. The first loss of each
stands beside that of one GPU, and its step's median seconds. A layout that fails or is late leaves the others alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.plans.plan import LayoutSection, Plan, ShardSection, plan_text

ROOT = Path(__file__).resolve().parents[1]
AXES = ("data", "shard", "tensor", "pipeline", "context")
LEVELS = ("optimizer", "gradients", "parameters")
SMALL = ("batch=16", "layers=4", "width=256", "block=128", "dropout=0.0")
TINY = ("batch=8", "layers=2", "width=32", "block=16", "dropout=0.0")


def layouts(num_devices: int) -> Iterator[tuple[str, Plan]]:
    """One device; each axis on all of them; and each pair of axes, where they can be two and the rest."""
    yield "one", Plan()
    degrees = [{axis: num_devices} for axis in AXES] if num_devices > 1 else []
    if num_devices > 2 and num_devices % 2 == 0:
        pairs = ((a, b) for a in AXES for b in AXES if a < b)
        degrees += [{a: num_devices // 2, b: 2} for a, b in pairs]
    for found in degrees:
        name = " x ".join(f"{axis} {degree}" for axis, degree in found.items())
        for level in LEVELS if "shard" in found else LEVELS[:1]:
            plan = Plan(layout=LayoutSection(**found), shard=ShardSection(level=level))
            yield (f"{name}, {level}" if "shard" in found else name), plan


def trained(plan: Plan, settings: tuple[str, ...], steps: int, limit: float, dry: bool) -> dict[str, Any]:
    """What came of a run: its status, first and last loss, and the median step."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "plan.toml", Path(folder) / "run"
        path.write_text(plan_text(plan))
        chosen = [word for setting in settings for word in ("--set", setting)]
        run = ["run", "examples/gpt.py", *chosen, "--plan", str(path), "--steps", str(steps), "--out", str(out)]
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if dry else dict(os.environ)
        command = [sys.executable, "-m", "shoal", *run]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"status": "late"}
        if done.returncode:
            return {"status": "refused" if done.returncode == 2 else "failed", "said": done.stderr[-500:]}
        records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    seconds = statistics.median(record["seconds"] for record in records[len(records) // 2 :])
    losses = records[0]["loss"], records[-1]["loss"]
    return {"status": "done", "first_loss": losses[0], "last_loss": losses[1], "step_seconds": seconds}


def main() -> int:
    """Trains each layout; 1 where one has failed or was late. A layout that is refused in words is none that fails."""
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, help="how many (default: all GPUs; dry: 2)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="the limit of a layout (default: 40; dry: 160)")
    parser.add_argument("--dry", action="store_true", help="two steps on CPU processes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    limit = options.seconds or (160.0 if options.dry else 40.0)
    count = options.devices or (2 if options.dry else max(1, torch.cuda.device_count()))
    steps, settings = (2, TINY) if options.dry else (options.steps, SMALL)
    found: dict[str, Any] = {}
    for name, plan in layouts(count):
        found[name] = trained(plan, settings, steps, limit, options.dry)
        first, one = found[name].get("first_loss"), found["one"].get("first_loss")
        if first is not None and one is not None:
            found[name]["first_loss_over_one"] = first / one - 1 if math.isfinite(first) else None
        print(name, json.dumps(found[name]), flush=True)
        if options.out:
            options.out.write_text(
                json.dumps({"devices": count, "dry": options.dry, "layouts": found}, indent=2) + "\n"
            )
    return int(any(one["status"] in ("failed", "late") for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
