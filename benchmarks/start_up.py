"""Claim: from the command to the end of the first step takes half as long as with torchrun and a script by hand.

2 cores, torch 2.13, medians of 7 (least and most): one process 2.7 s (2.5 to 3.5) against 6.8 (6.1 to 7.5), two 3.4
(3.1 to 3.9) against 6.9 (6.1 to 7.5); to the end of a run of one step 3.8 and 4.4 s against 8.6 and 9.0. A run before,
of 5: two processes 3.4 against 6.7, 4.2 against 8.5.

Repeat with `python -m benchmarks.start_up`: seconds from the command to the end of the first step of LeNet at global
batch 64, and to the end of a run of one step, of `shoal run --devices N` and of `torchrun --standalone` with a script
that trains the same by hand (DDP where there are two). Both take turns. shoal's end includes a checkpoint and a hash.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGAN = "BENCHMARK_BEGAN"


def script(out: Path) -> None:
    """What one would write by hand, for one step."""
    from benchmarks import cpu_step_rank, small_jobs

    cpu_step_rank.JOBS["one"] = lambda: small_jobs.lenet(batch=64)
    steps = itertools.count()

    def after_step() -> None:
        if next(steps) == 0:
            if os.environ["RANK"] == "0":
                out.write_text(str(time.time() - float(os.environ[BEGAN])))
            raise SystemExit(0)

    cpu_step_rank.plain_training("one", after_step)


def run(tool: str, devices: int) -> tuple[float, float]:
    """Seconds to the end of the first step, and of the command."""
    began = time.time()
    variables = {**os.environ, BEGAN: str(began), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        if tool == "shoal":
            words = ["-m", "shoal", "run", "benchmarks/small_jobs.py:lenet", "--set", "batch=64", "--steps", "1"]
            words += ["--devices", str(devices), "--out", str(out)]
        else:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
            words += ["-m", "benchmarks.start_up", "--script", str(out)]
        subprocess.run(
            [sys.executable, "-W", "ignore", *words], cwd=ROOT, env=variables, check=True, capture_output=True
        )
        ended = time.time() - began
        if tool == "shoal":
            return float(json.loads((out / "result.json").read_text())["first_step_seconds"]), ended
        return float(out.read_text()), ended


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--script", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.script:
        script(options.script)
    found: dict[str, list[tuple[float, float]]] = {}
    for _, devices, tool in itertools.product(range(options.repeats), (1, 2), ("shoal", "torchrun")):
        found.setdefault(f"{tool}, {devices}", []).append(run(tool, devices))
    document = {}
    for name, samples in found.items():
        for what, values in zip(("first_step", "end"), zip(*samples, strict=True), strict=True):
            low, median, high = min(values), statistics.median(values), max(values)
            document[f"{name}, {what}_seconds"] = [round(v, 2) for v in (median, low, high)]
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
