"""The `shoal` command: takes arguments, returns an exit code, and imports heavy modules on demand."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from shoal.cli.options import (
    BenchOptions,
    DoctorOptions,
    EvaluateOptions,
    ExportOptions,
    PlanOptions,
    PredictOptions,
    ReportOptions,
    ResizeOptions,
    RunOptions,
    RunsOptions,
    VerifyOptions,
    WatchOptions,
)
from shoal.errors import CommandError, SettingWarning, ShoalError
from shoal.launch.environment import FORK_FD
from shoal.launch.signals import exiting
from shoal.runs.options import add_options, options_of

# Time for threads to end. Threads of pools end when Python exits.
_THREADS_SECONDS = 5.0
# Commands that may have a temporary copy of a run at an address.
_READING = ("report", "watch", "doctor", "export")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Errors are printed without a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and sys.path[:1] == [os.path.dirname(os.path.realpath(sys.argv[0]))]:
        del sys.path[0]  # the folder of the script `shoal`, which `python -m shoal` does not have
    if FORK_FD in os.environ:
        from shoal.launch.supervise.fork_server import become_rank

        become_rank(importlib.import_module("shoal.cli.run.start").load_rank, holds_signals=given[0] == "run")
    plans = arguments is None and given[:1] == ["plan"]
    if plans:
        gc.disable()  # saves a sixth of the import time and a third of a long search
    removes = arguments is None and given[:1] and given[0] in _READING
    plain, warnings.formatwarning = warnings.formatwarning, _warning
    with exiting((signal.SIGTERM, signal.SIGHUP) if removes else ()), unfailing_output():
        try:
            parsed = _parse(given)
            command = _COMMANDS[parsed.command]
            options: Any = options_of(command.options, parsed)
            code = int(getattr(importlib.import_module(command.module), parsed.command)(options))
        except ShoalError as error:
            print(error.render(), file=sys.stderr)
            code = int(error.exit_code)
        finally:
            warnings.formatwarning = plain
    if arguments is None:
        if plans:
            gc.freeze()  # else the exit scans millions of objects of a large search
        _end_without_threads(code)
    return code


def _end_without_threads(code: int) -> None:
    """End this process soon with the code, even if threads of the job's code would keep Python waiting."""

    def end() -> None:
        left = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon and thread is not own)
        with contextlib.suppress(OSError):
            print(f"note: not waited for threads that the job's code has left: {left}", file=sys.stderr, flush=True)
        os._exit(code)

    own = threading.main_thread()
    if any(not thread.daemon and thread is not own for thread in threading.enumerate()):
        last = threading.Timer(_THREADS_SECONDS, end)
        last.daemon = True
        last.start()


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning; shoal's own setting warnings have no file and line."""
    if issubclass(category, SettingWarning):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusalError(self.prog, message)


class _RefusalError(Exception):
    """An objection of argparse, before it becomes a CommandError."""


def _parse(given: list[str]) -> argparse.Namespace:
    parser = _parser()
    command: str | None = None
    try:
        options, unknown = parser.parse_known_args(given)
        if unknown:
            command = options.command
            raise _RefusalError(f"{parser.prog} {command}", f"unknown: {' '.join(unknown)}")
        return options
    except _RefusalError as refusal:
        from shoal.cli.hints import hints

        prog, message = refusal.args
        known = _options(parser)
        command = command or next((word for word in given if word in known), None)
        raise CommandError(
            given=f"shoal {' '.join(given)}",
            conflict=message,
            remedy=f"see {prog} --help{hints(command, known, given)}",
        ) from None


