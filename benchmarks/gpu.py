"""Claim: none: this runs what there is to run on GPUs, and each part's page says what it found.

Repeat with `scripts/gpu` on a machine with a GPU or several: tests, each layout of several GPUs, measurements beside
eager PyTorch and torch.compile, the machine's bench, and a prediction beside its run, within ten minutes. A part has a
time limit of its own; its result is written when it ends, so that a later one that fails or hangs takes nothing along.
Where torch sees no GPU the dry half runs: imports, arguments, and the measured programs themselves in tiny on the CPU,
their kernels compiled too; the captured step is refused there. Its figures are of nothing, and its results go to a
folder of their own.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
TAIL = 4000
_DRY = 4  # times as long a part may take on a CPU, on which a large model's kernels are compiled for a minute and more


@dataclass(frozen=True)
class Part:
    """A command with its time limit in seconds, and what stands for it where no GPU is. OUT in a word: its own file.

    `dry_told`: how far that goes.
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    dry: tuple[str, ...]
    dry_told: str = "ran in tiny on the CPU"


def step(job: str, seconds: float, steps: int) -> Part:
    """The measurement of a job's step, in blocks of so many."""
    counts = ("--turns", "3", "--steps", str(steps))
    command = (PYTHON, "-m", "benchmarks.gpu_step", "--job", job, *counts, "--out", "OUT.json")
    return Part(f"step of {job}", seconds, command, (*command, "--tiny"))


def predicted(job: Sequence[str], cluster: str, plan_only: bool) -> tuple[str, ...]:
    """A plan, and a run of it, whose records have the prediction beside what was measured."""
    shoal, words = f"{PYTHON} -m shoal", " ".join(job)
    lines = [f"{shoal} plan {words} --cluster {cluster} -o OUT.toml"]
    if not plan_only:
        lines += [f"{shoal} run {words} --plan OUT.toml --steps 100 --out OUT.run", f"{shoal} report OUT.run --json"]
    return ("bash", "-ec", "\n".join(lines))


DOCTOR = (PYTHON, "-m", "shoal", "doctor", "--json")
CAPTURED = (PYTHON, "-m", "benchmarks.gpu_captured", "--turns", "1", "--out", "OUT.json")
LAYOUTS = (PYTHON, "-m", "benchmarks.gpu_layouts")
GPT = ("examples/gpt.py", "--set", "batch=32", "--set", "layers=8", "--set", "width=512", "--set", "block=512")
PARTS = (
    Part("machine", 20, DOCTOR, DOCTOR, "the CPU's"),
    Part(
        "tests",
        100,
        (PYTHON, "-m", "pytest", "-q", "-n", "4", "-p", "no:benchmark", "tests/gpu"),
        (PYTHON, "-m", "pytest", "-q", "--collect-only", "tests/gpu"),
        "tests collected, none run",
    ),
    Part("layouts", 90, (*LAYOUTS, "--out", "OUT.json"), (*LAYOUTS, "--out", "OUT.json", "--dry")),
    step("lenet", 65, 50),
    Part("captured step", 30, CAPTURED, (*CAPTURED, "--dry")),
    step("resnet18", 85, 20),
    step("gpt", 110, 10),
    Part(
        "bench",
        45,
        (PYTHON, "-m", "shoal", "bench", "--quick", "-o", "OUT.toml"),
        (PYTHON, "-m", "shoal", "bench", "--help"),
        "arguments read, nothing measured",
    ),
    Part(
        "prediction",
        55,
        predicted(GPT, "here", False),
        predicted(("examples/digits.py",), "1xH100", True),
        "examples/digits.py planned for one H100, nothing run",
    ),
)


def run(part: Part, folder: Path, dry: bool) -> dict[str, Any]:
    """Runs a part and writes what came of it to its file in the folder; a part that is late ends with its processes."""
    stem = folder / part.name.replace(" ", "_")
    command = [word.replace("OUT", str(stem)) for word in (part.dry if dry else part.command)]
    limit = part.seconds * (_DRY if dry else 1)
    began = time.monotonic()
    with stem.with_suffix(".txt").open("w+b") as output:
        child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(child)
    tail = stem.with_suffix(".txt").read_text(errors="replace")[-TAIL:]
    found = {
        "part": part.name,
        "status": "late" if code is None else "done" if code == 0 else "failed",
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "limit_seconds": limit,
        "dry": part.dry_told if dry else None,
        "tail": tail,
    }
    stem.with_suffix(".part.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a part's processes, those too that it has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def page(found: Sequence[dict[str, Any]], about: str) -> str:
    """The parts as Markdown: a table, and the end of what each has said."""
    lines = ["# On GPUs", "", f"{about}. Written by `scripts/gpu`.", ""]
    lines += ["| part | status | seconds | limit |", "|---|---|---|---|"]
    for one in found:
        status = f"{one['status']}; dry: {one['dry']}" if one["dry"] else one["status"]
        lines.append(f"| {one['part']} | {status} | {one['seconds']} | {one['limit_seconds']} |")
    for one in found:
        title = f"{one['part']}, no figure of a GPU" if one["dry"] else one["part"]
        lines += ["", f"## {title}", "", "```", one["tail"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def run_all(parts: Sequence[Part], folder: Path, dry: bool, about: str) -> list[dict[str, Any]]:
    """Runs the parts one after the other; the page is written anew after each."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for part in parts:
        found.append(run(part, folder, dry))
        print("{part}: {status} in {seconds} s".format(**found[-1]), flush=True)
        (folder / "README.md").write_text(page(found, about))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; 1 where one has failed or was late."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description="Everything that there is to run on GPUs.")
    parser.add_argument("--dry", action="store_true", help="the dry half, also where a GPU is")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="some of them")
    parser.add_argument("--out", type=Path, help="a folder (default: benchmarks/results/gpu; dry: runs/gpu-dry)")
    options = parser.parse_args(arguments)
    import torch

    gpus = torch.cuda.device_count()
    dry = options.dry or not gpus
    names = ", ".join(torch.cuda.get_device_name(number) for number in range(gpus)) or "no GPU"
    about = f"{names}, torch {torch.__version__}" + (", the dry half: no figure means anything" if dry else "")
    print(about, flush=True)
    chosen = [part for part in PARTS if options.parts is None or part.name in options.parts]
    folder = options.out or ROOT / ("runs/gpu-dry" if dry else "benchmarks/results/gpu")
    found = run_all(chosen, folder.absolute(), dry, about)
    print(f"page: {folder / 'README.md'}")
    return int(any(one["status"] != "done" for one in found))


if __name__ == "__main__":
    sys.exit(main())
