"""Claim: a fast-mode step of shoal takes no longer than one of a plain DDP loop. See results/step_time.json.

Repeat with `python -m benchmarks.step_time [--repeats 5]`: two processes of one thread each, LeNet on Fashion-MNIST at
global batch 256 and the 3.3 M-parameter GPT at 32 x 128 bytes; shoal with and without telemetry and the plain loop of
plain_ddp.py take turns in one run. The figure of a trial is the median of its steps after the first tenth; a ratio is
taken between neighbours in time, and the median of the ratios is reported with their spread.
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
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
JOBS = {"lenet": ("examples/fashion_mnist.py", 150), "gpt": ("examples/gpt.py", 24)}


def steady(seconds: list[float]) -> float:
    """The median after the first tenth of the steps, in which caches and allocators warm up."""
    return statistics.median(seconds[max(2, len(seconds) // 10) :])


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plain(job: str, steps: int) -> float:
    """Seconds a step of the plain DDP loop on two processes of one thread."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.plain_ddp", "--job", job, "--steps", str(steps)]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables, "RANK": str(r)}, stdout=subprocess.PIPE)
        for r in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"the plain loop failed: {[rank.returncode for rank in ranks]}")
    return steady(json.loads(outputs[0].splitlines()[-1]))


def shoal(job: str, steps: int, *extra: str) -> float:
    """Seconds a step of `shoal run` on two processes of one thread, as result.json has the median."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shoal", "run", JOBS[job][0], "--devices", "2", "--steps", str(steps)]
        samples = ["--set", "eval_samples=256"] if job == "lenet" else []
        subprocess.run(
            [*command, *samples, "--out", f"{folder}/run", *extra],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return float(json.loads(Path(folder, "run", "result.json").read_text())["step_seconds"]["median"])


def compare(job: str, steps: int, repeats: int) -> dict[str, object]:
    """Trials of all three in turns, each turn in another order."""
    kinds: dict[str, Callable[[], float]] = {
        "plain_ddp": lambda: plain(job, steps),
        "shoal": lambda: shoal(job, steps),
        "shoal_no_telemetry": lambda: shoal(job, steps, "--no-telemetry"),
    }
    trials: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(repeats):
        names = list(kinds)
        for name in names[repeat % 3 :] + names[: repeat % 3]:
            trials[name].append(kinds[name]())
        print(job, {name: round(times[-1] * 1000, 2) for name, times in trials.items()}, "ms", flush=True)
    ratios = {
        "shoal / plain_ddp": [a / b for a, b in zip(trials["shoal"], trials["plain_ddp"], strict=True)],
        "telemetry on / off": [a / b for a, b in zip(trials["shoal"], trials["shoal_no_telemetry"], strict=True)],
    }
    return {
        "steps": steps,
        "step_milliseconds": {name: [round(t * 1000, 3) for t in times] for name, times in trials.items()},
        **{
            name: {"median": round(statistics.median(r), 4), "min": round(min(r), 4), "max": round(max(r), 4)}
            for name, r in ratios.items()
        },
    }


def main() -> None:
    """Runs the comparison, prints it, and writes it where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {job: compare(job, JOBS[job][1], options.repeats) for job in options.jobs}
    record = {
        "hardware": f"{os.cpu_count()} cores, CPU",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "repeats": options.repeats,
        "results": found,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
