"""Parameter server: LeNet on Fashion-MNIST by data parallelism and by servers in each mode, side by side.

Claim: 3 asynchronous workers learn, and a little less in as many steps; servers in step learn what data parallelism
does. After an epoch (938 steps of 64 images, rate 0.1, no momentum; 2 cores, torch 2.13) the test loss is 0.5212 and
0.5223 by data parallelism (two seeds), 0.5223 by synchronous servers (the second's seed), 0.5424 with staleness
of 2 at most, 0.5459 and 0.5602 asynchronously, 0.5499 with a worker killed on the way; every step was applied once.
With the example's own momentum of 0.9 data parallelism reaches 0.3427, and asynchronous workers stay at chance (2.30).

Each run is `shoal run` of examples/fashion_mnist.py with the same seed, global batch and number of steps, on 3 workers;
in one a worker is killed by SIGKILL after 300 steps. Checked of every run: the digest of samples is the same, each
step was applied once (`applied_pushes`), and the histogram of staleness in the result is that of the step records.
Steps per second are of runs with more processes than cores, and are no claim.

    python -m benchmarks.parameter_server                          # what is missing, then the page
    python -m benchmarks.parameter_server --only asynchronous      # the rows of that name
    python -m benchmarks.parameter_server --seconds 180            # starts no run after so long; a further call goes on
    python -m benchmarks.parameter_server --again                  # forgets what is known
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "parameter_server.json"
PAGE = ROOT / "benchmarks" / "results" / "parameter_server.md"
BEGIN, END = "<!-- table: benchmarks/parameter_server.py -->\n", "<!-- end of table -->"
WORKERS, LAST, KILLED_AFTER = 3, 50, 300
TIME_LIMIT_SECONDS = 400.0
_MARK = "SHOAL_BENCHMARK_MARK"


@dataclass(frozen=True)
class Row:
    """A line of a table: which servers, settings of the job, and seeds; `kill`: one worker, on the way."""

    server: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    kill: bool = False


# Staleness acts like momentum (Mitliagkas et al., arXiv 1605.09774): all modes go without.
SETTINGS: dict[str, Any] = {"epochs": 1, "batch": 64, "lr": 0.1, "momentum": 0.0}
ASYNCHRONOUS = {"mode": "asynchronous"}
MODES = {
    "data parallel": Row(seeds=(0, 1)),
    "synchronous": Row({"mode": "synchronous"}),
    "bounded, 2": Row({"mode": "bounded", "staleness": 2}),
    "asynchronous": Row(ASYNCHRONOUS, seeds=(0, 1)),
    "asynchronous, one worker killed": Row(ASYNCHRONOUS, kill=True),
}
MOMENTA = {
    f"momentum {momentum}, rate {rate}, {name}": Row(server, {"momentum": momentum, "lr": rate})
    for momentum, rate in ((0.5, 0.05), (0.9, 0.1), (0.9, 0.01))
    for name, server in (("asynchronous", ASYNCHRONOUS), ("data parallel", {}))
}
ROWS = MODES | MOMENTA


def trained(row: Row, seed: int, folder: Path) -> dict[str, Any]:
    """What came of one run: metrics, the last losses, the servers' report, and steps per second."""
    plan, out = folder / "plan.toml", folder / "run"
    plan.write_text(tomli_w.dumps({"schema": 1, "layout": {"data": WORKERS}, "server": row.server}), encoding="utf-8")
    settings = {**SETTINGS, **row.settings, "seed": seed}
    command = [sys.executable, "-m", "shoal", "run", "examples/fashion_mnist.py", "--plan", str(plan)]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*command, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", _MARK: mark},
        stdout=(folder / "said").open("w"),
        stderr=subprocess.STDOUT,
    )
    killed = kill_one(out / "records.jsonl", mark, process) if row.kill else None
    code = process.wait(TIME_LIMIT_SECONDS)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    if code and "NonFiniteError" in (folder / "said").read_text(encoding="utf-8"):
        return {"ended": f"not finite at step {result['steps']}"}
    if code:
        raise RuntimeError((folder / "said").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    check(result, records)
    if killed is not None:
        assert any(f"process {killed}) is gone" in incident["said"] for incident in result["server"]["incidents"])
    return {
        "steps": result["steps"],
        "digest": result["sample_digest"],
        "metrics": result["metrics"],
        "last": mean(record["loss"] for record in records[-LAST:]),
        "server": result["server"],
        "killed": killed,
        "steps_per_second": len(records) / sum(record["seconds"] for record in records),
    }


def kill_one(records: Path, mark: str, process: subprocess.Popen[bytes]) -> int:
    """SIGKILL to the last worker once KILLED_AFTER steps are trained: its process id."""
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if len(records.read_bytes().splitlines()) >= KILLED_AFTER:
                break
        time.sleep(0.2)
    rank = f"RANK={WORKERS + 1}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if f"{_MARK}={mark}".encode() in words and rank in words:
                os.kill(int(path.parent.name), signal.SIGKILL)
                return int(path.parent.name)
    raise RuntimeError("no worker of this run is there")


def check(result: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Raises: AssertionError where a step was not applied once, or result and records say different things."""
    served, steps = result["server"], result["steps"]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    if served is None:
        return
    parts = WORKERS if served["mode"] == "synchronous" else 1
    assert (served["applied_steps"], served["applied_pushes"]) == (steps, parts * steps), served
    assert sorted(record["push"]["step"] for record in records) == list(range(1, steps + 1))
    counted = Counter(str(record["push"]["staleness"]) for record in records)
    assert served["staleness"] == dict(counted), (served["staleness"], counted)


def line(name: str, found: list[dict[str, Any]]) -> str:
    """A line of the table: means over the seeds, and the least and the most loss."""
    if "ended" in found[0]:
        return f"| {name} | {found[0]['ended']} |" + " - |" * 5
    losses = [run["metrics"]["loss"] for run in found]
    counts = sum((Counter(run["server"]["staleness"]) for run in found if run["server"]), Counter[str]())
    shares = [f"{n}: {100 * counts[n] / counts.total():.1f} %" for n in sorted(counts, key=int)]
    pushes = {run["server"]["applied_pushes"] for run in found if run["server"]}
    again = sum(run["server"]["again"] for run in found if run["server"])
    spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
    cells = [
        name,
        f"{mean(losses):.4f}{spread}",
        f"{100 * mean(run['metrics']['accuracy'] for run in found):.2f} %",
        f"{mean(run['last'] for run in found):.4f}",
        ", ".join(shares) or "-",
        ", ".join(map(str, sorted(pushes))) + (f" ({again} given out again)" if again else "") or "-",
        f"{mean(run['steps_per_second'] for run in found):.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def table(kept: dict[str, Any]) -> str:
    """The tables with what they were measured on."""
    runs: dict[str, Any] = kept["runs"]
    settings = ", ".join(f"{name} {value}" for name, value in kept["settings"].items())
    steps = next(iter(runs.values()))["steps"]
    lines = [
        f"`examples/fashion_mnist.py` (LeNet, {settings}: {steps} steps), {WORKERS} workers, 1 server; "
        f"{kept['machine']}.",
        "Loss and accuracy on the 10,000 test images after the last step: means over seeds, least and most;",
        f"training loss: the mean of the last {LAST} steps. All runs of a seed end with the same digest of samples.",
        "",
        "| | test loss | test accuracy | training loss | staleness: share of updates | applied pushes | steps/s |",
        "|---|---|---|---|---|---|---|",
    ]
    head = lines[-2:]
    for rows, between in (
        (MODES, []),
        (MOMENTA, ["", "The same with momentum, and with less of it or a lower rate:", "", *head]),
    ):
        lines += between
        for name in rows:
            found = [run for key, run in runs.items() if key.rpartition(" ")[0] == name]
            lines += [line(name, found)] if found else []
    lines += ["", "The largest rate on a quadratic of curvature c, by momentum and staleness:", "", *rates()]
    return "\n".join(lines) + "\n"


def rates() -> list[str]:
    """The table of the largest rates."""
    from shoal.training.parameter_server.retreat import largest_rate

    lines = ["| momentum | up to date | 1 update old | 2 old | 3 old |", "|---|---|---|---|---|"]
    for momentum in (0.0, 0.5, 0.9):
        found = [f"{largest_rate(momentum, staleness):.2g} / c" for staleness in range(4)]
        lines.append("| " + " | ".join([str(momentum), *found]) + " |")
    return lines


def machine() -> str:
    """Cores and versions."""
    import torch

    return f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), torch {torch.__version__}"


def main() -> None:
    """Runs what is missing, keeps the results, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ROWS))
    parser.add_argument("--again", action="store_true", help="forget what is known")
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    began = time.monotonic()
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() and not options.again else {}
    if kept.get("settings") != SETTINGS:
        kept = {"settings": SETTINGS, "machine": machine(), "runs": {}}
    wanted = [(name, seed) for name, row in ROWS.items() for seed in row.seeds if options.only in (None, name)]
    for name, seed in wanted:
        if f"{name} {seed}" in kept["runs"] or time.monotonic() - began > options.seconds:
            continue
        with tempfile.TemporaryDirectory() as folder:
            kept["runs"][f"{name} {seed}"] = trained(ROWS[name], seed, Path(folder))
        print(line(f"{name} {seed}", [kept["runs"][f"{name} {seed}"]]), flush=True)
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    digests: dict[Any, set[str]] = {}
    for key, run in kept["runs"].items():
        if "digest" in run:
            digests.setdefault((key.rpartition(" ")[2], run["steps"]), set()).add(run["digest"])
    assert all(len(found) == 1 for found in digests.values()), f"runs of a seed have read other samples: {digests}"
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table(kept)}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
