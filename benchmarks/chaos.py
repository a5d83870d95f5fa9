"""Claim: under a fault a minute 90 % of a run's time is effective, under one in 15 s 60 %, and nothing is left.

Repeat with `python -m benchmarks.chaos --mtbf 60`: the digits example trains in exact mode on two ranks while faults
come as a Poisson process: a rank is killed (half of them), two at once, one is stopped for good, or one is stopped for
two seconds, which is no fault. At its end weights and samples are compared with those of an undisturbed run on one
process, and processes, files in /tmp and segments in /dev/shm are counted that the run has left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.recovery import ROOT, ranks, shoal

_MARK = "SHOAL_CHAOS_MARK"
_PAUSE_SECONDS = 2.0
# What befalls a run, and how often of ten times.
_MIX = {"kill": 5, "kill two": 1, "stop": 1, "pause": 3}


def strike(kind: str, pids: list[int], drawn: random.Random) -> None:
    """One fault among the ranks that live."""
    number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
    for pid in drawn.sample(pids, min(len(pids), 2 if kind == "kill two" else 1)):
        os.kill(pid, number)
        if kind == "pause":
            time.sleep(_PAUSE_SECONDS)
            os.kill(pid, signal.SIGCONT)


def leftovers(mark: str) -> list[int]:
    """Processes with the run's mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def files(temporary: Path) -> set[str]:
    """What lies in a run's own place for temporary files, and shoal's segments of shared memory."""
    return {str(path) for path in (*temporary.iterdir(), *Path("/dev/shm").glob("shoal*"))}


def train(arguments: list[str], mtbf: float | None, drawn: random.Random) -> tuple[int, Counter[str], float, list[int]]:
    """A run, with faults where `mtbf` says how often: its exit code, the faults, its seconds, processes left over."""
    mark, faults, began = uuid.uuid4().hex, Counter[str](), time.monotonic()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", _MARK: mark}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(shoal(*arguments), cwd=ROOT, env=variables, **quiet) as run:  # type: ignore[call-overload]
        while mtbf is not None and run.poll() is None:
            kind = drawn.choices(list(_MIX), list(_MIX.values()))[0]
            try:
                run.wait(drawn.expovariate(1.0 / mtbf))
                break
            except subprocess.TimeoutExpired:
                pass
            try:
                strike(kind, ranks(run.pid), drawn)
                faults[kind] += 1
            except ProcessLookupError:
                continue
        run.wait()
    seconds = time.monotonic() - began
    time.sleep(1.0)
    return run.returncode, faults, seconds, leftovers(mark)


def main() -> None:
    """Runs, prints, and exits with 1 where a promise is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mtbf", type=float, default=60.0, help="seconds between faults, on average")
    parser.add_argument("--epochs", type=int, default=1200)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.0, help="the least effective share of the time")
    options = parser.parse_args()
    job = ["run", "examples/digits.py", "--exact", "--set", f"epochs={options.epochs}"]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        alone, out, temporary = Path(folder) / "alone", Path(folder) / "run", Path(folder) / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        before = files(temporary)
        train([*job, "--evaluate-every", "100000", "--out", str(alone)], None, random.Random())
        more = ["--evaluate-every", "100000", "--devices", str(options.devices), "--out", str(out)]
        drawn = random.Random(options.seed)
        code, faults, seconds, left = train([*job, *more], options.mtbf, drawn)
        undisturbed = json.loads((alone / "result.json").read_text())
        result = json.loads((out / "result.json").read_text())
        remains = sorted(files(temporary) - before)
        lost = [line for line in (out / "events.jsonl").read_text().splitlines() if '"lost"' in line]
    found: dict[str, Any] = {
        "seed": options.seed,
        "mtbf_seconds": options.mtbf,
        "seconds": round(seconds, 1),
        "code": code,
        "faults": dict(faults),
        "losses_noticed": len(lost),
        "ettr": result.get("ettr"),
        "steps": result["steps"],
        "same_weights": result["weights_sha256"] == undisturbed["weights_sha256"],
        "same_samples": result["sample_digest"] == undisturbed["sample_digest"],
        "processes_left": len(left),
        "files_left": remains,
    }
    print(json.dumps(found, indent=2))
    kept = found["same_weights"] and found["same_samples"] and not left and not found["files_left"] and code == 0
    if not kept or (result.get("ettr") or 0.0) < options.least:
        sys.exit(1)


if __name__ == "__main__":
    main()
