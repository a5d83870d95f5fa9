"""The `shoal report` command: a page or JSON about one or several runs."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.cli.options import ReportOptions
from shoal.errors import CommandError, ExitCode
from shoal.planner.calibrate.comparison import account_of
from shoal.report.page import render_report
from shoal.report.quantities import seconds
from shoal.report.run_page import run_page
from shoal.report.several_runs import named, several_page
from shoal.report.terminal import cut
from shoal.runs.directory import write_file
from shoal.runs.run_files import RunFiles, run_reader


def report(options: ReportOptions) -> ExitCode:
    """Report on runs. Raises: RunDirectoryError if a directory has no run."""
    files = [_read(run) for run in options.runs]
    accounts = [account_of(one) for one in files]
    if options.json:
        documents = [one.to_json() for one in accounts]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2, allow_nan=False))
        return ExitCode.DONE
    for one in accounts:
        ended = f"{one.path}: {one.status} after step {one.steps}, {seconds(one.wall.seconds)}. {one.limit}"
        print(cut(ended, len(ended)))
    both = [(one, read.records) for one, read in zip(accounts, files, strict=True)]
    page = run_page(*both[0]) if len(both) == 1 else several_page(named(both))
    default = files[0].output_folder / "report.html" if len(both) == 1 else Path("report.html")
    output = Path(options.output) if options.output else default
    try:
        write_file(output, render_report(page))
    except OSError as error:
        raise CommandError(
            given=f"--output {output}",
            conflict=f"it cannot be written: {error.strerror or error}",
            remedy="give a file in a directory that is there, with -o FILE",
        ) from error
    print(f"page -> {output}")
    return ExitCode.DONE


def _read(run: str) -> RunFiles:
    with run_reader(run) as reader:
        return reader.read()
