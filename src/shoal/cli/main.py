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
from typing import Any, NoReturn, TextIO

from shoal.cli.commands import COMMANDS, add_command, overview
from shoal.errors import CommandError, SettingWarning, ShoalError, refused_by_system, say_note
from shoal.launch.environment import FORK_FD
from shoal.launch.signals import exiting
from shoal.runs.options import options_of

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

    def warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        is_own = issubclass(category, SettingWarning)  # about a setting of the user's, which no line of code explains
        return f"warning: {message}\n" if is_own else f"{filename}:{lineno}: {category.__name__}: {message}\n"

    plain, warnings.formatwarning = warnings.formatwarning, warning
    with exiting((signal.SIGTERM, signal.SIGHUP) if removes else ()), unfailing_output():
        try:
            parsed = _parse(given)
            command = COMMANDS[parsed.command]
            options: Any = options_of(command.options, parsed)
            code = int(getattr(importlib.import_module(command.module), parsed.command)(options))
        except (ShoalError, OSError) as error:
            known = error if isinstance(error, ShoalError) else refused_by_system(error)
            if known is None:
                raise
            print(known.render(), file=sys.stderr)
            code = int(known.exit_code)
        finally:
            warnings.formatwarning = plain
    if arguments is None:
        if plans:
            gc.freeze()  # else the exit scans millions of objects of a large search
        end_without_threads(code)
    return code


def end_without_threads(code: int) -> None:
    """End this process soon with the code, even if threads of the job's code would keep Python waiting."""

    def end() -> None:
        left = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon and thread is not own)
        with contextlib.suppress(OSError):
            say_note(f"shoal does not wait for threads that the job's code left running: {left}")
        os._exit(code)

    own = threading.main_thread()
    if any(not thread.daemon and thread is not own for thread in threading.enumerate()):
        last = threading.Timer(_THREADS_SECONDS, end)
        last.daemon = True
        last.start()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusalError(self.prog, message)


class _RefusalError(Exception):
    """An objection of argparse, before it becomes a CommandError."""


def _parse(given: list[str]) -> argparse.Namespace:
    parser = _parser(next((word for word in given if not word.startswith("-")), None))
    command: str | None = None
    if "--sort" in given[:-1]:
        at = given.index("--sort")
        given = [*given[:at], f"--sort={given[at + 1]}", *given[at + 2 :]]  # argparse takes -loss for an option
    try:
        options, unknown = parser.parse_known_args(given)
        if unknown:
            command = options.command
            raise _RefusalError(f"{parser.prog} {command}", f"unknown: {' '.join(unknown)}")
        return options
    except _RefusalError as refusal:
        from shoal.cli.hints import hints

        prog, message = refusal.args
        known = _options(_parser())
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


def _parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. If `only` names one, just that one has its options, which saves 10 ms."""
    from shoal.runs.version import __version__

    parser = _Parser(prog="shoal", allow_abbrev=False)
    parser.format_help = overview  # type: ignore[method-assign]
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, command in COMMANDS.items():
        if only is None or name == only:
            add_command(commands, name, command)
        else:
            commands.add_parser(name)
    return parser


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
