"""The commands `shoal report`, a page or JSON about runs, and `shoal watch`, a run in the terminal while it trains."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shoal.cli.options import ReportOptions, WatchOptions
from shoal.errors import CommandError, ExitCode, RunDirectoryError, folded, say_note
from shoal.planner.calibrate.comparison import account_of
from shoal.report.account import Account, status_of
from shoal.report.openmetrics import openmetrics
from shoal.report.page import render_report
from shoal.report.quantities import seconds
from shoal.report.run_page import run_page
from shoal.report.several_runs import named, several_page
from shoal.report.terminal import cut, head, lines
from shoal.runs.directory import write_file
from shoal.runs.run_files import RunFiles, RunReader, run_reader


def report(options: ReportOptions) -> ExitCode:
    """Report on runs. Raises: RunDirectoryError if a directory has no run."""
    files = []
    for run in options.runs:
        with run_reader(run) as reader:
            files.append(reader.read())
    for read in files:
        read.say_damage()
    accounts = [account_of(one) for one in files]
    if options.json:
        documents = [one.to_json() for one in accounts]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2, allow_nan=False))
        return ExitCode.DONE
    for one in accounts:
        ended = f"{one.path}: {one.status} after step {one.steps}, {seconds(one.wall.seconds)}. {one.limit}"
        print(folded(cut(ended, len(ended))))
        if one.blocks is not None:
            print(folded(f"{one.blocks}\n  sums are exact; medians and curves use the mean of each block"))
    both = [(one, read.records) for one, read in zip(accounts, files, strict=True)]
    page = run_page(*both[0]) if len(both) == 1 else several_page(named(both))
    default = files[0].output_folder / "report.html" if len(both) == 1 else Path("report.html")
    output = Path(options.output) if options.output else default
    _write("--output", output, render_report(page))
    print(f"page -> {output}")
    return ExitCode.DONE


_EVERY_SECONDS, _SELDOM_SECONDS = 2.0, 15.0
# A read, and the whole account, is repeated after this many times its own duration. Together they take less than a
# thousandth of a core.
_PATIENCE = 2500.0


def watch(options: WatchOptions) -> ExitCode:
    """Show a run until it ends. Raises: RunDirectoryError if there is no run; CommandError for the metrics' file."""
    with run_reader(options.run) as reader:
        watched = _Watched(reader)
        watched.look(options.openmetrics)
        watched.files.say_damage()
        if options.once:
            from rich.console import Console

            console = Console()
            width = console.width if console.is_terminal else 80
            print("\n".join(lines(watched.account, watched.files.records, width)))
            return ExitCode.DONE
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as until_end:
            show = _shower(watched, until_end)
            show()
            seconds = 0.0
            while watched.status == "running":
                time.sleep(_SELDOM_SECONDS if watched.files.address is not None else pause(seconds))
                began = time.process_time()
                try:
                    watched.look(options.openmetrics)
                except (RunDirectoryError, OSError) as error:
                    if watched.files.address is not None and error.__cause__ is not None:  # connection failed
                        say_note(f"{error}; looking again")
                        continue
                    watched.gone = True
                    break
                show()
                seconds = time.process_time() - began - watched.accounting
            show()
        if watched.gone:
            say_note(f"{options.run} is gone; that was the last of it")
        return ExitCode.DONE


def pause(cpu_seconds: float) -> float:
    """Return the seconds between two reads if one read takes this many CPU seconds."""
    return min(_SELDOM_SECONDS, max(_EVERY_SECONDS, _PATIENCE * cpu_seconds))


class _Watched:
    """A run at the last read: its newest records, and an account that is recomputed when that is cheap enough."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._next, self.status = 0.0, ""
        self.gone, self.accounting = False, 0.0  # CPU seconds that the last read took for the account
        self.files: RunFiles
        self.account: Account

    def look(self, metrics: str | None) -> None:
        """Read the new records, and write `metrics`. Raises: RunDirectoryError if the directory is gone."""
        self.files = self._reader.read()
        status, now = status_of(self.files), time.monotonic()
        if now >= self._next or status != self.status:
            began = time.process_time()
            self.account = account_of(self.files)
            self.accounting = time.process_time() - began
            self._next = now + _PATIENCE * self.accounting
        else:
            self.accounting = 0.0
        self.status = status
        if metrics:
            _write("--openmetrics", Path(metrics), openmetrics(self.account))


def _write(flag: str, path: Path, text: str) -> None:
    """Write a file that an option names. Raises: CommandError if that fails."""
    try:
        write_file(path, text)
    except OSError as error:
        raise CommandError(
            given=f"{flag} {path}",
            conflict=f"it cannot be written: {error.strerror or error}",
            remedy="give a file in a directory that is there",
        ) from error


def _shower(watched: _Watched, until_end: contextlib.ExitStack) -> Callable[[], None]:
    """Return a function that shows the run: in a terminal in place, in a log by one line for each read with news."""
    if not sys.stdout.isatty():
        said = ""

        def log() -> None:
            nonlocal said
            before, said = said, cut(head(watched.account, watched.files.records), 200)
            if said != before:
                print(said, flush=True)

        return log
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    live = until_end.enter_context(Live("", console=console, auto_refresh=False, vertical_overflow="crop"))

    def show() -> None:
        text = "\n".join(lines(watched.account, watched.files.records, console.width))
        live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)

    return show
