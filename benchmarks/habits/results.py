"""Results by column and program, kept as they come, and the page that is made of them."""

from __future__ import annotations

import json
import math
import os
import platform
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.habits.program import TOLERANCE, Program
from benchmarks.habits.runs import EXACT, LAYOUTS, REFUSED, ROOT, SAME, TOLD, Found, is_right, verdict

RESULTS = ROOT / "benchmarks" / "results" / "habits" / "results.json"


class Results:
    """One column's results: of this commit ("now") or of an older one ("before")."""

    def __init__(self, path: Path, column: str, commit: str) -> None:
        self._path, self._column, self._commit, self._lock = path, column, commit, threading.Lock()

    def put(self, name: str, found: Found) -> None:
        """Keeps what came of a program."""
        with self._lock:
            document = read(self._path)
            column = document.setdefault(self._column, {})
            column[name] = {"reference": found["reference"], "cells": found["cells"], "commit": self._commit}
            document["versions"] = _versions()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(_lines(document), encoding="utf-8")
            new.replace(self._path)

    def has(self, name: str) -> bool:
        """Whether this commit has run the program."""
        return bool(self._of(name).get("commit") == self._commit)

    def verdict(self, program: Program) -> str:
        """Of the last run; empty where there was none."""
        found = self._of(program.name)
        return verdict(program, found["cells"]) if found else ""

    def _of(self, name: str) -> Found:
        found: Found = read(self._path).get(self._column, {}).get(name, {})
        return found


def read(path: Path = RESULTS) -> dict[str, Any]:
    """The whole document; empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _lines(document: dict[str, Any]) -> str:
    """JSON with a line for each program, so that a difference shows which ones changed."""
    parts = [f'"versions": {json.dumps(document["versions"])}']
    for name in ("before", "now"):
        rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(document.get(name, {}).items())]
        parts.append(f'"{name}": {{\n' + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _versions() -> str:
    import torch

    cores = len(os.sched_getaffinity(0))
    return f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores of {platform.machine()}"


# ------------------------------------------------------------------------------------------------------------ page

_HEAD = f"""# Habits: small programs of what people write

Claim: each program trains with the numbers of plain torch on every layout, or is refused before the first step in
words that name what is in the way. Repeat with `python -m benchmarks.habits`; `--at COMMIT` fills the column "before".

A program and its plain loop are in one file of `benchmarks/habits/`; the loop imports nothing of shoal. Columns 1, 2, 4
are `shoal run --exact` on so many processes, "resume" is stopped on two and resumed on one, "layouts" are fast runs.
A cell has the last step's mean loss; `=` stands for the reference's to six digits. Exact cells have one hash, or are
WRONG. "Same" compares every step's loss, every parameter and buffer, and the evaluation: a tensor may deviate by
{TOLERANCE:g} of how far training moves it, which is what another order of float32 sums explains. "drawn" in the place
of a reference: only shoal says what is drawn (dropout by grain); layouts are compared with each other.
"""


def page(every: Mapping[str, Program]) -> str:
    """The page of what is kept."""
    document = read()
    now, before = (
        {k: {**of, "verdict": verdict(every[k], of["cells"])} for k, of in document.get(name, {}).items() if k in every}
        for name in ("now", "before")
    )
    commits = {
        name: sorted({of["commit"] for of in column.values()}) for name, column in (("now", now), ("before", before))
    }
    lines = [
        _HEAD,
        f"Run with {document.get('versions', '')}; commits: "
        + "; ".join(f"{k} {', '.join(v)}" for k, v in commits.items())
        + ".",
        "",
    ]
    lines += _counts(every, now, "now") + _counts(every, before, "before")
    lines += [
        "",
        "| program | kind | expected | reference | 1 | 2 | 4 | resume | layouts | verify | verdict | before |",
    ]
    lines += ["|" + "---|" * 12]
    for name, program in every.items():
        found = now.get(name) or before.get(name)
        if found:
            lines.append(_row(program, found, before.get(name, {}).get("verdict", ""), name in now))
    lines += ["", "## What was said", ""]
    for name, program in every.items():
        found = now.get(name) or {}
        if found and found["verdict"] != SAME:
            lines += _said(program, found)
    return "\n".join(lines) + "\n"


def _counts(every: Mapping[str, Program], column: Mapping[str, Found], name: str) -> list[str]:
    if not column:
        return []
    verdicts = {k: of["verdict"] for k, of in column.items()}
    right = [k for k, v in verdicts.items() if is_right(every[k], v)]
    trains = sum(v.startswith(SAME) for v in verdicts.values())
    refused = sum(v == REFUSED and every[k].expected != "trains" for k, v in verdicts.items())
    wrong = sum("WRONG" in v for v in verdicts.values())
    told = sum(v.startswith(TOLD) and every[k].expected != "trains" for k, v in verdicts.items())
    text = f"{len(verdicts)} programs, {len(right)} as expected: {trains} train with the reference's numbers"
    text += f", {refused} are refused in words, {told} train with others and say so"
    return [f"- {name}: {text}; {wrong} are silently wrong somewhere."]


def _row(program: Program, found: Found, before: str, is_now: bool) -> str:
    reference, cells = found["reference"], found["cells"]
    number = f"{reference['loss']:.6g}" if reference else "drawn"
    shown = [_cell(cells.get(cell, {}), number) for cell in EXACT]
    layouts = ", ".join(f"{cell} {_cell(cells[cell], number, sha=False)}" for cell in cells if cell in LAYOUTS)
    verify = cells.get("verify", {}).get("status", "")
    mark = "" if is_right(program, found["verdict"]) else "**"
    verdict = f"{mark}{found['verdict']}{mark}" if is_now else ""
    facts = [program.name, program.kind, program.expected, number, *shown, layouts, verify, verdict, before]
    return "| " + " | ".join(facts) + " |"


def _cell(cell: Found, reference: str, sha: bool = True) -> str:
    if "loss" not in cell:
        return str(cell.get("status", ""))
    loss = cell["loss"]
    number = "=" if not math.isnan(loss) and f"{loss:.6g}" == reference else f"{loss:.6g}"
    wrong = {"WRONG": " WRONG", "told": " told"}.get(cell["status"], "")
    return f"{number}{' ' + cell['sha'] if sha else ''}{wrong}"


def _said(program: Program, found: Found) -> list[str]:
    """A paragraph for each program that is not the same everywhere: why, and each cell's words once."""
    lines = [f"**{program.name}** ({program.kind}; {program.expected}). {program.says}"]
    if program.why:
        lines.append(f"  Why: {program.why}.")
    told: dict[str, list[str]] = {}
    for name, cell in found["cells"].items():
        text = cell.get("said") if "loss" not in cell else cell["where"] if cell["status"] in ("WRONG", "told") else ""
        if text:
            told.setdefault(text.replace("|", "/").replace("*", "\\*"), []).append(name)
    return [*lines, *[f"- {', '.join(names)}: {text}" for text, names in told.items()], ""]
