"""Claim: none by itself. What a step of nine small jobs took on 1 and 2 processes, for a planner to meet.

`python -m benchmarks.small_steps` runs `shoal run benchmarks/small_jobs.py:JOB --devices N` for each job and number of
processes, in several trials in turn, and writes one row each to results/small_steps.csv: least, lower quartile, median
and ninth decile of the seconds of a step (the first ones of each trial left out), the median of each span on rank 0,
and the peak of a rank's resident memory. `others` is the share of the cores that other programs used meanwhile: rows
of a machine that is not idle say little. Measure the machine itself with `shoal bench` in the same hour.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shoal.bench.command import busy_seconds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "small_steps.csv"
WARM_UP = 3
# Name: the job with its settings, and the steps of a trial.
JOBS: dict[str, tuple[list[str], int]] = {
    "mlp-tiny": (["mlp", "width=64", "batch=64"], 120),
    "lenet-64": (["lenet", "batch=64"], 80),
    "lenet-256": (["lenet", "batch=256"], 50),
    "mlp-1024": (["mlp", "width=1024", "batch=256"], 50),
    "mlp-2048": (["mlp", "width=2048", "batch=1024"], 15),
    "gpt-small": (["gpt", "layers=2", "width=128", "batch=16", "block=64"], 40),
    "gpt": (["gpt"], 15),
    "resnet18-16": (["resnet18", "batch=16"], 14),
    "resnet18-64": (["resnet18", "batch=64"], 9),
}


def trial(name: str, devices: int) -> tuple[list[dict[str, object]], float]:
    """The step records of one run, without the first, and the share of the cores that others used meanwhile."""
    (job, *settings), steps = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "shoal", "run", f"benchmarks/small_jobs.py:{job}", "--devices", str(devices)]
        command += ["--steps", str(steps), "--out", str(out)]
        command += [text for setting in settings for text in ("--set", setting)]
        variables = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        busy, own, began = busy_seconds(), _children(), time.monotonic()
        subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.DEVNULL)
        used = busy_seconds() - busy - (_children() - own)
        others = used / (time.monotonic() - began) / (os.cpu_count() or 1)
        lines = (out / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][WARM_UP:], max(0.0, others)


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def summarised(name: str, devices: int, trials: list[tuple[list[dict[str, object]], float]]) -> dict[str, object]:
    """A row of the table."""
    records = [record for found, _ in trials for record in found]
    seconds = sorted(float(str(record["seconds"])) for record in records)
    spans = [record["spans"] for record in records]
    assert all(isinstance(span, dict) for span in spans)
    row: dict[str, object] = {"job": name, "settings": " ".join(JOBS[name][0]), "devices": devices}
    row |= {"trials": len(trials), "steps": len(seconds), "least_s": round(seconds[0], 6)}
    row |= {"quartile_s": round(seconds[len(seconds) // 4], 6), "median_s": round(statistics.median(seconds), 6)}
    row |= {"p90_s": round(seconds[int(0.9 * (len(seconds) - 1))], 6)}
    for span in spans[0]:  # type: ignore[attr-defined]
        row[f"{span}_s"] = round(statistics.median(s[span] for s in spans), 6)  # type: ignore[index]
    row["memory_bytes"] = max(int(str(record["memory_bytes"])) for record in records)
    row["others"] = round(statistics.mean(share for _, share in trials), 2)
    return row


def main() -> None:
    """Measures what is asked for, prints each row and writes the table; rows of other jobs stay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: dict[tuple[str, str], dict[str, object]] = {}
    if options.out.exists():
        with options.out.open(newline="", encoding="utf-8") as file:
            rows = {(row["job"], row["devices"]): dict(row) for row in csv.DictReader(file)}
    for name in options.jobs:
        turns = [(devices, trial(name, devices)) for _ in range(options.trials) for devices in (1, 2)]
        for devices in (1, 2):
            row = summarised(name, devices, [found for count, found in turns if count == devices])
            print(row, flush=True)
            rows[name, str(devices)] = row
        ordered = [rows[key] for key in sorted(rows, key=lambda key: (list(JOBS).index(key[0]), key[1]))]
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(ordered[0]))
            writer.writeheader()
            writer.writerows(ordered)


if __name__ == "__main__":
    main()
