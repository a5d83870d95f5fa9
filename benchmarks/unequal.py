"""Claim: with a rank at half a core, shares by speed take a quarter to a third less time a step than equal shares.

2 CPU cores, torch 2.13.0; the table is benchmarks/results/unequal.md.

Repeat with `python -m benchmarks.unequal`. `--predicted` writes predicted steps beside measured ones
(benchmarks/results/unequal_predicted.md) and needs two idle cores. `--quiet-steps 2000` counts re-balancings of equal
ranks. A perceptron trains in exact mode. A helper process stops a slow rank for a part of each 20 ms (SIGSTOP,
SIGCONT), so that the rank has that part less of a core. The runs take turns.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.hardware import cluster
from shoal.hardware.catalogue import joined
from shoal.hardware.values import Cluster, Device
from shoal.planner.answer.answer import question
from shoal.planner.predict.mixed import MixedPredictor
from shoal.plans.plan import Plan

RESULTS = Path(__file__).parent / "results"
PERIOD_SECONDS, STEPS, SLOWED_AFTER = 0.02, 120, 30
SHORT_SECONDS = 0.004  # of a period beside predictions: for a rank that is stopped for long, messages wait too


def throttle(pid: int, speed: float, period: float) -> None:
    """Let a process run for a share `speed` of each period in seconds, as long as it lives."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(period * (1 - speed))
            os.kill(pid, signal.SIGCONT)
            time.sleep(period * speed)
    except ProcessLookupError:
        return


class Slow(shoal.Callback):
    """Slows ranks down after a step, each to its speed."""

    def __init__(self, speeds: str, after: int, period: float) -> None:
        self.speeds, self.after, self.period = tuple(map(float, speeds.split("_"))), after, period

    def on_step(self, run: Any, record: Any) -> None:
        speed = self.speeds[run.rank] if run.rank < len(self.speeds) else 1.0
        if record.step == self.after and speed < 1.0:
            command = [sys.executable, __file__, str(os.getpid()), str(speed), str(self.period)]
            subprocess.Popen(command, start_new_session=True)  # ends with the rank


def job(
    grains: int = 24,
    speeds: str = "1.0",
    after: int = 1,
    width: int = 1024,
    steps: int = STEPS,
    period: float = PERIOD_SECONDS,
) -> shoal.Job:
    """`speeds`: of the ranks, in parts of a core, from step `after` on. `period`: seconds from stop to stop."""
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
        length=shoal.Steps(steps),
        callbacks=[Slow(speeds, after, period)],
    )


def ran(
    shares: str,
    speeds: str,
    *,
    grains: int = 24,
    after: int = 1,
    steps: int = STEPS,
    period: float = PERIOD_SECONDS,
) -> dict[str, Any]:
    """Median step at the end of a run, its weights, and when its shares changed."""
    ranks = speeds.count("_") + 1
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"grains={grains}", f"speeds={speeds}", f"after={after}", f"steps={steps}", f"period={period}")
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


