"""Claim: a reader who follows a microbatch, a plan, a gradient, a candidate or SIGTERM visits few modules.

Each walk is one run under `sys.setprofile`, on this checkout and on an older one: distinct calls between functions of
the package, in the order in which they come first. A return is a call into a module that was visited before.

    python -m benchmarks.walks                 # this checkout, and the one that is compared with
    python -m benchmarks.walks --at COMMIT     # compared with another commit
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "walks"
BEFORE = "c95c8849"
JOB = str(Path(__file__).with_name("job.py"))
# By walk: what it follows, and the words of the command.
WALKS = {
    "microbatch": ("a microbatch, from its loss to the next one's", ("run", JOB, "--max-microbatch", "4")),
    "plan": ("a plan, from the command to the model", ("run", JOB, "--plan", "plan.toml")),
    "gradient": ("a gradient that one of two ranks owns (ZeRO-1), from backward to the next step", ("run", JOB)),
    "candidate": ("a candidate layout, from the command to the page", ("plan", JOB, "--cluster", "8xh100")),
    "sigterm": ("SIGTERM, from the signal to the end", ("run", JOB)),
}
PLANS = {
    "plan": "[batch]\ngrains_per_microbatch = 1\n",
    "gradient": '[layout]\nshard = 2\n[shard]\nlevel = "optimizer"\n',
}
COUNTED = ("modules", "returns", "functions", "calls_between_modules", "calls_between_packages")


def main() -> None:
    """Walk here and there, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", metavar="COMMIT", default=BEFORE)
    parser.add_argument("--only", nargs="+", choices=list(WALKS), default=list(WALKS))
    options = parser.parse_args()
    found = {"now": {name: walked(ROOT, name) for name in options.only}}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "shoal"
        _git("worktree", "add", "--detach", str(tree), options.at)
        try:
            found["before"] = {name: walked(tree, name) for name in options.only}
        finally:
            _git("worktree", "remove", "--force", str(tree))
    RESULTS.mkdir(parents=True, exist_ok=True)
    commits = {"now": _git("rev-parse", "--short=8", "HEAD"), "before": options.at}
    (RESULTS / "results.json").write_text(json.dumps({"commits": commits, **found}, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "README.md").write_text(page(commits, found), encoding="utf-8")
    print(page(commits, found))


def walked(tree: Path, name: str) -> dict[str, Any]:
    """What one walk counts with the package of a checkout. Raises: SystemExit where it ends without a count."""
    with tempfile.TemporaryDirectory() as folder:
        out, words = Path(folder) / "walk.json", list(WALKS[name][1])
        if name in PLANS:
            (Path(folder) / "plan.toml").write_text(PLANS[name], encoding="utf-8")
            words += ["--plan", "plan.toml"] if "--plan" not in words else []
        known = {"WALK": name, "WALK_OUT": str(out), "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{ROOT}"}
        program = "import runpy, sys; from benchmarks.walks.walk import walk; "
        program += "walk.begin(); " if name in ("plan", "candidate") else ""
        program += "sys.argv[0] = 'shoal'\ntry:\n    runpy.run_module('shoal', run_name='__main__')\nfinally:\n    "
        program += "walk.end()" if name in ("candidate", "sigterm") else "pass"
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=folder,
            env=os.environ | known,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if not out.exists():
            raise SystemExit(f"the walk of {name} in {tree} has no end:\n{done.stdout}\n{done.stderr}")
        counted: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return counted


def page(commits: dict[str, str], found: dict[str, dict[str, Any]]) -> str:
    """The table as Markdown: of each number that of before, and that of now."""
    lines = [
        "# Five walks",
        "",
        f"Before is {commits['before']}, now {commits['now']}. `python -m benchmarks.walks` repeats them.",
        "Counted are distinct calls between functions of the package, under `sys.setprofile`; a return is one into a",
        "module that was visited before.",
        "",
        "| walk | " + " | ".join(name.replace("_", " ") for name in COUNTED) + " |",
        "|---|" + "---:|" * len(COUNTED),
    ]
    for name in found["now"]:
        now, before = found["now"][name], found["before"][name]
        numbers = (f"{before[key]} -> {now[key]}" for key in COUNTED)
        lines.append(f"| {WALKS[name][0]} | " + " | ".join(numbers) + " |")
    return "\n".join(lines) + "\n"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
