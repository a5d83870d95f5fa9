"""Claim: on one H200 a step as a CUDA graph takes 0.6 (LeNet) to 1.0 (ResNet-18, GPT-2) of a bare eager loop's.

This runs the parts of `benchmarks.gpu_parts` on a GPU, and each leaves a record.

Repeat with `scripts/gpu` on a machine with a GPU. Each part runs in a process of its own, which is ended at the part's
time limit. A record is written when its part ends, so that a later part that fails or hangs takes nothing along.
`--next SECONDS` runs the parts that have no record at this commit and fit into that time, most wanted first. A record's
commit is the last one that changed `src` or `benchmarks` without its results. Where torch sees no GPU the parts run in
tiny on the CPU: their figures mean nothing, and their records go to a folder of their own.
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
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import PARTS, RESULTS, ROOT, Part

_MEASURED = ("src", "benchmarks", ":!benchmarks/results")
_TAIL = 3000
END_SECONDS = 5.0  # for a process's start and end, beside a part's own limit


def commit() -> str:
    """The last commit of what is measured; with `+` where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("log", "-1", "--format=%h", "--", *_MEASURED) + "+" * bool(git("status", "-s", "--", *_MEASURED))
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("scripts/gpu: no commit is known here: give --commit HASH") from None


def records(*folders: Path) -> dict[str, dict[str, Any]]:
    """Records by part, the later folder's first."""
    names = {part.name: part.file for part in PARTS}
    found = {part: [f / name for f in reversed(folders) if (f / name).is_file()] for part, name in names.items()}
    return {part: json.loads(paths[0].read_text(encoding="utf-8")) for part, paths in found.items() if paths}


def run(part: Part, folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a part and writes its record into the folder; a part that is late ends with its processes."""
    target = folder / part.file
    found, output = target.with_suffix(".found"), target.with_suffix(".out")
    found.unlink(missing_ok=True)  # of a command that was killed
    dry = ["--dry"] if about["dry"] else []
    command = [sys.executable, "-m", "benchmarks.gpu_parts", part.name, str(found), *dry]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if dry else dict(os.environ)
    limit = part.seconds * (6 if dry else 1)  # a dry run shares a few cores with tests
    began = time.monotonic()
    with output.open("w+b") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # those too that it has left
            child.wait()
    told = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    not_run = told.pop("not_run", "")
    late = f"ended at its time limit of {limit} s"
    status = late if code is None else f"failed with code {code}" if code else "not run" if not_run else "done"
    record = {
        "part": part.name,
        "row": part.row,
        **about,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "status": status,
        **({"why": not_run} if not_run else {}),
        "seconds": round(time.monotonic() - began, 1),
        "satisfied_by": part.satisfied_by,
        "satisfied": told.get("satisfied", {}),
        "numbers": told.get("numbers", {}),
        **({"output": output.read_text(errors="replace")[-_TAIL:]} if status not in ("done", "not run") else {}),
    }
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for aside in (found, found.with_suffix(".new"), output):
        aside.unlink(missing_ok=True)
    return record


def page(found: Mapping[str, dict[str, Any]]) -> str:
    """The records as Markdown: a table of all parts, and the numbers of each."""
    lines = [
        "# On GPUs",
        "",
        "Written by `scripts/gpu` from the records in this folder. Figures of earlier states of the",
    ]
    lines += ["code, from before there were records, are in [earlier.json](earlier.json).", ""]
    lines += ["| question | part | satisfied by | satisfied | record |", "|---|---|---|---|---|"]
    for part in PARTS:
        record = found.get(part.name)
        told, where = "", "no record"
        if record is not None:
            words = {True: "yes", False: "**no**", None: "dry"}
            told = "; ".join(f"{words[held]}: {condition}" for condition, held in record["satisfied"].items())
            why = f": {record['why']}" if "why" in record else ""
            where = (
                f"{record['status']}{why}; {record['commit']}, {record['device']}, torch {record['versions']['torch']}"
            )
        lines.append(f"| {part.row} | {part.name} | {part.satisfied_by} | {told} | {where} |")
    for name, record in found.items():
        if record["numbers"] or "output" in record:
            lines += ["", f"## {name}", "", f"{record['status']}, {record['seconds']} s, {record['at']}.", ""]
            lines += ["```", *(_line(key, value) for key, value in record["numbers"].items())]
            lines += [*(["", record["output"].rstrip()] if "output" in record else []), "```"]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    told = value.rstrip() if isinstance(value, str) else json.dumps(value)
    return f"{name}: {told}"


def following(found: Mapping[str, dict[str, Any]], at: str, seconds: float) -> Part | None:
    """The most wanted part without a record at this commit whose limit fits into the time."""
    fitting = (part for part in PARTS if part.seconds + END_SECONDS <= seconds)
    return next((part for part in fitting if found.get(part.name, {}).get("commit") != at), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; 1 where one has failed or was late."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description="The questions that a GPU is to answer.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--next", type=float, metavar="SECONDS", help="those without a record at this commit that fit")
    names = [part.name for part in PARTS]
    which.add_argument("--parts", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    which.add_argument("--list", action="store_true", help="say which part would run when, and end")
    parser.add_argument("--dry", action="store_true", help="in tiny on the CPU, also where a GPU is")
    parser.add_argument("--commit", help="where this is no clone: what is measured")
    parser.add_argument("--out", type=Path, help="a folder (default: benchmarks/results/gpu; dry: runs/gpu-dry)")
    options = parser.parse_args(arguments)
    if options.list:
        ends = accumulate(part.seconds + END_SECONDS for part in PARTS)
        print(
            *(f"{end:5.0f} s  {part.name}: {part.satisfied_by}" for end, part in zip(ends, PARTS, strict=True)),
            sep="\n",
        )
        return 0
    gpus = 0 if options.dry else torch.cuda.device_count()
    about = {
        "commit": options.commit or commit(),
        "device": ", ".join(torch.cuda.get_device_name(number) for number in range(gpus)) or "no GPU",
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "python": platform.python_version(),
        },
        "dry": not gpus,
    }
    folder = (options.out or (RESULTS if gpus else ROOT / "runs" / "gpu-dry")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    known = [RESULTS, folder] if gpus else [folder]
    print(f"commit {about['commit']}, {about['device']}, torch {torch.__version__}; records in {folder}", flush=True)
    if not gpus:
        print("all in tiny on the CPU: this shows that the parts run, and its figures mean nothing", flush=True)
    given = iter([part for part in PARTS if options.parts is None or part.name in options.parts])
    began, ended = time.monotonic(), list[dict[str, Any]]()

    def next_part() -> Part | None:
        if options.next is None:
            return next(given, None)
        return following(records(*known), about["commit"], options.next - (time.monotonic() - began))

    while (part := next_part()) is not None:
        ended.append(run(part, folder, about))
        print(f"{part.name}: {ended[-1]['status']}, {ended[-1]['seconds']} s", flush=True)
        (folder / "README.md").write_text(page(records(*known)), encoding="utf-8")
    if not ended:
        print("each part that fits into the time has a record at this commit: see --list")
    return int(any(record["status"] not in ("done", "not run") for record in ended))


if __name__ == "__main__":
    sys.exit(main())
