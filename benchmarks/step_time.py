"""Claim: a fast-mode step of shoal takes 1.02 times one of a plain DDP loop (aim: 1.00). See results/step_time.json.

Repeat with `python -m benchmarks.step_time [--repeats 5]`: two processes of one thread each, LeNet on Fashion-MNIST at
global batch 256 and the 3.3 M-parameter GPT at 32 x 128 bytes. In each trial shoal with telemetry, without it and the
plain loop (DDP with gradient_as_bucket_view, DistributedSampler, DataLoader) take turns in the same two processes, see
step_time_rank.py; a trial's figure is the median of its steps, a ratio is within a trial, and the median of the trials'
ratios is reported with their spread.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RATIOS = {"shoal / plain_ddp": ("shoal", "plain_ddp"), "telemetry on / off": ("shoal", "shoal_no_telemetry")}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def trial(job: str) -> dict[str, float]:
    """Seconds a step of each kind, measured by turns on two processes of one thread."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.step_time_rank", "--job", job]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables, "RANK": str(r)}, stdout=subprocess.PIPE)
        for r in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: {[rank.returncode for rank in ranks]}")
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    """Runs the trials, prints them, and writes them where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", nargs="+", default=["lenet", "gpt"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {}
    for job in options.jobs:
        trials = []
        for _ in range(options.repeats):
            trials.append(trial(job))
            print(job, {name: f"{value * 1000:.2f} ms" for name, value in trials[-1].items()}, flush=True)
        ratios = {name: sorted(t[a] / t[b] for t in trials) for name, (a, b) in RATIOS.items()}
        results[job] = {
            "step_milliseconds": {name: [round(t[name] * 1000, 3) for t in trials] for name in trials[0]},
            **{
                name: {"median": round(statistics.median(r), 4), "min": round(r[0], 4), "max": round(r[-1], 4)}
                for name, r in ratios.items()
            },
        }
    hardware = f"{os.cpu_count()} CPU cores, 2 processes of one thread"
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    text = json.dumps({"hardware": hardware, **versions, "trials": options.repeats, "results": results}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
