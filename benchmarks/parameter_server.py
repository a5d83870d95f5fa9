"""Parameter server: LeNet on Fashion-MNIST by data parallelism and by servers in each mode, side by side.

Claim: see docs/parameter-server.md, which this writes the table of (hardware, versions and spread are in it). Every run
has the same job, seed, global batch and number of steps; `accuracy` is that after the last epoch on all test images.
The times are of whole runs on a machine whose cores are fewer than the processes, and are no claim.

    python -m benchmarks.parameter_server --epochs 2 --repeats 1 --write docs/parameter-server.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- table: benchmarks/parameter_server.py -->", "<!-- end of table -->"
WORKERS = 3
RUNS = {
    "data parallel": "",
    "synchronous": '[server]\nmode = "synchronous"\n',
    "bounded, 2": '[server]\nmode = "bounded"\nstaleness = 2\n',
    "asynchronous": '[server]\nmode = "asynchronous"\n',
}


def measured(sections: str, settings: dict[str, str], folder: Path) -> dict[str, Any]:
    """One run's result and records."""
    plan, out = folder / "plan.toml", folder / "run"
    plan.write_text(f"[layout]\ndata = {WORKERS}\n{sections}", encoding="utf-8")
    given = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
    command = [sys.executable, "-W", "ignore", "-m", "shoal", "run", str(ROOT / "examples" / "fashion_mnist.py")]
    subprocess.run([*command, "--plan", str(plan), "--out", str(out), *given], check=True, stdout=subprocess.DEVNULL)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"result": result, "records": records}


def row(name: str, runs: list[dict[str, Any]]) -> str:
    """A line of the table, of the last run, and where there are several with the spread of loss and accuracy."""
    result, records = runs[-1]["result"], runs[-1]["records"]
    losses = [run["result"]["metrics"]["loss"] for run in runs]
    shares = [run["result"]["metrics"]["accuracy"] for run in runs]
    served = result.get("server")
    histogram = "-" if served is None else ", ".join(f"{n}: {count}" for n, count in served["staleness"].items())
    last = mean(record["loss"] for record in records[-50:])
    seconds = sum(record["seconds"] for record in records)
    cells = [name, spread(losses, ".4f"), spread([100 * s for s in shares], ".2f") + " %", f"{last:.4f}", histogram]
    return "| " + " | ".join([*cells, f"{len(records) / seconds:.1f}"]) + " |"


def spread(values: list[float], form: str) -> str:
    low, high = min(values), max(values)
    return f"{low:{form}}" if len(values) == 1 or low == high else f"{low:{form}} to {high:{form}}"


def table(found: dict[str, list[dict[str, Any]]], epochs: str) -> str:
    """The table with what it was measured on."""
    result = next(iter(found.values()))[0]["result"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    num = len(next(iter(found.values())))
    lines = [
        f"LeNet, {WORKERS} workers, 1 server, {epochs} epoch(s) of 60,000 images by 256 ({result['steps']} steps), "
        f"seed 0, {num} run(s) each; {len(os.sched_getaffinity(0))} cores ({platform.machine()}); {versions}.",
        "",
        "| | test loss | test accuracy | mean training loss of the last 50 steps | staleness: updates | steps/s |",
        "|---|---|---|---|---|---|",
        *(row(name, runs) for name, runs in found.items()),
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs each once or more, prints the table, and writes it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", default="2")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the job")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    settings = {"epochs": options.epochs, **dict(text.split("=", 1) for text in options.set)}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.only:
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(name, []).append(measured(RUNS[name], settings, Path(folder)))
        print(row(name, found[name]), flush=True)
    text = table(found, options.epochs)
    print(text)
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        options.write.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
