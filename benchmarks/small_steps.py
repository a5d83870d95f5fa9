"""Claim: of nine small jobs the layout predicted to be the fastest was within 3 % of the fastest in nine.

`python -m benchmarks.small_steps` measures the machine (`shoal bench`), plans each job for it under each layout, and
runs the same plans by `shoal run`, once each; several such rounds, since a virtual machine's cores are not equally fast
at all times. It writes a row each to results/small_steps.csv: least, lower quartile, median and ninth decile of the
seconds of a step (the first ones of each run left out), the median prediction of the rounds and its terms, the median
over the rounds of what each was wrong by (`error`), the median of each span on rank 0, and the peak of a rank's
resident memory. `others` is the share of the cores that other programs used meanwhile: rows of a machine that is not
idle say little. `pace` is how fast a product and a stream of memory ran on both cores around the row's runs, next to
the same around the round's `shoal bench`. `--page` writes results/small_steps.md from the rows.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.cli.bench import busy_seconds
from shoal.hardware.detect import all_reduce_here
from shoal.jobs.job_file import load, parse_target
from shoal.planner.answer.answer import question
from shoal.planner.calibrate.comparison import PARTS
from shoal.planner.measure.probes import probes, sample
from shoal.planner.predict.step_time import Predictor
from shoal.plans.plan import Plan, plan_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "small_steps.csv"
PAGE = ROOT / "benchmarks" / "results" / "small_steps.md"
WARM_UP = 3
# Name: the job with its settings, and the steps of a trial.
JOBS: dict[str, tuple[list[str], int]] = {
    "mlp-tiny": (["mlp", "width=64", "batch=64"], 120),
    "lenet-64": (["lenet", "batch=64"], 80),
    "lenet-256": (["lenet", "batch=256"], 50),
    "mlp-1024": (["mlp", "width=1024", "batch=256"], 50),
    "mlp-2048": (["mlp", "width=2048", "batch=1024"], 15),
    "gpt-small": (["gpt", "layers=2", "width=128", "batch=16", "block=64"], 40),
    "gpt": (["gpt"], 12),
    "resnet18-16": (["resnet18", "batch=16"], 12),
    "resnet18-64": (["resnet18", "batch=64"], 9),
}
# Name: the sections of a plan. Two ranks but for the first; eight grains, in one microbatch a rank but for stages.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "1": {},
    "data": {"layout": {"data": 2}},
    "zero-1": {"layout": {"shard": 2}, "shard": {"level": "optimizer"}},
    "zero-2": {"layout": {"shard": 2}, "shard": {"level": "gradients"}},
    "zero-3": {"layout": {"shard": 2}, "shard": {"level": "parameters"}},
    "tensor": {"layout": {"tensor": 2}, "batch": {"grains_per_microbatch": 8}},
    "pipeline": {"layout": {"pipeline": 2}, "batch": {"grains_per_microbatch": 2}},
}
_GRAINS = 8
_WHOLE = ("1", "data")
# The whole model in one module of layers, with no place to cut it.
_UNCUT = ("mlp-tiny", "mlp-1024", "mlp-2048")
_NEAR, _NEAR_BYTES, _QUIET = 0.15, 0.1, 0.1
_MANY_LAYOUTS, _CLOSE = 6, 0.03


def plan_of(layout: str) -> Plan:
    """The complete plan of a layout, of the all_reduce that is fastest here, as a search would write it."""
    plan = Plan().with_sections(**LAYOUTS[layout])
    ranks = plan.layout.data * plan.layout.shard
    batch = {"grains_per_microbatch": _GRAINS // ranks} | LAYOUTS[layout].get("batch", {})
    plan = plan.with_sections(batch=batch)
    summing = max(ranks, plan.layout.tensor)
    if summing > 1:
        plan = plan.with_sections(collectives={"all_reduce": all_reduce_here(summing)})
    return plan


def predicted(name: str, layouts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By layout: seconds of a step and of each part of it, and the bytes of the rank that needs most."""
    job, *settings = JOBS[name][0]
    loaded = load(parse_target(str(ROOT / f"benchmarks/small_jobs.py:{job}"), settings)).job
    case = question(loaded, Plan(), "here", None).case
    predictor, found = Predictor(case.work, case.cluster), {}
    for layout in layouts:
        told = predictor.predict(plan_of(layout))
        row: dict[str, Any] = {"predicted_s": round(told.step_seconds, 6), "predicted_bytes": int(told.peak_bytes)}
        for part, (terms, _) in PARTS.items():
            row[f"predicted_{part}_s"] = round(sum(told.terms[term] for term in terms), 6)
        found[layout] = row
    return found


def layouts_of(name: str, wanted: Sequence[str]) -> list[str]:
    """Those of the wanted layouts that a job can have."""
    return [layout for layout in wanted if layout != "pipeline" or name not in _UNCUT]


