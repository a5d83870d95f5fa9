"""Parameter server: LeNet on Fashion-MNIST by data parallelism and by servers in each mode, side by side.

Claim: none before it is measured; the table of docs/parameter-server.md shows what synchronous servers and workers that
run ahead reach beside data parallelism, at which staleness, with hardware, versions and settings. Every run has the
same job, seed, global batch and number of steps. Steps per second are of runs with more processes than cores, and are
no claim.

    python -m benchmarks.parameter_server                          # all of them, then the page
    python -m benchmarks.parameter_server --only asynchronous      # one again
    python -m benchmarks.parameter_server --page                   # the page alone, from what was measured last
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch._dynamo  # which a first optimizer imports: once here, not in each process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import fashion_mnist
import shoal
from shoal.engine import Engine, Options, build
from shoal.environment import Environment
from shoal.keeper import RunState
from shoal.mesh import alone, open_mesh
from shoal.plan.resolve import complete
from shoal.records import StepRecord
from shoal.serving.conductor import Conductor
from shoal.serving.crew import Crew
from shoal.serving.part import take_part
from shoal.serving.peers import identity
from shoal.startup import versions
from shoal.telemetry import RecordWriter
from shoal.trainer import Outcome, Surroundings
from shoal.verification.fork import forked

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "parameter_server.json"
PAGE = ROOT / "docs" / "parameter-server.md"
BEGIN, END = "<!-- table: benchmarks/parameter_server.py -->\n", "<!-- end of table -->"
WORKERS, LAST = 3, 50
# Staleness acts like momentum (Mitliagkas et al., arXiv 1605.09774): with the job's own 0.9 as well, asynchronous
# workers had learnt nothing after 32 steps. The same settings serve all modes.
SETTINGS: dict[str, Any] = {"epochs": 2, "lr": 0.1, "momentum": 0.5}
RUNS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "synchronous": {"mode": "synchronous"},
    "bounded, 2": {"mode": "bounded", "staleness": 2},
    "asynchronous": {"mode": "asynchronous"},
}


def trained(server: dict[str, Any], settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run in processes of its own: loss, metrics, steps per second, and the servers' report."""
    job = fashion_mnist.job(**settings)
    plan = shoal.Plan().with_sections(layout={"data": WORKERS}, server=server)
    plan = complete(plan, job.grains, job.grain_size)
    losses: list[float] = []

    def on_step(record: StepRecord, rank: int) -> None:
        losses.append(record.loss or 0.0)

    around = Surroundings(lambda text: None, on_step, lambda: False)

    def write(outcome: Outcome, seconds: float, report: dict[str, Any] | None) -> None:
        last = mean(losses[-LAST:])
        found = {"steps": outcome.state.step, "metrics": outcome.metrics, "last": last, "server": report}
        found |= {"digest": outcome.state.digest, "steps_per_second": outcome.state.step / seconds}
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")

    def by_servers(engine: Engine, crew: Crew) -> None:
        state: RunState = engine.first_state()
        parts = engine.parts(state, engine.order.num_steps, around, RecordWriter(None))
        conductor, began = Conductor(parts, around, state, plan, crew), time.perf_counter()
        outcome = conductor.train()
        write(outcome, time.perf_counter() - began, conductor.report())

    def rank(environment: Environment) -> None:
        if not plan.serves:
            with open_mesh(environment, plan.degrees) as mesh:
                engine, began = build(job, plan, mesh, Options()), time.perf_counter()
                outcome = engine.trainer(None, engine.order.num_steps, around, RecordWriter(None)).train()
                if mesh.rank == 0:
                    write(outcome, time.perf_counter() - began, None)
                engine.close()
        elif not take_part(job, plan, environment):
            with Crew(environment, plan.server.num_servers, identity(job, plan)) as crew:
                engine = build(job, plan, alone(torch.device("cpu")), Options())
                by_servers(engine, crew)
                engine.close()

    with forked(plan.num_processes, rank, folder / "ranks") as wait:
        wait()
    found: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    served, metrics = found["server"], found["metrics"]
    histogram = "-" if served is None else ", ".join(f"{n}: {count}" for n, count in served["staleness"].items())
    cells = [name, f"{metrics['loss']:.4f}", f"{100 * metrics['accuracy']:.2f} %", f"{found['last']:.4f}", histogram]
    return "| " + " | ".join([*cells, f"{found['steps_per_second']:.1f}"]) + " |"


def table(results: dict[str, Any]) -> str:
    """The table with what it was measured on."""
    runs = results["runs"]
    steps = next(iter(runs.values()))["steps"]
    settings = ", ".join(f"{name} {value}" for name, value in results["settings"].items())
    lines = [
        f"`examples/fashion_mnist.py` (LeNet, {settings}, {steps} steps), "
        f"{WORKERS} workers, 1 server; one run each; {results['machine']}. Loss and accuracy on the test images",
        f"after the last step; the training loss is the mean of the last {LAST} steps. All runs end with the same",
        "digest of samples.",
        "",
        "| | test loss | test accuracy | training loss | staleness: updates | steps/s |",
        "|---|---|---|---|---|---|",
        *(row(name, runs[name]) for name in RUNS if name in runs),
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    told = ", ".join(f"{name} {value}" for name, value in versions().items())
    return f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), {told}"


def main() -> None:
    """Runs what is asked for, keeps the results, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(RUNS))
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of the job")
    options = parser.parse_args()
    given = (text.split("=", 1) for text in options.set)
    settings = {**SETTINGS, **{name: json.loads(value) for name, value in given}}
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if kept.get("settings") != settings and not options.page:
        kept = {"settings": settings, "machine": machine(), "runs": {}}
    torch.set_num_threads(1)
    for name in [] if options.page else [options.only] if options.only else list(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            kept["runs"][name] = trained(RUNS[name], settings, Path(folder))
        print(row(name, kept["runs"][name]), flush=True)
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    digests = {found["digest"] for found in kept["runs"].values()}
    assert len(digests) == 1, f"the runs have read other samples: {digests}"
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table(kept)}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