def page(found: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    weights = {one["weights"] for one in found}
    lines = [
        "# Shares of grains on ranks of unequal speed",
        "",
        f"Generated by `python -m benchmarks.unequal`; numbers in unequal.json. {STEPS} steps of a perceptron in exact "
        f"mode, 2 CPU cores, torch {torch.__version__}. A rank of speed 0.5 is stopped for half of each "
        f"{1e3 * PERIOD_SECONDS:.0f} ms. A step is the median of the last third of a run, in the order of the turns.",
        "",
        "| speeds of the ranks | grains | shares | step in ms | changes: after step, grains of the ranks |",
        "|---|---:|---|---|---|",
    ]
    kinds = dict.fromkeys((one["speeds"], one["grains"], one["shares"], one["slow_after"]) for one in found)
    for speeds, grains, shares, after in kinds:
        key = {"speeds": speeds, "grains": grains, "shares": shares, "slow_after": after}
        own = [one for one in found if all(one[name] == value for name, value in key.items())]
        steps = ", ".join(f"{1e3 * one['step_seconds']:.1f}" for one in own)
        changes = "; ".join(f"{step}: {':'.join(map(str, sizes))}" for step, sizes in own[0]["changes"])
        said = f", slow after step {after}" if after > 1 else ""
        lines.append(f"| {speeds.replace('_', ', ')}{said} | {grains} | {shares} | {steps} | {changes} |")
    same = "All runs of 24 grains end with the same weights." if len(weights) == 2 else f"{len(weights)} weights."
    return "\n".join([*lines, "", same]) + "\n"


def predicted(shares: str, speeds: str, *, grains: int = 24) -> float:
    """Seconds of a step that the planner predicts for ranks with these parts of a core, on one host."""
    here = cluster("here")
    core = here.device_for(here.devices_per_host)

    def slowed(speed: float) -> Device:
        return replace(
            core,
            flops={dtype: speed * value for dtype, value in core.flops.items()},
            memory_bytes_per_second=speed * core.memory_bytes_per_second,
            step_seconds=core.step_seconds / speed,
            tensor_seconds=core.tensor_seconds / speed,
        )

    numbers = [float(speed) for speed in speeds.split("_")]
    kinds = [Cluster(f"{place}: {speed}", slowed(speed)) for place, speed in enumerate(numbers)]
    base = Plan().with_sections(execution={"exact": True}, batch={"grains_per_microbatch": 1})
    of_ranks = [] if shares == "equal" else [int(one) for one in shares.split(",")]
    plan = base.with_sections(layout={"data": len(numbers), "shares": of_ranks})
    case = question(job(grains), base, "here", None).case
    return MixedPredictor(case.work, joined(kinds, speeds, here.within), case.own_program).predict(plan).step_seconds


def compare() -> None:
    """Measure steps beside predictions, which one run on equal ranks corrects by one factor."""
    rows, settings = [], (("equal", "1.0_0.5"), ("2,1", "1.0_0.5"), ("3,1", "1.0_0.33"), ("4,2,1", "1.0_0.5_0.25"))
    equal = [ran("equal", "1.0_1.0")["step_seconds"]]
    for shares, speeds in settings:
        measured = ran(shares, speeds, period=SHORT_SECONDS)["step_seconds"]
        rows.append({"shares": shares, "speeds": speeds, "measured": measured})
        equal.append(ran("equal", "1.0_1.0")["step_seconds"])
    factor = statistics.median(equal) / predicted("equal", "1.0_1.0")
    for row in rows:
        row["predicted"] = factor * predicted(row["shares"], row["speeds"])
    found = {"equal_seconds": equal, "factor": factor, "rows": rows}
    (RESULTS / "unequal_predicted.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [
        "# Predicted steps of unequal ranks",
        "",
        f"Generated by `python -m benchmarks.unequal --predicted`; numbers in unequal_predicted.json. 2 CPU cores, "
        f"torch {torch.__version__}. Predictions are multiplied by {factor:.2f}, the factor of equal ranks at full "
        f"speed. Their step took {', '.join(f'{1e3 * one:.1f}' for one in equal)} ms in turns with the others. A "
        f"rank of speed 0.5 is stopped for half of each {1e3 * SHORT_SECONDS:.0f} ms. Three ranks share the two cores.",
        "",
        "| speeds of the ranks | shares | predicted in ms | measured in ms | difference |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        ahead, behind = row["predicted"], row["measured"]
        lines.append(
            f"| {row['speeds'].replace('_', ', ')} | {row['shares']} | {1e3 * ahead:.1f} | {1e3 * behind:.1f} | "
            f"{ahead / behind - 1:+.0%} |"
        )
    (RESULTS / "unequal_predicted.md").write_text("\n".join(lines) + "\n")


def count_changes(steps: int) -> None:
    """Print the re-balancings of equal ranks in a run of `steps` steps."""
    found = ran("by-speed", "1.0_1.0", after=steps + 1, steps=steps)
    print(f"{steps} steps of equal ranks: {len(found['changes'])} re-balancings {found['changes']}")


def main() -> None:
    """Measure in turns, and write the records."""
    found = []
    for _ in range(2):
        for shares in ("equal", "by-speed", "2,1"):
            found.append(ran(shares, "1.0_0.5"))
        for shares in ("equal", "by-speed"):
            found.append(ran(shares, "1.0_0.5_0.25"))
    found.append(ran("by-speed", "1.0_0.5", grains=8))
    found.append(ran("by-speed", "1.0_0.5", after=SLOWED_AFTER))
    found.append(ran("equal", "1.0"))
    (RESULTS / "unequal.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "unequal.md").write_text(page(found))


if __name__ == "__main__":
    if sys.argv[1:] == ["--predicted"]:
        compare()
    elif sys.argv[1:2] == ["--quiet-steps"]:
        count_changes(int(sys.argv[2]))
    elif len(sys.argv) == 4:
        throttle(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
