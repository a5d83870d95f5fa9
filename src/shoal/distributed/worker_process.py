"""Exit protocol of a rank's process towards the launcher that started it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.distributed.failures import as_shoal_error, to_json
from shoal.errors import ExitCode, InUseError, LaunchError, PeerError, ShoalError
from shoal.launch.environment import REPORT_FILE, Environment
from shoal.launch.process_control import die_with_launcher, name_process
from shoal.runs.address import RunAddress, is_address
from shoal.runs.directory import write_file


def _end_at_once(code: ExitCode) -> None:
    """Ends this rank, for which a new one is to start: torch's own end takes half a second on a free core.

    Functions that user code has registered with atexit are not called: one of torch's or of a library may wait for the
    peer that is lost, and ranks that were killed have not called theirs either.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _write_report(path: str, text: str) -> None:
    """Writes a report on disk, or at an address. Raises: OSError."""
    if is_address(path):
        folder, _, name = path.rpartition("/")
        RunAddress(folder).write(name, text.encode())
    else:
        write_file(Path(path), text)


def as_rank(environment: Environment, work: Callable[[], ExitCode | None], *, may_end_at_once: bool = True) -> ExitCode:
    """Exit code of `work`, done as a rank; the launcher is told how it ended, or an error is printed without one.

    `may_end_at_once`: whether a rank that lost a peer ends here, without what its callers and atexit would still do.
    """
    die_with_launcher()
    if environment.world_size > 1:
        name_process(f"shoal-rank-{environment.rank}")
    error: ShoalError | None = None
    try:
        code = work() or ExitCode.DONE
    except (Exception, SystemExit) as caught:
        error = as_shoal_error(caught)
        if error.rank is None and environment.world_size > 1:
            error.rank, error.host = environment.rank, platform.node()
        code = error.exit_code
        # Pods come and go one by one: who has missed the others, or the end of a lost one, is to try again.
        if environment.engine == "kubernetes" and isinstance(error, LaunchError | InUseError):
            code = ExitCode.RANK_LOST
    report = os.environ.get(REPORT_FILE)
    if report:
        told = to_json(error, environment.rank, platform.node()) if error else None
        path = report.replace("%r", str(environment.rank))  # of an engine's ranks, which have one variable
        try:
            _write_report(path, json.dumps({"exit_code": int(code), "error": told}))
        except OSError:  # the launcher's folder is on no disk of this host
            if error is not None:
                print(error.render(), file=sys.stderr)
        else:
            if may_end_at_once and isinstance(error, PeerError) and not error.everywhere:
                _end_at_once(code)
    elif error is not None and not (isinstance(error, PeerError) and error.everywhere):  # then the culprit says it
        print(error.render(), file=sys.stderr)
    return code
