"""Claim: on ranks of unequal speed, `--shares by-speed` brings a step near to that of ideal shares, with equal weights.

2 CPU cores, torch 2.13.0; the table is benchmarks/results/unequal.md.

Repeat with `python -m benchmarks.unequal`. A perceptron trains in exact mode. A helper process stops a slow rank for a
part of each 20 ms (SIGSTOP, SIGCONT), so that the rank has that part less of a core. The ideal step is the sum of all
ranks' speeds over the time of the fastest rank for all grains, as equal shares measure it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

RESULTS = Path(__file__).parent / "results"
PERIOD_SECONDS, STEPS, SLOWED_AFTER = 0.02, 120, 30


def throttle(pid: int, speed: float) -> None:
    """Let a process run for a share `speed` of each period, as long as it lives."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PERIOD_SECONDS * (1 - speed))
            os.kill(pid, signal.SIGCONT)
            time.sleep(PERIOD_SECONDS * speed)
    except ProcessLookupError:
        return


class Slow(shoal.Callback):
    """Slows ranks down after a step, each to its speed."""

    def __init__(self, speeds: str, after: int) -> None:
        self.speeds, self.after = tuple(map(float, speeds.split("_"))), after

    def on_step(self, run: Any, record: Any) -> None:
        speed = self.speeds[run.rank] if run.rank < len(self.speeds) else 1.0
        if record.step == self.after and speed < 1.0:
            command = [sys.executable, __file__, str(os.getpid()), str(speed)]
            subprocess.Popen(command, start_new_session=True)  # ends with the rank


def job(grains: int = 24, speeds: str = "1.0", after: int = 1, width: int = 1024) -> shoal.Job:
    """`speeds`: of the ranks, in parts of a core, from step `after` on."""
    values = torch.Generator().manual_seed(0)
    inputs = torch.randn(4800, 64, generator=values)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    return shoal.Job(
        model=model,
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        train_data=TensorDataset(inputs, inputs[:, :4].argmax(1)),
        global_batch=192,
        grains=grains,
        length=shoal.Steps(STEPS),
        callbacks=[Slow(speeds, after)],
    )


def ran(shares: str, speeds: str, *, grains: int = 24, after: int = 1) -> dict[str, Any]:
    """Median step at the end of a run, its weights, and when its shares changed."""
    ranks = speeds.count("_") + 1
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"grains={grains}", f"speeds={speeds}", f"after={after}")
        command = [sys.executable, "-m", "shoal", "run", f"{__file__}:job", "--devices", str(ranks), "--exact"]
        command += [text for setting in settings for text in ("--set", setting)]
        command += ["--shares", shares, "--out", f"{folder}/run", "--no-source"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(done.stderr)
        out = Path(folder) / "run"
        records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
        events = out / "events.jsonl"
        lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        changes = [(one["step"], one["after"]) for one in lines if one["kind"] == "rebalanced"]
        result = json.loads((out / "result.json").read_text())
    seconds = statistics.median(one["seconds"] for one in records if one["step"] > STEPS * 2 // 3)
    busy = [one["ranks"]["busy_seconds"] for one in records if one["step"] > STEPS * 2 // 3]
    fastest = statistics.median(one["min"] for one in busy)
    found = {"shares": shares, "speeds": speeds, "grains": grains, "slow_after": after, "step_seconds": seconds}
    return {**found, "fastest_seconds": fastest, "changes": changes, "weights": result["weights_sha256"]}


def main() -> None:
    """Measure in turns, and write the records."""
    found = []
    for turn in range(3):
        for speeds in ("1.0_0.5", "1.0_0.5_0.25"):
            for shares in ("equal", "by-speed"):
                found.append({"turn": turn, **ran(shares, speeds)})
                print(json.dumps(found[-1]), flush=True)
    found.append({"turn": 0, **ran("by-speed", "1.0_0.5", grains=8)})
    found.append({"turn": 0, **ran("by-speed", "1.0_0.5", after=SLOWED_AFTER)})
    found.append({"turn": 0, **ran("equal", "1.0")})
    (RESULTS / "unequal.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        throttle(int(sys.argv[1]), float(sys.argv[2]))
    else:
        main()
