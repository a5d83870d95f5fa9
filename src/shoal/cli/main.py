"""The `shoal` command: arguments in, exit code out; heavy modules are imported on demand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from shoal.cli.options import BenchOptions, PlanOptions, RunOptions, VerifyOptions, add_options, options_of
from shoal.errors import CommandError, ExitCode, SettingWarning, ShoalError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; prints an error in three beats, without a traceback, and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    started_at = time.time()
    plain, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        parsed = _parse(given)
        command = _COMMANDS[parsed.command]
        return int(command.main(options_of(command.options, parsed), given, started_at))
    except ShoalError as error:
        print(error.render(), file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.FAILED)
    finally:
        warnings.formatwarning = plain


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """shoal's own warnings are about what was written, not about where in shoal it was found."""
    if issubclass(category, SettingWarning):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusalError(self.prog, message)


class _RefusalError(Exception):
    """What argparse objects to, before it is told with what was given."""


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
    """Of each command the options that it has."""
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: [word for action in own._actions for word in action.option_strings if word.startswith("--")]
        for name, own in found.choices.items()
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


def _run(options: RunOptions, given: Sequence[str], started_at: float) -> int:
    from shoal.cli.run.prepare import run

    return run(options, given, started_at)


def _plan(options: PlanOptions, given: Sequence[str], started_at: float) -> int:
    from shoal.cli.plan import plan

    return plan(options)


def _bench(options: BenchOptions, given: Sequence[str], started_at: float) -> int:
    from shoal.cli.bench import bench

    return bench(options)


def _verify(options: VerifyOptions, given: Sequence[str], started_at: float) -> int:
    from shoal.cli.run.prepare import looked_at, requested, tell
    from shoal.runs.request import devices_here

    request = requested(RunOptions(**vars(options), no_telemetry=True), started_at, suffix="-verify")
    request = request.with_devices(devices_here).with_own_sums()
    request.check_plan()
    with request.claim() as lock:
        request = replace(request, out=lock.folder)
        from shoal.cli.verify import verify  # torch: its import serves the child that looks at the job too

        handlers = {number: signal.signal(number, _leave) for number in _STOPS}  # in order: the traces are removed
        try:
            return verify(looked_at(request), options.steps)
        except ShoalError as error:
            tell(request, error)
            return int(ExitCode.USER)  # whatever it was: 1 says that the run diverged
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


_STOPS = (signal.SIGTERM, signal.SIGINT)


def _leave(number: int, frame: object) -> NoReturn:
    for again in _STOPS:
        signal.signal(again, signal.SIG_IGN)
    raise SystemExit(ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class _Command:
    """A command: what is made of its options, and its help."""

    main: Callable[[Any, Sequence[str], float], int]
    options: type
    help: str
    description: str
    epilog: str | None = None


_COMMANDS = {
    "run": _Command(
        _run,
        RunOptions,
        "train a job on one process or many",
        "Train the job that FUNCTION in JOBFILE returns; the number of devices changes only the time.",
        "exit codes: 0 done, 2 user or configuration error, 65 stopped at a non-finite step, 69 a worker died, "
        "73 checkpoint not written, 74 no good checkpoint, 75 preempted (resume with --resume), 130 interrupted twice, "
        "1 a fault of shoal",
    ),
    "verify": _Command(
        _verify,
        VerifyOptions,
        "prove that a parallel run computes what one process computes",
        "Run some steps as planned and on one process, in float64 and otherwise, and compare every tensor.",
        "exit codes: 0 verified, 1 diverged, 2 could not run, 130 stopped by a signal",
    ),
    "plan": _Command(
        _plan,
        PlanOptions,
        "how many devices, which layout, how long, how much memory, and why",
        "Search all layouts of a job on a cluster, running nothing on it, and say why the best is.",
    ),
    "bench": _Command(
        _bench,
        BenchOptions,
        "measure this machine",
        "Measure this machine and keep what was found as a cluster, for `shoal plan --cluster here`.",
        "exit codes: 0 done, 2 user error, 69 a process died, 130 stopped by a signal",
    ),
}
