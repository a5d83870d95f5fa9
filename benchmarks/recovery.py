"""Claim: see docs/recovery.md. How long a run stands still after one of its ranks was killed.

Repeat with `python -m benchmarks.recovery --alone`, and then `python -m benchmarks.recovery --devices 2 --seconds 400
--out benchmarks/results/recovery_2.json`: the digits example trains in exact mode with a checkpoint every 10 steps. A
rank that is drawn with a seed gets SIGKILL 3 to 6 s after the first step and after the first new step of each start
that follows, until the run ends. `noticed` is from the signal to the event in events.jsonl, `first new step` from the
signal to the next record. Runs of `shoal run` and of torchrun (`--max-restarts`, with the same job and `shoal run
--resume` as its ranks) take turns. Each run's weights and samples are compared with those of an undisturbed one.
`--table` prints the rows of the page from the results.
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
EPOCHS = 500
JOB = ["run", "examples/digits.py", "--exact", "--evaluate-every", "100000", "--set", f"epochs={EPOCHS}"]
SAVED = ["--checkpoint-every", "10"]
RESULTS = ROOT / "benchmarks" / "results"
_LIMIT_SECONDS = 60.0


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


def until_new(out: Path, before: int, run: subprocess.Popen[bytes]) -> bool:
    """Waits for a record in another file than before; False where the run has ended, or there is none for a minute."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    begun: tuple[int, int] | None = None
    while time.monotonic() < deadline and run.poll() is None:
        inode, size = records(out)
        if inode not in (0, before):
            begun = begun or (inode, size)
            if size > begun[1]:
                return True
        time.sleep(0.002)
    return False


def command(tool: str, devices: int, out: Path, variables: dict[str, str]) -> list[str]:
    """What starts a run: of torchrun's ranks each resumes, so that a first step has to be there."""
    options = [*JOB, *SAVED, "--out", str(out)]
    if tool == "shoal":
        return shoal(*options, "--devices", str(devices), "--max-restarts", "100")
    first = shoal(*options, "--steps", "1", "--devices", str(devices))
    subprocess.run(first, cwd=ROOT, env=variables, check=True, capture_output=True)
    return [*torchrun(devices), *options, "--resume", "--steps", str(23 * EPOCHS)]


def disturbed(tool: str, devices: int, until: float, drawn: random.Random) -> dict[str, Any]:
    """One run with kills until it ends, or up to an instant: the seconds of each, and how it ended."""
    found: dict[str, Any] = {"kills": 0, "noticed": [], "first_new_step": []}
    with tempfile.TemporaryDirectory() as folder:
        out, variables = Path(folder) / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
        words = command(tool, devices, out, variables)
        before = records(out)[0]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(words, cwd=ROOT, env=variables, **quiet) as run:  # type: ignore[call-overload]
            goes_on = until_new(out, before, run)
            while goes_on and time.monotonic() < until:
                time.sleep(drawn.uniform(3.0, 6.0))
                here, before = ranks(run.pid), records(out)[0]
                if run.poll() is not None or not here:
                    break
                at = time.time()
                os.kill(drawn.choice(here), signal.SIGKILL)
                goes_on = until_new(out, before, run)
                if not goes_on and run.poll() is None:  # nothing for a minute
                    run.send_signal(signal.SIGTERM)
                if not goes_on and tool == "shoal" and run.wait() == 0:
                    break  # it had just trained its last step
                found["kills"] += 1
                if goes_on:
                    found["first_new_step"].append(time.time() - at)
                if tool == "shoal":
                    lines = (out / "events.jsonl").read_text().splitlines()
                    lost = [json.loads(line) for line in lines if '"lost"' in line]
                    found["noticed"].append(datetime.fromisoformat(lost[-1]["at"]).timestamp() - at)
            if time.monotonic() >= until:
                run.send_signal(signal.SIGTERM)
        found["code"] = run.returncode
        result = json.loads((out / "result.json").read_text())
        found |= {name: result[name] for name in ("status", "weights_sha256", "sample_digest", "ettr")}
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Count, median, 95th percentile and largest."""
    ordered = sorted(seconds)
    percentile = statistics.quantiles(ordered, n=20, method="inclusive")[-1]
    return {"n": len(ordered)} | {
        name: round(value, 3)
        for name, value in (("median", statistics.median(ordered)), ("p95", percentile), ("most", ordered[-1]))
    }


def measured(devices: int, seconds: float, alone: dict[str, Any]) -> dict[str, Any]:
    """Runs by turns for so many seconds; torchrun's every fourth."""
    drawn, end = random.Random(devices), time.monotonic() + seconds
    told: dict[str, list[dict[str, Any]]] = {"shoal": [], "torchrun": []}
    number = 0
    while time.monotonic() < end - 20.0:
        tool = "torchrun" if number % 4 == 1 else "shoal"
        told[tool].append(disturbed(tool, devices, end, drawn))
        print(tool, json.dumps(told[tool][-1]), flush=True)
        number += 1
    results: dict[str, Any] = {"devices": devices, "cores": os.cpu_count()}
    for tool, runs in told.items():
        ended = [run for run in runs if run["status"] == "completed"]
        same = [run for run in ended if all(run[name] == alone[name] for name in ("weights_sha256", "sample_digest"))]
        results[tool] = {"kills": sum(run["kills"] for run in runs)}
        results[tool]["went_on"] = sum(len(run["first_new_step"]) for run in runs)
        results[tool] |= {"runs_to_the_end": len(ended), "same_bits": len(same)}
        for name in ("noticed", "first_new_step"):
            times = [one for run in runs for one in run[name]]
            if times:
                results[tool][name] = spread(times)
    return results


def table() -> str:
    """Rows of the page, from the results that are there."""
    lines = [
        "| ranks | started by | kills | went on | noticed: median, p95, most | first new step: median, p95, most |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for path in sorted(RESULTS.glob("recovery_*.json")):
        found = json.loads(path.read_text())
        for tool in ("shoal", "torchrun"):
            own = found[tool]
            if not own["kills"]:
                continue
            times = [
                ", ".join(f"{own[name][key]:.2f}" for key in ("median", "p95", "most")) + " s" if name in own else ""
                for name in ("noticed", "first_new_step")
            ]
            lines.append(f"| {found['devices']} | {tool} | {own['kills']} | {own['went_on']} | {' | '.join(times)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--alone", action="store_true", help="trains the undisturbed run that others are compared with")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept = RESULTS / "recovery_undisturbed.txt"
    if options.table:
        print(table())
        return
    if options.alone:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            subprocess.run(shoal(*JOB, "--out", str(out)), cwd=ROOT, check=True, capture_output=True)
            result = json.loads((out / "result.json").read_text())
        kept.write_text(f"{result['weights_sha256']} {result['sample_digest']}\n")
        return
    alone = dict(zip(("weights_sha256", "sample_digest"), kept.read_text().split(), strict=True))
    results = measured(options.devices, options.seconds, alone)
    print(json.dumps(results, indent=2))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
