"""The `shoal` command: arguments in, exit code out; heavy modules are imported on demand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shoal.errors import CommandError, ExitCode, SettingWarning, ShoalError, from_json

if TYPE_CHECKING:
    from shoal.launch.environment import Environment
    from shoal.runs.directory_lock import DirectoryLock
    from shoal.runs.request import RunRequest


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; prints an error in three beats, without a traceback, and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    started_at = time.time()
    plain, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        options = _parse(given)
        command = {"run": _run, "verify": _verify, "plan": _plan, "bench": _bench}[options.command]
        return int(command(options, given, started_at))
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
    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        help="train a job on one process or many",
        description="Train the job that FUNCTION in JOBFILE returns; the number of devices changes only the time.",
        epilog="exit codes: 0 done, 2 user or configuration error, 65 stopped at a non-finite step, 69 a worker died, "
        "73 checkpoint not written, 74 no good checkpoint, 75 preempted (resume with --resume), 130 interrupted twice, "
        "1 a fault of shoal",
    )
    _add_training_options(run)
    run.add_argument("--steps", metavar="N", help="end after step N; the schedule stays that of the job's own length")
    run.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint in the run directory")
    run.add_argument(
        "--checkpoint-every", metavar="N", help="steps between checkpoints (default: about 1 %% of the time)"
    )
    run.add_argument("--require-certificate", metavar="FILE", help="train only what `shoal verify` has verified")
    run.add_argument("--no-telemetry", action="store_true", help="no spans and no step records")
    verify = commands.add_parser(
        "verify",
        allow_abbrev=False,
        help="prove that a parallel run computes what one process computes",
        description="Run some steps as planned and on one process, in float64 and otherwise, and compare every tensor.",
        epilog="exit codes: 0 verified, 1 diverged, 2 could not run, 130 stopped by a signal",
    )
    _add_training_options(verify)
    verify.add_argument("--steps", metavar="K", default="3", help="steps to compare (default: 3)")
    _add_plan(commands)
    _add_bench(commands)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="how many devices, which layout, how long, how much memory, and why",
        description="Search all layouts of a job on a cluster, running nothing on it, and say why the best is.",
    )
    plan.add_argument(
        "job", metavar="JOBFILE[:FUNCTION]", nargs="?", help="a Python file and its job function (default: job)"
    )
    plan.add_argument("--cluster", metavar="C", default="here", help="8xH100, 4x8xA100, FILE.toml or here (default)")
    plan.add_argument(
        "--aim",
        metavar="A",
        default="fastest",
        help="fastest (default); cheapest; deadline=2h: the cheapest that ends the whole job in 2 hours; "
        "efficiency=0.8: the fewest devices that keep 80%% of the best throughput per device; "
        "widest=0.8: the most devices that do",
    )
    plan.add_argument("--max-devices", metavar="N", help="use at most N devices")
    plan.add_argument("--precision", metavar="P", help="fp32, bf16, bf16-pure or fp16")
    plan.add_argument("--set", metavar="K=V", action="append", default=[], help="set a parameter of the job function")
    plan.add_argument("--mtbf", metavar="HOURS", help="hours between failures of one device, on average")
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan, for shoal run --plan")
    plan.add_argument("--html", metavar="FILE", help="write a page with the curve, the waterfalls and every reason")
    plan.add_argument("--learn", metavar="RUNDIR", nargs="+", help="correct the predictions by what these runs took")


def _add_bench(commands: Any) -> None:
    from shoal.cli.bench_options import add_options

    add_options(
        commands.add_parser(
            "bench",
            allow_abbrev=False,
            help="measure this machine",
            description="Measure this machine and keep what was found as a cluster, for `shoal plan --cluster here`.",
            epilog="exit codes: 0 done, 2 user error, 69 a process died, 130 stopped by a signal",
        )
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    """What says which training is meant, and on what."""
    parser.add_argument("job", metavar="JOBFILE[:FUNCTION]", help="a Python file and its job function (default: job)")
    parser.add_argument("--plan", metavar="FILE", help="a plan (TOML); what it leaves out is filled in")
    parser.add_argument(
        "--devices", metavar="N", help="processes: one a GPU, or CPU processes (default: all GPUs, or 1)"
    )
    parser.add_argument("--exact", action="store_true", default=None, help="bit-identical on any number of devices")
    parser.add_argument("--precision", metavar="P", help="fp32, bf16, bf16-pure or fp16")
    parser.add_argument("--set", metavar="K=V", action="append", default=[], help="set a parameter of the job function")
    parser.add_argument("--out", metavar="DIR", help="output directory (default: runs/NAME or runs/NAME-verify)")
    parser.add_argument("--max-microbatch", metavar="N", help="the most samples in one forward")
    parser.add_argument("--workers", metavar="N", help="data-loading processes per rank (default: 0)")


def _run(options: argparse.Namespace, given: list[str], started_at: float) -> int:
    from shoal.launch.environment import LAUNCHER_PID, STARTED_AT, Environment, joined
    from shoal.plans.legal import World, other_world, refuse
    from shoal.runs.request import RunRequest, devices_here

    environment = joined(os.environ)
    request = RunRequest.from_options(options, float(os.environ.get(STARTED_AT, started_at)))
    if environment is None:
        request = request.with_devices(devices_here).with_own_sums()
        request.check_plan()
        with request.claim() as lock:
            request = replace(request, out=lock.folder)
            if request.num_processes > 1:
                for note in request.notes():
                    print(f"note: {note}", file=sys.stderr)
                return _refused(request) or _launch(request, given, lock)
            return _train(request, Environment(), claims=False)
    world_size = environment.world_size
    request = request.with_devices(lambda: world_size)
    if environment.single_host:
        request = request.with_own_sums()
    if LAUNCHER_PID not in os.environ:
        refuse(other_world(request.plan, World(world_size, f"WORLD_SIZE={world_size}")))
        if environment.rank == 0:  # the local launcher has told of what has no effect already
            request.check_plan()
    return _train(request, environment, claims=LAUNCHER_PID not in os.environ)


def _train(request: RunRequest, environment: Environment, *, claims: bool) -> int:
    from shoal.launch.signals import Signals

    signals = Signals(impatient=True)
    with signals.handled():  # before torch is imported, which takes seconds
        from shoal.cli.run import run

        return run(request, environment, signals, claims=claims)


def _plan(options: argparse.Namespace, given: list[str], started_at: float) -> int:
    from shoal.cli.plan import plan

    return plan(options)


def _verify(options: argparse.Namespace, given: list[str], started_at: float) -> int:
    from shoal.runs.job_file import parse_target
    from shoal.runs.request import RunRequest, devices_here

    steps = options.steps
    run = {"resume": False, "checkpoint_every": None, "no_telemetry": True, "require_certificate": None}
    numbered = None
    if options.out is None:
        numbered = f"{parse_target(options.job, options.set).name}-verify"
        options.out = f"runs/{numbered}"
    request = RunRequest.from_options(argparse.Namespace(**{**vars(options), **run}), started_at)
    request = replace(request, numbered=numbered).with_devices(devices_here).with_own_sums()
    request.check_plan()
    with request.claim() as lock:
        request = replace(request, out=lock.folder)
        code = _refused(request) if request.world_size > 1 else 0
        return int(ExitCode.USER) if code else _verified(request, int(steps))


def _verified(request: RunRequest, num_steps: int) -> int:
    from shoal.cli.verify import verify

    handlers = {number: signal.signal(number, _leave) for number in _STOPS}  # in order: the traces are removed
    try:
        return verify(request, num_steps)
    except ShoalError as error:
        print(error.render(), file=sys.stderr)
        if error.traceback_text:
            print(f"  traceback:      {request.out / 'errors' / 'verify.txt'}", file=sys.stderr)
        return int(ExitCode.USER)  # whatever it was: 1 says that the run diverged
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _bench(options: argparse.Namespace, given: list[str], started_at: float) -> int:
    from shoal.cli.bench import bench

    return bench(options, started_at)


_STOPS = (signal.SIGTERM, signal.SIGINT)


def _leave(number: int, frame: object) -> NoReturn:
    for again in _STOPS:
        signal.signal(again, signal.SIG_IGN)
    raise SystemExit(ExitCode.INTERRUPTED)


def _refused(request: RunRequest) -> int:
    """The exit code of what the job itself refuses, told; 0 where it may start. No rank has been started."""
    if not request.needs_look:
        return 0
    from shoal.launch.in_child import aside

    def look() -> dict[str, Any] | None:
        from shoal.training.preflight import admit

        return admit(request)

    error = aside(look)
    if error is None:
        return 0
    if error.get("traceback"):
        from shoal.runs.directory import RunDirectory, write_file

        errors = RunDirectory(request.out).errors
        errors.mkdir(exist_ok=True, parents=True)
        write_file(errors / "launcher.txt", error["traceback"])
    _tell(request, error)
    return int(from_json(error).exit_code)


def _tell(request: RunRequest, error: dict[str, Any]) -> None:
    print(from_json(error).render(), file=sys.stderr)
    if error.get("traceback") and (Path(request.out) / "errors").is_dir():
        print(f"  traceback:      {Path(request.out) / 'errors'}", file=sys.stderr)


def _launch(request: RunRequest, given: list[str], lock: DirectoryLock) -> int:
    from shoal.launch.local import LocalRun, launch

    arguments = [*given, "--out", str(request.out)]
    if request.wishes.devices is not None:
        arguments += ["--devices", str(request.wishes.devices)]
    code, error = launch(
        LocalRun(
            arguments,
            request.num_processes,
            request.threads_per_process,
            request.started_at,
            request.out / "logs",
            replaceable=request.plan.worker_ranks,
            lock=lock.descriptor,
        )
    )
    if error is not None:
        _tell(request, error)
    return code
