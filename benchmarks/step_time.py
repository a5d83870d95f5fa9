"""Claim: a fast-mode step takes 0.87 (LeNet) and 0.98 (GPT) times one of a plain DDP loop, telemetry 0.15 ms of it.

2 CPU cores, torch 2.13.0, 4 trials of 4 rows; quartiles 0.85 to 0.89 and 0.97 to 1.00, see results/step_time.json.
Most of LeNet's difference is page faults, which a plain loop has unless glibc is told to keep freed memory, as shoal
tells it (docs/decisions/0007-the-process.md): against a plain loop that is told the same it is 1.02 and 0.99.

Repeat with `python -m benchmarks.step_time`: LeNet on Fashion-MNIST at global batch 256 and the 3.3 M-parameter GPT at
32 x 128 bytes, two processes of one thread each. Two ranks of shoal, two of a plain loop (DDP with
gradient_as_bucket_view, DistributedSampler, DataLoader) and two of the same loop under glibc settings like shoal's live
side by side and take turns, a few steps each, while the others wait for a line on their standard input: see
step_time_rank.py. A row is one segment of each kind; its figure for a kind is the median step, a ratio is taken within
a row, and the median of the rows' ratios is reported with their quartiles. Every trial starts new processes, since a
process keeps for its life how its allocator behaves. What telemetry does in a step is also timed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.small_jobs import machine
from shoal.distributed.mesh import Report, from_rows, measures, to_row
from shoal.runs.records import SPANS, StepRecord
from shoal.training.observe.step_records import RecordWriter
from shoal.training.observer import StepClock, peak_memory_bytes

ROOT = Path(__file__).resolve().parents[1]
RATIOS = {
    "shoal / plain_ddp": ("shoal", "plain_ddp"),
    "shoal / plain_ddp_keeping_memory": ("shoal", "plain_ddp_keeping_memory"),
    "telemetry on / off": ("shoal", "shoal_no_telemetry"),
}
# Who is asked for each kind.
TEAMS = {
    "shoal": "shoal",
    "plain_ddp": "plain",
    "shoal_no_telemetry": "shoal",
    "plain_ddp_keeping_memory": "keeping",
}
# What shoal tells glibc, see docs/decisions/0007-the-process.md; a plain loop can be told so from outside.
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
# What each team trains with.
TOOLS = {"shoal": "shoal", "plain": "plain", "keeping": "plain"}
# Steps of a segment.
STEPS = {"lenet": 20, "gpt": 6}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Team:
    """Two ranks that train when asked to."""

    def __init__(self, team: str, job: str) -> None:
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            **(KEEPING if team == "keeping" else {}),
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.step_time_rank", "--job", job, "--team", TOOLS[team]],
                cwd=ROOT,
                env={**os.environ, **variables, "RANK": str(r)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(2)
        ]

    def train(self, kind: str, num_steps: int) -> list[float]:
        """Seconds of each of so many steps on rank 0; the ranks are idle again when it returns."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{kind} {num_steps}\n")
            rank.stdin.flush()
        told = [rank.stdout.readline() if rank.stdout else "" for rank in self.ranks]
        if not all(told):
            raise SystemExit(f"a rank failed: {[rank.poll() for rank in self.ranks]}")
        found: list[float] = json.loads(told[0])
        return found

    def dismiss(self) -> None:
        """Ends the ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def measure(job: str, num_rows: int) -> list[dict[str, float]]:
    """The median seconds of a step of each kind, in each row."""
    teams = {name: Team(name, job) for name in TOOLS}
    rows = []
    try:
        for row in range(num_rows + 1):
            first = row % len(TEAMS)  # nobody always comes first
            kinds = list(TEAMS)[first:] + list(TEAMS)[:first]
            times = {kind: teams[TEAMS[kind]].train(kind, STEPS[job]) for kind in kinds}
            if row:  # the first meets cold caches
                # A segment's first step meets the caches that the others left.
                rows.append({kind: statistics.median(seconds[1:]) for kind, seconds in times.items()})
                print(job, {kind: f"{value * 1000:.2f} ms" for kind, value in rows[-1].items()}, flush=True)
    finally:
        for team in teams.values():
            team.dismiss()
    return rows


def telemetry_seconds() -> float:
    """What telemetry does in a step of one microbatch, by itself: marks, memory, measures, one record written."""
    clock, count = StepClock(torch.device("cpu")), 2000
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(Path(folder) / "records.jsonl")
        began = time.perf_counter()
        for step in range(count):
            clock.begin()
            for span in (*SPANS, "data_wait", "optimizer"):
                clock.mark(span)
            seconds, spans = clock.end()
            memory = peak_memory_bytes(torch.device("cpu"))
            row = to_row(Report(measures=measures(spans, seconds, memory)))
            ranks = from_rows(np.array([row, row])).spreads
            numbers = {"loss": 1.0, "weight": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "loss_scale": None}
            counts = {"step": step, "epoch": 0, "samples": 256, "num_samples": 256, "memory_bytes": memory}
            writer.write(StepRecord(**counts, **numbers, seconds=seconds, spans=spans, ranks=ranks, digest="0" * 64))
        total = time.perf_counter() - began
        writer.close()
    return total / count


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--jobs", nargs="+", default=list(STEPS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {}
    for job in options.jobs:
        rows = [row for _ in range(options.trials) for row in measure(job, options.rows)]
        found: dict[str, object] = {
            "step_milliseconds": {kind: [round(row[kind] * 1000, 3) for row in rows] for kind in TEAMS}
        }
        for name, (a, b) in RATIOS.items():
            low, median, high = statistics.quantiles([row[a] / row[b] for row in rows], n=4)
            found[name] = {"median": round(median, 4), "quartiles": [round(low, 4), round(high, 4)]}
        results[job] = found
    results["telemetry_microseconds_a_step"] = round(telemetry_seconds() * 1e6, 1)
    about = {**machine(), "processes": 2, "threads": 1, "trials": options.trials, "rows": options.rows}
    text = json.dumps({**about, "results": results}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