def trial(name: str, layout: str) -> tuple[list[dict[str, Any]], float]:
    """The step records of one run, without the first, and the share of the cores that others used meanwhile."""
    (job, *settings), steps = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        out, file = Path(folder) / "run", Path(folder) / "plan.toml"
        file.write_text(plan_text(plan_of(layout)), encoding="utf-8")
        command = [sys.executable, "-m", "shoal", "run", f"benchmarks/small_jobs.py:{job}", "--plan", str(file)]
        command += ["--steps", str(steps), "--out", str(out)]
        command += [text for setting in settings for text in ("--set", setting)]
        variables = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        busy, own, began = busy_seconds(), _children(), time.monotonic()
        subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.DEVNULL)
        used = busy_seconds() - busy - (_children() - own)
        others = used / (time.monotonic() - began) / (os.cpu_count() or 1)
        lines = (out / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][WARM_UP:], max(0.0, others)


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


# Seconds of samples of each of the two, and which they are.
_PACE_SECONDS = 0.4
_PACE_PROBES = (("matmul.float32", 2.0 * 1024**3), ("stream", float(1 << 27)))


def pace_of_a_core() -> float:
    """Calls a second of a product and of a stream of memory on one thread, their geometric mean."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    asked = [probe for probe in probes(device, quick=False) if (probe.name, probe.place) in _PACE_PROBES]
    assert len(asked) == len(_PACE_PROBES)
    rates = [1.0 / statistics.median(sample(probe, device, _PACE_SECONDS)[0]) for probe in asked]
    return statistics.geometric_mean(rates)


def pace() -> float:
    """The same, of all cores at once, on average."""
    command = [sys.executable, "-m", "benchmarks.small_steps", "--pace"]
    cores = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(os.cpu_count() or 1)]
    return statistics.mean(float(core.communicate()[0]) for core in cores)


def around(what: Callable[[], Any]) -> tuple[Any, float]:
    """What that gives, and the pace around it."""
    before = pace()
    found = what()
    return found, (before + pace()) / 2.0


@dataclass(frozen=True)
class Round:
    """Of one run: what was predicted, its records, the cores' share of others, and its pace over that of the bench."""

    told: dict[str, Any]
    records: list[dict[str, Any]]
    others: float
    pace: float

    @property
    def ratio(self) -> float:
        """What was predicted over what it took."""
        median: float = statistics.median(float(record["seconds"]) for record in self.records)
        return float(self.told["predicted_s"]) / median


