"""Claim: see docs/recovery.md. How long a run of two ranks stands still after one of them was killed.

Repeat with `python -m benchmarks.recovery`: the digits example trains in exact mode with a checkpoint every 10 steps.
A rank that is drawn with a seed gets SIGKILL some 40 s after the first step, and some 10 s after the first new step of
each start that follows; then the run may end. `noticed` is from the signal to the event in events.jsonl, `first new
step` from the signal to the next record. Runs of `shoal run` and of torchrun (`--max-restarts`, with the same job and
`shoal run --resume` as its ranks) take turns. Each run's weights and samples are compared with those of an undisturbed
one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EPOCHS = 400
JOB = ["run", "examples/digits.py", "--exact", "--checkpoint-every", "10", "--set", f"epochs={EPOCHS}"]
_LIMIT_SECONDS = 120.0


def shoal(*arguments: str) -> list[str]:
    """A command of shoal's."""
    return [sys.executable, "-m", "shoal", *arguments]


def torchrun(devices: int) -> list[str]:
    """A launcher that starts all ranks again."""
    words = ["--standalone", "--nproc-per-node", str(devices), "--max-restarts", "100"]
    return [sys.executable, "-m", "torch.distributed.run", *words, "-m", "shoal"]


def ranks(launcher: int) -> list[int]:
    """The ranks that a launcher has started: of each number the oldest, since younger ones wait for a next start."""
    found: dict[bytes, int] = {}
    asked = ["pgrep", "-P", str(launcher)]  # the oldest first
    for pid in subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split():
        try:
            variables = (b"\0" + Path(f"/proc/{pid}/environ").read_bytes()).split(b"\0")
        except OSError:
            continue
        for rank in (text for text in variables if text.startswith(b"RANK=")):
            found.setdefault(rank, int(pid))
    return list(found.values())


def records(out: Path) -> tuple[int, int]:
    """The file of a run's records and how much is in it: each start of ranks writes another file."""
    try:
        found = (out / "records.jsonl").stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_size


def until_new(out: Path, before: int) -> None:
    """Waits for a record in another file than before. Raises: TimeoutError."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    begun: tuple[int, int] | None = None
    while time.monotonic() < deadline:
        inode, size = records(out)
        if inode not in (0, before):
            begun = begun or (inode, size)
            if size > begun[1]:
                return
        time.sleep(0.002)
    raise TimeoutError(f"no new step in {out}")


def disturbed(tool: str, devices: int, kills: int, drawn: random.Random) -> dict[str, Any]:
    """One run with so many kills: the seconds of each, and how it ended."""
    found: dict[str, Any] = {"noticed": [], "first_new_step": []}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        options = [*JOB, "--out", str(out)]
        if tool == "torchrun":
            first = shoal(*options, "--steps", "1", "--devices", str(devices))
            subprocess.run(first, cwd=ROOT, env=variables, check=True, capture_output=True)
            command = [*torchrun(devices), *options, "--resume", "--steps", str(23 * EPOCHS)]
        else:
            command = shoal(*options, "--devices", str(devices))
        before = records(out)[0]
        with subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            until_new(out, before)
            time.sleep(30.0)
            for _ in range(kills):
                time.sleep(drawn.uniform(8.0, 12.0))
                before = records(out)[0]
                at = time.time()
                os.kill(drawn.choice(ranks(run.pid)), signal.SIGKILL)
                until_new(out, before)
                found["first_new_step"].append(time.time() - at)
                if tool == "shoal":
                    lines = (out / "events.jsonl").read_text().splitlines()
                    lost = [json.loads(line) for line in lines if '"lost"' in line]
                    found["noticed"].append(datetime.fromisoformat(lost[-1]["at"]).timestamp() - at)
        found["code"] = run.returncode
        result = json.loads((out / "result.json").read_text())
        found["weights"], found["samples"] = result["weights_sha256"], result["sample_digest"]
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Count, median, 95th percentile and largest."""
    ordered = sorted(seconds)
    percentile = statistics.quantiles(ordered, n=20, method="inclusive")[-1]
    return {"n": len(ordered)} | {
        name: round(value, 3)
        for name, value in (("median", statistics.median(ordered)), ("p95", percentile), ("most", ordered[-1]))
    }


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=3, help="in each run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    drawn = random.Random(options.devices)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        subprocess.run(shoal(*JOB, "--out", str(out)), cwd=ROOT, check=True, capture_output=True)
        undisturbed = json.loads((out / "result.json").read_text())
    told: dict[str, list[dict[str, Any]]] = {"shoal": [], "torchrun": []}
    for number in range(options.runs):
        for tool, runs in told.items():
            if tool == "shoal" or number < max(2, options.runs // 5):
                runs.append(disturbed(tool, options.devices, options.kills, drawn))
                print(tool, json.dumps(runs[-1]), flush=True)
    results: dict[str, Any] = {"devices": options.devices, "cores": os.cpu_count()}
    for tool, runs in told.items():
        same = [
            r["weights"] == undisturbed["weights_sha256"] and r["samples"] == undisturbed["sample_digest"] for r in runs
        ]
        results[tool] = {"runs": len(runs), "ended_well": sum(not r["code"] for r in runs), "same_bits": sum(same)}
        for name in ("noticed", "first_new_step"):
            seconds = [s for r in runs for s in r[name]]
            if seconds:
                results[tool][name] = spread(seconds)
    print(json.dumps(results, indent=2))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
