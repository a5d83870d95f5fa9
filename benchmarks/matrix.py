"""Claim: of 120 pairs of a model and a layout `shoal verify` verifies 112, and 8 are refused with a reason.

Models in rows, layouts on up to 8 processes in columns, 2 steps each, every tensor against one process. The cells are
kept in benchmarks/results/matrix.json as they come, so that a stopped run goes on where it was.

    python -m benchmarks.matrix                              # what is not verified yet, then the page
    python -m benchmarks.matrix --only "HF Llama" "tensor 2" # one cell again; a name alone stands for its row or column
    python -m benchmarks.matrix --again                      # all of it again
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
PAGE = ROOT / "benchmarks" / "results" / "matrix.md"

STEPS = 2
AT_ONCE = 2
TIME_LIMIT_SECONDS = 900.0
LONGEST_REASON = 240
# Errors by which shoal says beforehand that it does not do something; any other is a failure.
REFUSALS = ("PlanError", "JobError")

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A job in a size that takes seconds: a target as the command line has it, and settings."""

    target: str
    settings: tuple[str, ...]


TEXT = ("layers=4", "width=64", "heads=4", "block=32", "batch=16")
FEW = ("train_samples=256", "eval_samples=32")
ROWS = {
    "LeNet": Row("fashion_mnist.py", ("batch=32", *FEW)),
    "ResNet-18": Row("fashion_mnist.py:resnet18", ("batch=16", *FEW)),
    "GPT": Row("gpt.py", TEXT),
    "HF Llama": Row("hugging_face.py:llama", TEXT),
    "HF BERT": Row("hugging_face.py:bert", TEXT),
    "Keras CNN": Row("keras_cnn.py", ("filters=8", "batch=32", *FEW)),
}


def sections(
    layout: dict[str, int], level: str | None = None, schedule: str | None = None, stages: int = 1
) -> Sections:
    """A plan's sections. A pipeline takes grains one by one, so that there are microbatches to fill it with."""
    found: Sections = {"layout": layout}
    if layout.get("shard", 1) > 1:
        # Without a level the stages of a pipeline are divided by their optimizer's state only.
        found["shard"] = {"level": level or ("optimizer" if layout.get("pipeline", 1) > 1 else "parameters")}
    if layout.get("pipeline", 1) > 1:
        found["pipeline"] = {"schedule": schedule or "1f1b", "stages_per_rank": stages}
        found["batch"] = {"grains_per_microbatch": 1}
    return found


COLUMNS = {
    "data 2": sections({"data": 2}),
    "ZeRO-1": sections({"shard": 2}, "optimizer"),
    "ZeRO-2": sections({"shard": 2}, "gradients"),
    "ZeRO-3": sections({"shard": 2}, "parameters"),
    "hybrid": sections({"data": 2, "shard": 2}),
    "tensor 2": sections({"tensor": 2}),
    "gpipe": sections({"pipeline": 2}, schedule="gpipe"),
    "1f1b": sections({"pipeline": 2}),
    "interleaved": sections({"pipeline": 2}, schedule="interleaved_1f1b", stages=2),
    "zero bubble": sections({"pipeline": 2}, schedule="zero_bubble"),
    "context 2": sections({"context": 2}),
    "data 2 x tensor 2": sections({"data": 2, "tensor": 2}),
    "shard 2 x tensor 2": sections({"shard": 2, "tensor": 2}),
    "shard 2 x pipeline 2": sections({"shard": 2, "pipeline": 2}),
    "data 2 x shard 2 x tensor 2": sections({"data": 2, "shard": 2, "tensor": 2}),
    "data 2 x shard 2 x pipeline 2": sections({"data": 2, "shard": 2, "pipeline": 2}),
    "shard 2 x tensor 2 x pipeline 2": sections({"shard": 2, "tensor": 2, "pipeline": 2}),
    "ZeRO-3 x 1f1b": sections({"shard": 2, "pipeline": 2}, "parameters"),
    "ZeRO-3 x zero bubble": sections({"shard": 2, "pipeline": 2}, "parameters", "zero_bubble"),
    "context 2 x pipeline 2": sections({"context": 2, "pipeline": 2}),
}
GROUPS = {
    "Data and shards": ("data 2", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid"),
    "Tensor, pipeline, context": ("tensor 2", "gpipe", "1f1b", "interleaved", "zero bubble", "context 2"),
    "Products": tuple(list(COLUMNS)[11:]),
}


# -------------------------------------------------------------------------------------------------- in a cell's process


def verify_cell(row: str, column: str) -> dict[str, Any]:
    """What came of one cell, as JSON: its status, the worst ratio or what was said, and seconds."""
    import torch

    import shoal
    from shoal.errors import ShoalError
    from shoal.jobs.job_file import load, parse_target

    torch.set_num_threads(1)
    began = time.monotonic()
    wanted = ROWS[row]
    try:
        job = load(parse_target(str(ROOT / "examples" / wanted.target), list(wanted.settings))).job
        verdict = shoal.verify(job, shoal.Plan().with_sections(**COLUMNS[column]), STEPS)
    except ShoalError as error:
        kind = type(error).__name__
        found = {"status": "refused" if kind in REFUSALS else "failed", "kind": kind, "said": error.conflict}
        found |= {"given": error.given, "remedy": error.remedy}
    else:
        status = "verified" if verdict.verified else "diverged"
        worst = max(check.ratio for check in verdict.checks)
        found = {"status": status, "worst": worst if verdict.verified else None, "notes": verdict.notes}
        if not verdict.verified:
            found["said"] = verdict.render()
    return {**found, "seconds": round(time.monotonic() - began, 1)}


# -------------------------------------------------------------------------------------------------------------- outside


def run_cell(row: str, column: str) -> dict[str, Any]:
    """`verify_cell` in a process of its own, with all its ranks; ended where it takes too long."""
    command = [sys.executable, "-m", "benchmarks.matrix", "--cell", row, column]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=TIME_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "said": f"not done after {TIME_LIMIT_SECONDS:.0f} s"}
    finally:
        # The ranks, too: they are of the same session, which nothing else is in.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = [line for line in output.splitlines() if line.startswith("cell ")]
    if not lines:
        return {"status": "failed", "said": "\n".join(errors.strip().splitlines()[-3:])}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("cell "))
    return found