def summarised(name: str, layout: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """A row of the table."""
    records = [record for one in rounds for record in one.records]
    seconds = sorted(float(record["seconds"]) for record in records)
    row: dict[str, Any] = {"job": name, "settings": " ".join(JOBS[name][0]), "layout": layout}
    row |= {key: round(statistics.median(one.told[key] for one in rounds), 6) for key in rounds[0].told}
    row |= {"error": round(statistics.median(one.ratio for one in rounds) - 1, 4)}
    row |= {"errors": " ".join(f"{one.ratio - 1:+.3f}" for one in rounds)}
    row |= {"pace": round(statistics.mean(one.pace for one in rounds), 3)}
    row |= {"error_at_pace": round(statistics.median(one.ratio / one.pace for one in rounds) - 1, 4)}
    row |= {"rounds": len(rounds), "steps": len(seconds), "least_s": round(seconds[0], 6)}
    row |= {"quartile_s": round(seconds[len(seconds) // 4], 6), "median_s": round(statistics.median(seconds), 6)}
    row |= {"p90_s": round(seconds[int(0.9 * (len(seconds) - 1))], 6)}
    for span in records[0]["spans"]:
        row[f"{span}_s"] = round(statistics.median(record["spans"][span] for record in records), 6)
    row["memory_bytes"] = max(int(record["memory_bytes"]) for record in records)
    row["others"] = round(statistics.mean(one.others for one in rounds), 2)
    return row


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as the page benchmarks/results/small_steps.md."""
    lines = [
        "# Predicted and measured steps of a small machine",
        "",
        "Generated by `python -m benchmarks.small_steps --page` on two cores of an Intel Xeon with AMX (virtual),",
        "torch 2.13, float32: each plan of each job as predicted from what `shoal bench` had just measured, and as",
        "it then ran, in rounds of both. Milliseconds; measured is the median over all steps but the first",
        "three of each run, with lower quartile and ninth decile beside it. *Error* is the median of the rounds'. No",
        "time of these runs went into a prediction, but profiles of three jobs' steps showed what it must count",
        "([planner](../../docs/planner.md)); of the memory one constant is from rows of 1 and data",
        "([heap](../../docs/planner.md)). *Pace* is how fast a product and a stream of memory ran on both cores around",
        "the runs, next to the same around `shoal bench`: the machine's own drift; *at that pace* is the error without",
        "it. *Others* is the share of the cores that other programs had meanwhile: beyond a tenth a row says little.",
        "",
        "| Job | Layout | Rounds | Predicted | Measured | Quartile to p90 | Error | Pace | At that pace | Predicted MB "
        "| Resident MB | Others |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        spread = f"{float(row['quartile_s']) * 1e3:.1f} to {float(row['p90_s']) * 1e3:.1f}"
        lines.append(
            f"| {row['job']} | {row['layout']} | {row['rounds']} | {float(row['predicted_s']) * 1e3:.1f} "
            f"| {float(row['median_s']) * 1e3:.1f} | {spread} | {float(row['error']):+.0%} "
            f"| {float(row['pace']):.2f} | {float(row['error_at_pace']):+.0%} "
            f"| {int(row['predicted_bytes']) / 1e6:.0f} | {int(row['memory_bytes']) / 1e6:.0f} "
            f"| {float(row['others']):.0%} |"
        )
    lines += ["", *_told(rows), ""]
    return "\n".join(lines)


def _told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How often the prediction was right."""
    found = []
    loud = sum(float(row["others"]) > _QUIET for row in rows)
    if loud:
        what = "one row" if loud == 1 else f"{loud} rows"
        found.append(f"Left out of what follows: {what} of which others had more than {_QUIET:.0%}.")
    quiet = [row for row in rows if float(row["others"]) <= _QUIET]
    whole = [row for row in quiet if row["layout"] in _WHOLE]
    divided = [row for row in quiet if row["layout"] not in _WHOLE]
    for what, chosen in (("rows of the whole model on each rank", whole), ("rows of layouts that divide it", divided)):
        told = []
        for key, at in (("error", ""), ("error_at_pace", " at the bench's pace")):
            errors = [abs(float(row[key])) for row in chosen]
            if errors:
                near = sum(error <= _NEAR for error in errors)
                told.append(f"{near} within {_NEAR:.0%}, median error {statistics.median(errors):.0%}{at}")
        wrong = [abs(int(row["predicted_bytes"]) / int(row["memory_bytes"]) - 1) for row in chosen]
        near = sum(error <= _NEAR_BYTES for error in wrong)
        if told:
            memory = f"memory of {near} within {_NEAR_BYTES:.0%}, median error {statistics.median(wrong):.0%}"
            found.append(f"Of {len(chosen)} {what}: {'; '.join(told)}; {memory}.")
    by_job = {(row["job"], row["layout"]): row for row in quiet}
    jobs = [job for job in JOBS if (job, "1") in by_job and (job, "data") in by_job]

    def alone_is_faster(job: str, key: str) -> bool:
        return float(by_job[job, "1"][key]) <= float(by_job[job, "data"][key])

    right = sum(alone_is_faster(job, "median_s") == alone_is_faster(job, "predicted_s") for job in jobs)
    if jobs:
        lost = [_lost(by_job[job, "1"], by_job[job, "data"]) for job in jobs]
        found.append(
            f"One process or two: the faster one was predicted for {right} of the {len(jobs)} jobs with two such rows; "
            f"the predicted one took {max(lost):.1%} longer than the faster one at most."
        )
    all_of = {job: [row for row in quiet if row["job"] == job] for job in JOBS}
    lost = [_lost(*rows) for rows in all_of.values() if len(rows) >= _MANY_LAYOUTS]
    if lost:
        close = sum(one <= _CLOSE for one in lost)
        found.append(
            f"Of {len(lost)} jobs with rows of {_MANY_LAYOUTS} layouts or more, the layout that was predicted to be "
            f"the fastest was within {_CLOSE:.0%} of the fastest one in {close}; the most that was lost is "
            f"{max(lost):.1%}."
        )
    return found


def _lost(*rows: Mapping[str, Any]) -> float:
    """By how much the one that was predicted to be the fastest is slower than the fastest one."""
    chosen = min(rows, key=lambda row: float(row["predicted_s"]))
    return float(chosen["median_s"]) / min(float(row["median_s"]) for row in rows) - 1


def main() -> None:
    """Predicts and measures what is asked for, prints each row and writes the table; other rows stay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--layouts", nargs="+", default=["1", "data"], choices=list(LAYOUTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write results/small_steps.md from the rows, too")
    parser.add_argument("--pace", action="store_true", help="print the pace of one core, and nothing else")
    options = parser.parse_args()
    if options.pace:
        print(pace_of_a_core())
        return
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if options.out.exists():
        with options.out.open(newline="", encoding="utf-8") as file:
            rows = {(row["job"], row["layout"]): dict(row) for row in csv.DictReader(file)}
    rounds: dict[tuple[str, str], list[Round]] = {}
    command = [sys.executable, "-m", "shoal", "bench"]
    for _ in range(options.rounds):
        _, reference = around(lambda: subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL))
        for name in options.jobs:
            layouts = layouts_of(name, options.layouts)
            told = predicted(name, layouts)
            for layout in layouts:
                (records, others), speed = around(partial(trial, name, layout))
                one = Round(told[layout], records, others, speed / reference)
                rounds.setdefault((name, layout), []).append(one)
                print(name, layout, f"{one.ratio - 1:+.1%}, {others:.0%} by others, pace {one.pace:.2f}", flush=True)
    rows |= {(name, layout): summarised(name, layout, found) for (name, layout), found in rounds.items()}
    ordered = [rows[key] for key in itertools.product(JOBS, LAYOUTS) if key in rows]
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ordered[0]))
        writer.writeheader()
        writer.writerows(ordered)
    if options.page:
        PAGE.write_text(page(ordered), encoding="utf-8")


if __name__ == "__main__":
    main()
