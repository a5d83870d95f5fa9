"""What is run of each program, and what comes of it beside the plain loop's numbers."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.launching import start_command

from benchmarks.habits import plain
from benchmarks.habits.program import Program

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_SECONDS = 60.0
Found = dict[str, Any]

EXACT = ("1", "2", "4", "resume")
LAYOUTS: dict[str, str] = {
    "data 2": "[layout]\ndata = 2\n",
    "ZeRO-2": '[layout]\nshard = 2\n[shard]\nlevel = "gradients"\n',
    "ZeRO-3": '[layout]\nshard = 2\n[shard]\nlevel = "parameters"\n',
    "tensor": "[layout]\ntensor = 2\n",
    "pipeline": "[layout]\npipeline = 2\n",
}
_ONE_AT_A_TIME = threading.Lock()  # plain loops use torch's one generator
# Rounding alone: a tensor that training leaves where it is.
FLOOR = 1e-6


def cells_of(program: Program) -> tuple[str, ...]:
    """Names of a program's runs; which of the ways to divide a model are tried follows from the program's name."""
    place = zlib.crc32(program.name.encode())
    return (*EXACT, "data 2", ("ZeRO-3", "ZeRO-2")[place % 2], ("tensor", "pipeline")[place // 2 % 2], "verify")


def run_cell(program: Program, cell: str, right: plain.Trained | None, folder: Path) -> Found:
    """Runs one cell: exit code, last loss, hash, deviation from the right numbers, or what was said."""
    import shoal

    out, plan = folder / cell.replace(" ", ""), folder / f"{cell.replace(' ', '')}.toml"
    target = f"{program.file}:{program.name}"
    words = [target, "--out", str(out)]
    if cell == "verify":
        code, said = _ended(["verify", *words, "--devices", "2", "--steps", "2"], out)
        status = {0: "verified", 2: "refused"}.get(code, "diverged")
        if status == "diverged" and program.told and program.told in said:
            status = "told"
        return {"status": status, "code": code, "said": "" if code == 0 else _said(said, code)}
    words += ["--max-restarts", "0"]
    if cell in LAYOUTS:
        plan.write_text(LAYOUTS[cell], encoding="utf-8")
        code, said = _ended(["run", *words, "--plan", str(plan)], out)
    elif cell == "resume":
        exact = ["run", *words, "--exact"]
        code, said = _ended([*exact, "--devices", "2", "--steps", str(program.num_steps // 2)], out)
        if code == 0:  # a run's own --steps would be kept
            last = _ended([*exact, "--devices", "1", "--steps", str(program.num_steps), "--resume"], out)
            code, said = last[0], said + last[1]
    else:
        code, said = _ended(["run", *words, "--exact", "--devices", cell], out)
    losses = _losses(out)
    if code:
        status = "refused" if code == 2 and not losses else "failed"
        return {"status": status, "code": code, "steps": len(losses), "said": _said(said, code)}
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    weights = shoal.load(out)
    last = {name: weights[name] for name in weights}
    found = {"code": 0, "loss": losses[-1], "sha": result["weights_sha256"][:8], "evaluated": result["metrics"]}
    if right is None:
        right = program_numbers = plain.Trained(losses, {}, last, result["metrics"] or {})
        found["own"] = program_numbers
    deviation, where = deviates(right, losses, last, result["metrics"] or {})
    status = "same" if deviation <= program.tolerance else "WRONG"
    before, first, _ = said.partition("step 1/")
    if status == "WRONG" and first and program.told and program.told in before:
        status, where = "told", f"{where}; before step 1: {program.told}"
    return {
        **found,
        "status": status,
        "deviation": round(deviation, 8) if deviation < math.inf else None,
        "where": where,
    }


def deviates(
    right: plain.Trained, losses: list[float], last: plain.Tensors, evaluated: dict[str, float]
) -> tuple[float, str]:
    """The largest deviation, as a fraction of how far training moves a tensor or of a loss, and of what."""
    found = [(0.0, "")]
    if len(losses) != len(right.losses):
        return math.inf, f"{len(losses)} steps instead of {len(right.losses)}"
    for step, (value, wanted) in enumerate(zip(losses, right.losses, strict=True), 1):
        found.append((_relative(value, wanted), f"loss of step {step}: {value:.6g} instead of {wanted:.6g}"))
    for name, wanted in right.evaluated.items():
        value = math.nan if name in evaluated and evaluated[name] is None else evaluated.get(name)  # JSON has no NaN
        text = f"evaluated {name}: {value} instead of {wanted:.6g}"
        found.append((math.inf if value is None else _relative(value, wanted), text))
    for name, wanted in right.last.items():
        if name not in last:
            found.append((math.inf, f"{name} is missing"))
            continue
        a, b = (torch.view_as_real(t) if t.is_complex() else t.double() for t in (last[name], wanted))
        if a.shape != b.shape:
            found.append((math.inf, f"{name} is {tuple(a.shape)} instead of {tuple(b.shape)}"))
        elif a.numel():
            first = right.first.get(name, torch.zeros(()))
            first = torch.view_as_real(first) if first.is_complex() else first.double()
            moved = (b - first).abs().max() if first.shape == b.shape else b.abs().max()
            off = (a - b).abs().max()
            ratio = float(off / max(float(moved), FLOOR * (1 + float(b.abs().max()))))
            ratio = 0.0 if float(off) <= FLOOR * (1 + float(b.abs().max())) else ratio
            found.append((ratio if ratio == ratio else math.inf, f"{name}: {off:.3g} off, moved by {moved:.3g}"))
    return max(found, key=lambda pair: pair[0])


def _relative(value: float, wanted: float) -> float:
    if math.isnan(wanted):
        return 0.0 if math.isnan(value) else math.inf
    return abs(value - wanted) / max(abs(wanted), 1e-2) if not math.isnan(value) else math.inf


def _ended(words: list[str], out: Path) -> tuple[int, str]:
    """Exit code and text of a command of shoal; 124 past the time limit."""
    try:
        with start_command([sys.executable, "-m", "shoal", *words], out, cwd=out.parent) as started:
            ended = started.wait(TIME_LIMIT_SECONDS)
            return ended.code, ended.stderr + "\n" + ended.stdout
    except AssertionError as error:
        return 124, str(error)


def _losses(out: Path) -> list[float]:
    """Mean loss of each step that was trained, as the run's records have it."""
    found: dict[int, float] = {}
    for path in sorted(out.glob("records*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "step" in record and record.get("loss") is not None:
                found[record["step"]] = float(record["loss"])
    return [found[step] for step in sorted(found)]


def _said(text: str, code: int) -> str:
    """What was said of the cause: the beats of the first error, or the last lines; without folders of this machine."""
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)
    if code == 124:
        return "did not end: " + text.strip().split("\n")[0][:300]
    beats = re.findall(r"^ +(?:you gave|conflicts with|write instead): *(.+(?:\n {6,}.+)*)", text, re.MULTILINE)
    if beats:
        return " | ".join(" ".join(beat.split()) for beat in beats[:3])[:900]
    lines = [line for line in text.strip().splitlines() if line.strip()]
    verdict = [line for line in lines if re.match(r"(verdict|first divergence|\s*first|notes?|error)", line)]
    return " | ".join(verdict[:4] or lines[-3:])[:900]


# ------------------------------------------------------------------------------------------------------- a program


def run_program(program: Program, wanted: Callable[[str], bool] = lambda cell: True) -> Found:
    """All cells of a program, the plain loop's numbers and the verdict."""
    torch.set_num_threads(1)
    with _ONE_AT_A_TIME:
        right, found = (program.plain() if program.reference else None), {}
    reference = {"loss": right.losses[-1], "evaluated": right.evaluated} if right else None
    folder = Path(tempfile.mkdtemp(prefix="habits-"))
    try:
        for cell in cells_of(program):
            if wanted(cell):
                try:
                    found[cell] = run_cell(program, cell, right, folder)
                except Exception as error:  # of reading what the run left: told in the table, the others go on
                    found[cell] = {"status": "failed", "code": -1, "said": f"{type(error).__name__}: {error}"[:900]}
                right = right or found[cell].pop("own", None)
                found[cell].pop("own", None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    hashes = [found[cell]["sha"] for cell in EXACT if "sha" in found.get(cell, {})]
    for cell in EXACT:
        compared = ("same",) if program.unseeded else ("same", "told")
        if found.get(cell, {}).get("status") in compared and found[cell]["sha"] != hashes[0]:
            found[cell] |= {"status": "WRONG", "where": f"hash {found[cell]['sha']} instead of {hashes[0]}"}
    return {"reference": reference, "cells": found, "verdict": verdict(program, found)}


SAME, REFUSED, TOLD = "same as plain torch", "refused in words", "other numbers, told before step 1"


def verdict(program: Program, cells: dict[str, Found]) -> str:
    """In words: SAME, REFUSED and TOLD are right, where they are expected; all else says what is wrong.

    A refusal of one layout alone (sharded, tensor, pipeline) is told beside SAME.
    """
    by = {status: [c for c in cells if cells[c]["status"] == status] for status in ("WRONG", "failed", "diverged")}
    refused = [cell for cell in cells if cells[cell]["status"] == "refused"]
    parts = [f"{name} {', '.join(by[name])}" for name in by if by[name]]
    if program.expected != "trains":
        said = [cell for cell in cells if cell in refused or (program.late and cells[cell].get("code") == 2)]
        # One process may train where the number of ranks is what is wrong; a proof of two steps may end before a state.
        others = [cell for cell in cells if cell not in said]
        free = {c for c in others if (c == "1" and program.alone_trains) or (c == "verify" and program.late)}
        if said and set(others) == free and all(cells[c]["status"] in ("same", "verified") for c in free):
            return _named(program, cells, said)
    told = [cell for cell in cells if cells[cell]["status"] == "told"]
    if told and not parts and program.expected == "either":
        return TOLD + (f"; {', '.join(refused)} refused" if refused else "")
    if parts:
        return "; ".join(parts) + (f"; refused {', '.join(refused)}" if refused else "")
    divided = [cell for cell in refused if (cell in LAYOUTS and cell != "data 2") or cell in program.may_refuse]
    if len(divided) < len(refused):
        told = "although it is right" if program.expected == "trains" else "and not everywhere"
        return f"refused {', '.join(refused)}, {told}"
    return SAME + (f"; {' and '.join(divided)} refused" if divided else "")


def _named(program: Program, cells: dict[str, Found], refused: list[str]) -> str:
    # What cannot be cut may be refused for that first.
    asked = [cells[cell].get("said", "").lower() for cell in refused if cell not in LAYOUTS or cell == "data 2"]
    lacking = {name for said in asked for name in program.names if name.lower() not in said}
    if any(cells[cell].get("code") == 1 or "inside shoal" in cells[cell].get("said", "") for cell in refused):
        return "refused as a fault of shoal"
    return REFUSED if not lacking else f"refused without naming {', '.join(sorted(lacking))}"


def is_right(program: Program, verdict_of: str) -> bool:
    """Whether a verdict is what the program expects."""
    is_told = program.expected == "either" and verdict_of.startswith(TOLD)
    return verdict_of.startswith(SAME) or is_told or (program.expected != "trains" and verdict_of == REFUSED)
