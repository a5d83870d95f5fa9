"""The `shoal resize` command: continues a training run with another number of processes."""

from __future__ import annotations

import time
from pathlib import Path

from shoal.cli.options import ResizeOptions
from shoal.errors import CommandError, ExitCode
from shoal.plans.plan import read_plan
from shoal.report.quantities import several
from shoal.runs.address import is_address
from shoal.runs.directory import RunDirectory, about, is_held, newest, read_json
from shoal.runs.request import with_processes
from shoal.runs.run_files import read_run

_LOOK_SECONDS = 0.1


def resize(options: ResizeOptions) -> ExitCode:
    """Request another number of processes for a run, and wait until the run uses it.

    Raises: RunDirectoryError if there is no run; CommandError if the run does not train now or cannot be resized;
    PlanError if the number does not fit its job and layout.
    """
    given = f"shoal resize {options.run} {options.devices}"
    if is_address(options.run):
        raise CommandError(
            given=given,
            conflict="ranks read the request in a run directory on disk, and this one is at an address",
            remedy=f"stop the run, and start it again with --resume --out {options.run} --devices {options.devices}",
        )
    files = read_run(Path(options.run))
    directory = RunDirectory(files.path)
    if not files.is_held:
        raise CommandError(
            given=given,
            conflict="no run trains there now",
            remedy=f"continue it with: shoal run ... --resume --out {options.run} --devices {options.devices}",
        )
    before = newest(directory.path)
    known = about(directory.path, before)
    if not known.get("resizable"):
        raise CommandError(
            given=given,
            conflict="an engine has started its ranks, or servers store its parameters",
            remedy=f"stop it, and start it again with --resume --out {options.run} --devices {options.devices}",
        )
    plan = read_plan(directory.plan)
    # The run's own GPUs, which this command may not see. If their number is unknown, the run itself checks.
    with_processes(plan, options.devices, read_json(directory.job) or {}, known.get("gpus", 0))
    if plan.layout.world_size == options.devices:
        print(f"{options.run} trains on {several(options.devices, 'process')} already")
        return ExitCode.DONE
    directory.request_resize(options.devices)
    try:
        while directory.requested_devices() == options.devices:
            if not is_held(directory.path):
                directory.end_resize()
                raise CommandError(
                    given=given,
                    conflict="the run ended before it reached the end of a step, where it reads the request",
                    remedy="do nothing if it has completed; else continue it with shoal run ... --resume",
                )
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        directory.end_resize()
        return ExitCode.INTERRUPTED
    now = newest(directory.path)
    if now == before or about(directory.path, now).get("world_size") != options.devices:
        raise CommandError(
            given=given,
            conflict="the run did not continue with this number: it ended, or another request replaced this one",
            remedy="read its output; continue a run that has ended with shoal run ... --resume",
        )
    print(f"{options.run} goes on with {several(options.devices, 'process')}")
    return ExitCode.DONE