def _options(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return the long options of each command."""
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: [word for action in own._actions for word in action.option_strings if word.startswith("--")]
        for name, own in subparsers.choices.items()
    }


def _parser() -> argparse.ArgumentParser:
    from shoal.runs.version import __version__

    parser = _Parser(
        prog="shoal",
        allow_abbrev=False,
        description="One model, any number of devices, the same training run.",
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, command in _COMMANDS.items():
        own = commands.add_parser(
            name, allow_abbrev=False, help=command.help, description=command.description, epilog=command.epilog
        )
        add_options(own, command.options)
    return parser


@dataclass(frozen=True)
class _Command:
    """A command: its module, which has a function of the command's name that takes the options, and its help."""

    module: str
    options: type[Any]
    help: str
    description: str
    epilog: str | None = None


_COMMANDS = {
    "run": _Command(
        "shoal.cli.run.start",
        RunOptions,
        "train a job on one process or many",
        "Train the job that FUNCTION in JOBFILE returns; the number of devices changes only the time.",
        "exit codes: 0 done, 2 user or configuration error, 65 stopped at a non-finite step, 69 a worker died, "
        "73 checkpoint not written, 74 no good checkpoint, 75 preempted (resume with --resume), 130 interrupted twice, "
        "1 a fault of shoal",
    ),
    "verify": _Command(
        "shoal.cli.run.start",
        VerifyOptions,
        "prove that a parallel run computes what one process computes",
        "Run some steps as planned and on one process, in float64 and otherwise, and compare every tensor.",
        "exit codes: 0 verified, 1 diverged, 2 could not run, 130 stopped by a signal",
    ),
    "plan": _Command(
        "shoal.cli.plan",
        PlanOptions,
        "how many devices, which layout, how long, how much memory, and why",
        "Search all layouts of a job on a cluster, running nothing on it, and say why the best is.",
    ),
    "export": _Command(
        "shoal.cli.export",
        ExportOptions,
        "write a run's weights as safetensors, as Hugging Face lays them out",
        "Write the weights of a checkpoint, of any layout, to files that other programs read; needs no GPU and no job.",
        "exit codes: 0 done, 2 user error, 73 not written, 74 the checkpoint is damaged",
    ),
    "evaluate": _Command(
        "shoal.cli.trained_engine",
        EvaluateOptions,
        "a job's evaluation on the weights of a checkpoint",
        "Compute the metrics of a job on its evaluation data with the weights of a checkpoint, of any layout.",
        "exit codes: 0 done, 2 user error, 69 a process died, 74 the checkpoint is damaged",
    ),
    "doctor": _Command(
        "shoal.cli.doctor",
        DoctorOptions,
        "what of this machine, or of a run, costs time, and what to do",
        "Examine this machine, or find out what a run's time was lost to, and what would bring it back.",
        "exit codes: 0 nothing keeps training from working here, 1 something does, 2 user error",
    ),
    "predict": _Command(
        "shoal.cli.trained_engine",
        PredictOptions,
        "a trained model's outputs for each sample of a data set",
        "Write the outputs of a job's model, with the weights of a checkpoint of any layout, for each sample in order.",
        "exit codes: 0 done, 2 user error, 73 not written, 74 the checkpoint is damaged",
    ),
    "report": _Command(
        "shoal.cli.report",
        ReportOptions,
        "where a run's time went, as one HTML page",
        "Write one page of a run, or of several side by side: where the time went, beside what was predicted.",
        "exit codes: 0 done, 2 user error",
    ),
    "runs": _Command(
        "shoal.cli.runs",
        RunsOptions,
        "list, compare, clean up and reproduce runs",
        "List runs, say what differs between them, delete those that are not wanted, or print how to run one again.",
        "exit codes: 0 done, 2 user error",
    ),
    "watch": _Command(
        "shoal.cli.report",
        WatchOptions,
        "a run in the terminal while it trains",
        "Show how a run goes, redrawn in place until it ends; it reads only what the run appends.",
        "exit codes: 0 done, 2 user error",
    ),
    "resize": _Command(
        "shoal.cli.resize",
        ResizeOptions,
        "more or fewer processes for a run that trains",
        "Let a run go on with N processes after the step in hand; an exact run computes the same bits on any number.",
        "exit codes: 0 the run goes on with N, 2 user error, 130 interrupted: the wish is withdrawn",
    ),
    "bench": _Command(
        "shoal.cli.bench",
        BenchOptions,
        "measure this machine",
        "Measure this machine and keep what was found as a cluster, for `shoal plan --cluster here`.",
        "exit codes: 0 done, 2 user error, 69 a process died, 130 stopped by a signal",
    ),
}


_STREAMS = (("stdout", 1, contextlib.redirect_stdout), ("stderr", 2, contextlib.redirect_stderr))


class _UnfailingFile(io.FileIO):
    """File whose writes always succeed. A closed pipe, a lost terminal or a full disk drops the text."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Run a context in which no print fails, in shoal, in the job's own code or in forked processes.

    A stream that is not Python's own (in a test or a notebook) is unchanged. A closed stream drops all text.
    """
    with contextlib.ExitStack() as redirected:
        for name, descriptor, redirect in _STREAMS:
            stream: TextIO | None = getattr(sys, name)
            if stream is None:
                unfailing = redirected.enter_context(open(os.devnull, "w", encoding="utf-8"))
            elif type(stream) is io.TextIOWrapper and isinstance(
                getattr(stream.buffer, "raw", stream.buffer), io.FileIO
            ):
                with contextlib.suppress(OSError):
                    stream.flush()
                raw = _UnfailingFile(descriptor, "wb", closefd=False)
                unfailing = io.TextIOWrapper(
                    raw if stream.write_through else io.BufferedWriter(raw),  # PYTHONUNBUFFERED, python -u
                    encoding=stream.encoding,
                    errors=stream.errors,
                    line_buffering=stream.line_buffering,
                    write_through=stream.write_through,
                )
            else:
                continue
            redirected.callback(unfailing.flush)
            redirected.enter_context(redirect(unfailing))
        yield
