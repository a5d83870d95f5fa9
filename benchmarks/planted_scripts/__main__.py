"""Claim: `shoal verify --script` finds the faults planted in seventeen scripts, and accuses none of the right ones.

Repeat with `python -m benchmarks.planted_scripts`, all or some by `SCRIPT` or `SCRIPT:FAULT` (`SCRIPT:` is the right
run). Scripts, faults and their answers (faults.csv) were written before the rules were read. `--seeds N` checks each
right script with N seeds. The scripts need accelerate, transformers, lightning and scikit-learn. Results are kept under
`--label`: rows that are there are checked again only if they are named.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "planted_scripts.json"


def answer(script: str, fault: str, seed: int, devices: int) -> dict[str, Any]:
    """Returns what the command says of a script: exit code, first divergence, notes and coverage."""
    command = f"{script}.py --batch-size {{batch}} --seed {seed}" + (f" --fault {fault}" if fault else "")
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "shoal", "verify", "--script", command, "--devices", str(devices)]
        words += ["--out", folder, *["--cpu"] * (script == "scaler")]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        try:
            done = subprocess.run(words, cwd=HERE, env=variables, text=True, timeout=600, **pipes)
        except subprocess.TimeoutExpired:
            return {"code": None, "error": "no end within 600 s"}
        row: dict[str, Any] = {"code": done.returncode}
        report = Path(folder, "script.json")
        if done.returncode > 1 or not report.exists():
            return {**row, "error": " ".join(done.stderr.split())[:400]}
        said = json.loads(report.read_text())
    findings = [{k: f[k] for k in ("step", "phase", "name", "said", "fails")} for f in said["findings"]]
    row["first"] = next((f for f in findings if f["fails"]), None)
    row["notes"] = [f for f in findings if not f["fails"]][:6]
    return {**row, "coverage": said["coverage"], "seconds": said["seconds"]}


def judged(expected: dict[str, str], row: dict[str, Any]) -> dict[str, Any]:
    """Adds to a row whether the fault was caught, how, and whether step, phase and module are right."""
    phases, modules = expected["phases"].split("|"), expected["modules"].split("|")
    named = [note for note in row.get("notes", []) if note["phase"] in phases]
    finding = row.get("first") or (named[0] if named else None)
    how = "diverged" if row.get("first") else "note" if named else "error" if "error" in row else "missed"
    if finding is None:
        return {**row, "caught": how}
    module = modules[0] in "*-" or any(finding["name"].startswith(name) for name in modules)
    step = expected["step"] == "*" or finding["step"] == int(expected["step"]) + 1
    return {
        **row,
        "caught": how,
        "finding": finding,
        "step": step,
        "phase": finding["phase"] in phases,
        "module": module,
    }


def table(records: dict[str, Any]) -> str:
    """Returns the page of all scores."""
    lines = [
        "# Scripts with planted faults",
        "",
        "Written by `python -m benchmarks.planted_scripts`. Two ranks, 10 steps.",
    ]
    lines += ["All scripts, faults and answers were committed before the first check and before the rules were read."]
    for label, record in records.items():
        faults = [row for row in record["rows"] if row["fault"]]
        caught = [row for row in faults if row["caught"] in ("diverged", "note")]
        placed = [row for row in caught if row["phase"] and row["module"]]
        notes = sum(row["caught"] == "note" for row in caught)
        right = [row for row in record["rows"] if not row["fault"]]
        accused = [row for row in right if row["code"] == 1]
        errors = sum("error" in row for row in right)
        lines += [
            "",
            f"## {label}",
            "",
            f"At commit {record['commit']}: {len(caught)} of {len(faults)} faults are caught,",
        ]
        lines += [
            f"{notes} of them by a note. {len(placed)} of {len(caught)} are placed in phase and module. Of {len(right)} right runs"
        ]
        lines += [f"{len(accused)} are accused, and {errors} ended with an error.", ""]
        lines += [
            "| script | fault | expected | answer | step | phase | module | forwards, gradients, updates |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in record["rows"]:
            if row["fault"] or row["code"]:
                lines.append(_line(row))
        lines += [
            "",
            "| right script | seeds | accused | notes | forwards, gradients, updates, losses |",
            "|---|---|---|---|---|",
        ]
        for script in dict.fromkeys(row["script"] for row in right):
            rows = [row for row in right if row["script"] == script]
            notes_said = {f"{note['phase']}: {note['said']}" for row in rows for note in row.get("notes", [])}
            seen = rows[0].get("coverage", {})
            cells = [script, len(rows), sum(row["code"] == 1 for row in rows), "; ".join(sorted(notes_said)[:2])]
            lines.append(
                _cells(*cells, ", ".join(str(seen.get(k)) for k in ("forwards", "gradients", "updates", "losses")))
            )
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    finding, seen = row.get("finding") or row.get("first"), row.get("coverage", {})
    text = (
        f"{row['caught']}: {finding['phase']}, {finding['name']}" if finding else row.get("error", row["caught"])[:160]
    )
    marks = [{True: "yes", False: "no"}.get(row.get(key), "") if finding else "" for key in ("step", "phase", "module")]
    coverage = ", ".join(str(seen.get(k, "")) for k in ("forwards", "gradients", "updates"))
    return _cells(
        row["script"], row["fault"] or f"(none, seed {row['seed']})", row.get("expected", ""), text, *marks, coverage
    )


def _cells(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", " or ") for cell in cells) + " |"


def main() -> None:
    """Checks those that are named, or all that the results lack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCRIPT[:FAULT]")
    parser.add_argument("--seeds", type=int, default=1, help="of right runs")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--label", default="Held out")
    asked = parser.parse_args()
    expected = list(csv.DictReader(HERE.joinpath("faults.csv").read_text().splitlines()))
    runs = [(row["script"], row["fault"], 0) for row in expected]
    scripts = sorted({row["script"] for row in expected})
    runs += [(script, "", seed) for seed in range(asked.seeds) for script in scripts]
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    ).stdout.strip()
    record = records.setdefault(asked.label, {"commit": commit, "rows": []})
    for script, fault, seed in runs:
        there = [row for row in record["rows"] if (row["script"], row["fault"], row["seed"]) == (script, fault, seed)]
        if (there and not asked.names) or (asked.names and not {script, f"{script}:{fault}"} & set(asked.names)):
            continue
        row = {"script": script, "fault": fault, "seed": seed, **answer(script, fault, seed, asked.devices)}
        if fault:
            wanted = next(line for line in expected if (line["script"], line["fault"]) == (script, fault))
            row = judged(wanted, {**row, "expected": f"{wanted['phases']}, step {wanted['step']}, {wanted['modules']}"})
        else:
            row["caught"] = {0: "right", 1: "accused"}.get(row["code"], "error")
        record["rows"] = [old for old in record["rows"] if old not in there] + [row]
        print(
            script,
            fault,
            seed,
            row["caught"],
            row.get("phase"),
            row.get("finding") or row.get("first") or row.get("error"),
            flush=True,
        )
        RESULTS.write_text(json.dumps(records, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(table(records))


if __name__ == "__main__":
    main()
