"""Claim: a program that people write trains with the numbers of plain torch on every layout, or is refused in words.

Each program of benchmarks/habits has its plain loop beside it. It is run in exact mode on one, two and four processes
and over a resume (stopped on two, resumed on one), fast in three layouts, and by `shoal verify`. Results are kept as
they come in benchmarks/results/habits/results.json, of which the page README.md beside it is made.

    python -m benchmarks.habits                        # all of it again, then the page
    python -m benchmarks.habits --resume               # what this commit has not run yet
    python -m benchmarks.habits --only carried scaled  # these programs; --kind state: those of a kind
    python -m benchmarks.habits --failed               # what was not as expected at the last run
    python -m benchmarks.habits --at c95c8849          # the same programs at an older commit: the column "before"
    python -m benchmarks.habits --page                 # the page alone; --list: names, kinds and what is expected
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.habits import programs
from benchmarks.habits.results import RESULTS, Results, page
from benchmarks.habits.runs import ROOT, is_right, run_program

PAGE = RESULTS.parent / "README.md"


def main() -> None:
    """Runs what is asked for and writes the page."""
    options = _options()
    every = programs()
    unknown = [name for name in options.only or () if name not in every]
    if unknown:
        raise SystemExit(f"no program {unknown[0]!r}; --list names them")
    if options.list:
        for program in every.values():
            print(f"{program.kind:25} {program.expected:8} {program.name}: {program.says}")
        return
    if options.at:
        raise SystemExit(_at(options.at))
    results = Results(RESULTS, options.column, options.commit or _head())
    chosen = [p for p in every.values() if not options.only or p.name in options.only]
    chosen = [p for p in chosen if not options.kind or p.kind in options.kind]
    if options.resume:
        chosen = [p for p in chosen if not results.has(p.name)]
    if options.failed:
        chosen = [p for p in chosen if not is_right(p, results.verdict(p))]
    wrong = []
    if not options.page:
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = pool.map(lambda p: (p, run_program(p)), chosen)
            for number, (program, found) in enumerate(runs, 1):
                results.put(program.name, found)
                right = is_right(program, found["verdict"])
                wrong += [] if right else [program.name]
                mark = "" if right else f"  (expected: {program.expected})"
                print(f"{number}/{len(chosen)} {program.kind}: {program.name}: {found['verdict']}{mark}", flush=True)
    PAGE.write_text(page(every), encoding="utf-8")
    if wrong and options.column == "now":
        raise SystemExit(f"{len(wrong)} not as expected. Again: python -m benchmarks.habits --only {' '.join(wrong)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--kind", nargs="+", metavar="KIND")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has run already")
    parser.add_argument("--failed", action="store_true", help="only what was not as expected")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--at", metavar="COMMIT")
    parser.add_argument("--column", default="now", choices=("now", "before"), help=argparse.SUPPRESS)
    parser.add_argument("--commit", help=argparse.SUPPRESS)
    return parser.parse_args()


def _head() -> str:
    return _git("rev-parse", "--short=8", "HEAD")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _at(commit: str) -> int:
    """Runs this command again with an older checkout's package; its exit code."""
    short = _git("rev-parse", "--short=8", commit)
    words = [word for word in sys.argv[1:] if word not in ("--at", commit)]
    with tempfile.TemporaryDirectory(prefix="habits-at-") as name:
        tree = Path(name) / "tree"
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            path = os.pathsep.join([str(tree / "src"), str(ROOT)])
            command = [sys.executable, "-m", "benchmarks.habits", *words, "--column", "before", "--commit", short]
            return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
        finally:
            _git("worktree", "remove", "--force", str(tree))


if __name__ == "__main__":
    main()