def chosen(only: Sequence[str] | None) -> list[tuple[str, str]]:
    """The cells that are asked for. Raises: SystemExit for a name that is neither a row nor a column."""
    names = list(only or ())
    unknown = [name for name in names if name not in ROWS and name not in COLUMNS]
    if unknown:
        raise SystemExit(f"no row or column {unknown[0]!r}: rows are {list(ROWS)}, columns {list(COLUMNS)}")
    rows = [name for name in names if name in ROWS] or list(ROWS)
    columns = [name for name in names if name in COLUMNS] or list(COLUMNS)
    return [(row, column) for column in columns for row in rows]


class Results:
    """The cells so far, in a file; a cell counts only for the very settings and plan that it was run with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cells: dict[str, dict[str, Any]] = json.loads(path.read_text())["cells"] if path.exists() else {}

    @staticmethod
    def _key(row: str, column: str) -> str:
        return json.dumps([ROWS[row].target, ROWS[row].settings, COLUMNS[column], STEPS], sort_keys=True)

    def get(self, row: str, column: str) -> dict[str, Any] | None:
        """A cell, None where it was not run."""
        return self._cells.get(self._key(row, column))

    def put(self, row: str, column: str, found: dict[str, Any]) -> None:
        """Keeps a cell; the file is whole at any time, and holds only cells of today's rows and columns."""
        self._cells[self._key(row, column)] = {"row": row, "column": column, **found}
        today = {self._key(r, c) for r in ROWS for c in COLUMNS}
        self._cells = {key: cell for key, cell in self._cells.items() if key in today}
        document = {"claim": __doc__.splitlines()[0], "versions": _versions(), "cells": self._cells}
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(document, indent=1) + "\n")
        temporary.replace(self._path)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "keras"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


# ------------------------------------------------------------------------------------------------------------- the page


def text_of(cell: dict[str, Any] | None, footnotes: list[str]) -> str:
    """A cell of the table; reasons are footnotes, each said once."""
    if cell is None:
        return "not run"
    if cell["status"] == "verified":
        return f"verified ({cell['worst']:.2f})"
    said = " ".join(str(cell.get("said", "")).split()).replace("|", "\\|")
    if cell["status"] == "diverged":
        said = said[said.find("first divergence") :]
    said = said[:LONGEST_REASON]
    reason = f"{said}. Instead: {' '.join(cell['remedy'].split())[:LONGEST_REASON]}" if "remedy" in cell else said
    if reason not in footnotes:
        footnotes.append(reason)
    words = {"refused": "not possible", "diverged": "**DIVERGED**", "failed": "**failed**"}
    return f"{words[cell['status']]} [{footnotes.index(reason) + 1}]"


def page(results: Results) -> str:
    """The tables as Markdown."""
    every = [results.get(row, column) for row in ROWS for column in COLUMNS]
    count = Counter("not run" if cell is None else cell["status"] for cell in every)
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    lines = [
        "# Models and layouts",
        "",
        "Generated by `python -m benchmarks.matrix`: every cell is one `shoal verify` of an example in a small size, "
        f"{STEPS} steps",
        f"on CPU processes ({versions}). In brackets the worst error over its tolerance, where 1 would be too much",
        "([how it is measured](../../docs/verify.md)). Where a layout is not possible, the footnote is what the user",
        "is told.",
        "",
        f"{len(every)} cells: {count['verified']} verified, {count['refused']} not possible, "
        f"{count['diverged']} diverged, {count['failed']} failed, {count['not run']} not run.",
        "Where nothing else is said, shards are of the parameters (ZeRO-3) and pipelines of 2 stages run 1f1b.",
    ]
    footnotes: list[str] = []
    for title, columns in GROUPS.items():
        lines += ["", f"## {title}", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for row in ROWS:
            cells = [text_of(results.get(row, column), footnotes) for column in columns]
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{i}. {reason}" for i, reason in enumerate(footnotes, 1))]
    lines += ["", "| Row | Job and settings |", "|---|---|"]
    lines += [f"| {name} | `examples/{row.target}` `{' '.join(row.settings)}` |" for name, row in ROWS.items()]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Runs what is missing or asked for, two cells at a time, and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows and columns; these cells are run again")
    parser.add_argument("--again", action="store_true", help="run cells that are there already, too")
    parser.add_argument("--page", action="store_true", help="write the page from what is there, run nothing")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print("cell " + json.dumps(verify_cell(*options.cell)), flush=True)
        return
    results = Results(RESULTS)
    wanted = [] if options.page else chosen(options.only)
    if not (options.again or options.only):
        # What was refused or failed may be possible by now, and is soon said again.
        wanted = [cell for cell in wanted if (results.get(*cell) or {}).get("status") != "verified"]
    with ThreadPoolExecutor(min(AT_ONCE, options.at_once)) as pool:
        # The results are kept by this thread alone, as they come.
        for (row, column), found in zip(wanted, pool.map(lambda cell: run_cell(*cell), wanted), strict=True):
            results.put(row, column, found)
            print(f"{row}, {column}: {text_of(found, [])} in {found.get('seconds', '?')} s", flush=True)
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
