"""Exit protocol between a rank's process and the launcher that started it."""

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
from shoal.launch.supervise.child import die_with_launcher, name_process
from shoal.runs.address import RunAddress, is_address
from shoal.runs.directory import write_file


def as_rank(environment: Environment, work: Callable[[], ExitCode | None], *, may_end_at_once: bool = True) -> ExitCode:
    """Run `work` as a rank and return its exit code. Report the end to the launcher; without one, print an error.

    `may_end_at_once`: whether a rank that lost a peer ends here, without the rest of its callers and atexit.
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
        # Pods start and end one by one: a pod that missed the others, or a lost pod's end, must be restarted.
        if environment.engine == "kubernetes" and isinstance(error, LaunchError | InUseError):
            code = ExitCode.RANK_LOST
    report = os.environ.get(REPORT_FILE)
    if report:
        document = to_json(error, environment.rank, platform.node()) if error else None
        path = report.replace("%r", str(environment.rank))  # an engine's ranks share one variable
        try:
            text = json.dumps({"exit_code": int(code), "error": document})
            if is_address(path):
                folder, _, name = path.rpartition("/")
                RunAddress(folder).write(name, text.encode())
            else:
                write_file(Path(path), text)
        except OSError:  # the launcher's folder is not on this host
            if error is not None:
                print(error.render(), file=sys.stderr)
        else:
            if may_end_at_once and isinstance(error, PeerError) and not error.everywhere:
                # A new rank replaces this one. torch's own shutdown takes half a second, and a function that user code
                # has registered with atexit may wait for the lost peer. Killed ranks do not call theirs either.
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                os._exit(code)
    elif error is not None and not (isinstance(error, PeerError) and error.everywhere):  # then the culprit prints it
        print(error.render(), file=sys.stderr)
    return code
