"""The `shoal report` command: a page or JSON on one run or several."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.cli.options import ReportOptions
from shoal.errors import ExitCode
from shoal.planner.calibrate.comparison import MeasuredStep, beside
from shoal.report.account import Account, account
from shoal.runs.run_files import RunFiles, read_run


def report(options: ReportOptions) -> ExitCode:
    """Reports on runs. Raises: RunDirectoryError where one is none."""
    found = [account_of(read_run(Path(run))) for run in options.runs]
    if options.json:
        told = [one.to_json() for one in found]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=2, allow_nan=False))
        return ExitCode.DONE
    for one in found:
        print(f"{one.path}: {one.status} after step {one.steps}, {one.wall.seconds:,.1f} s. {one.limit}")
    return ExitCode.DONE


def account_of(files: RunFiles) -> Account:
    """The account of a run, its steps compared with its plan's prediction also where it has no result yet."""
    told = files.plan.get("prediction")
    predicted = told if isinstance(told, dict) else {}
    device = files.attempts[-1].device if files.attempts else ""
    kind = "cpu" if device == "cpu" else "gpu" if device else predicted.get("device_kind", "")
    last = files.records[-1].ranks.get("memory_bytes") if files.records else None
    steps = [MeasuredStep(record.seconds, record.spans) for record in files.records[-1000:]]
    return account(files, beside(predicted, steps, int(last.max) if last is not None else None, str(kind)))
