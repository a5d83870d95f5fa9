"""Claim: `shoal doctor` names each of nine planted slownesses first, and expects of its remedy what a trial brings.

Repeat with `python -m benchmarks.planted`, all or some by name. Each is run; the doctor names its first cause, and that
cause's best remedy is tried as `--try` does it, in turn with the run as it is. Numbers that are read back are the job's
own code, which no remedy changes: there the job's setting is changed instead. Memory that ranks share is told on a
machine that `shoal bench` has measured. `--keep` leaves the runs for a look.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.ranks.test_doctor import HEALTHY, JOB, PLANTED, Planted, quota

from shoal.doctor.causes import Remedy
from shoal.doctor.run_diagnosis import best_remedies, diagnosis, planned_for, trial_job, trial_steps
from shoal.doctor.trial import tried
from shoal.launch.supervise.child import in_child
from shoal.runs.run_files import read_run


def measured(name: str, planted: Planted, folder: Path, rounds: tuple[int, int]) -> dict[str, Any]:
    """Runs a planted slowness; its causes, and gains of the rounds in which the first was mended."""
    run = folder / name.replace(" ", "-")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(quota()) if "quota" in planted.settings else ""
        command = [sys.executable, "-m", *planted.run(JOB, run, group).command[2:]]
        variables = {**os.environ, "OMP_NUM_THREADS": planted.threads}
        subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)
        files = read_run(run)
        times, losses = diagnosis(files)
        losses = planned_for(str(JOB), files, times, losses).causes
        remedies = (
            [Remedy("mended", "", 0.0, arguments=planted.mended)] if planted.mended else best_remedies(losses)[:1]
        )
        steps = max(planted.trial_steps, trial_steps(times, remedies)) if remedies else planted.trial_steps
        trial = replace(trial_job(str(JOB), files, times, steps), rounds=rounds[0], most_rounds=rounds[1])
        results = tried(trial, remedies, lambda text: None)
    causes = [(loss.cause, round(loss.regained, 3)) for loss in losses]
    # What is changed by hand has no remedy of its own that could be tried.
    gain = losses[0].regained if planted.mended and losses else remedies[0].gain if remedies else None
    gains = [round(gain, 3) for result in results for gain in result.gains]
    tried_out = remedies[0].name if remedies else None
    errors = [result.error for result in results if result.error]
    load = os.getloadavg()[0]  # of the last minute, this benchmark's own included
    found = {"name": name, "causes": causes, "tried": tried_out, "expected": gain, "gains": gains, "errors": errors}
    planned = remedies[0].planned if remedies else None
    return {**found, "planned": planned, "load": load}


def main() -> None:
    """Runs those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PLANTED)}")
    parser.add_argument("--rounds", type=int, default=3, help="the fewest of a trial")
    parser.add_argument("--most-rounds", type=int, default=9, help="where they do not agree")
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        for name in asked.names or [*PLANTED, "healthy"]:
            planted = PLANTED.get(name, HEALTHY)
            # In a process of its own: the job of small buckets changes shoal's.
            found = in_child(partial(measured, name, planted, folder, (asked.rounds, asked.most_rounds)))
            found["median"] = median(found["gains"]) if found["gains"] else None
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
