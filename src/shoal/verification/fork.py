"""Fork: the ranks of a run as children of this process, so that a job made of lambdas needs no file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.environment import Environment
from shoal.errors import LaunchError, RankLostError, from_json
from shoal.faults import as_shoal_error, to_json
from shoal.job import Job
from shoal.plan.plan import Plan
from shoal.startup import prepare_process
from shoal.verification.parallel import trace_rank

_POLL_SECONDS = 0.005
# After one rank has failed the others learn of it in their next collective, or are ended.
_GRACE_SECONDS = 5.0


def trace_forked(job: Job, plan: Plan, folder: Path, num_steps: int) -> None:
    """Runs the plan's ranks on this host and leaves their traces. Raises: what a rank raised; RankLostError."""

    def work(environment: Environment) -> None:
        prepare_process(plan.execution.exact, 1)
        trace_rank(job, plan, environment, folder, num_steps)

    forked(plan.degrees.world_size, work, folder)


def forked(world_size: int, work: Callable[[Environment], None], folder: Path) -> None:
    """Does `work` on so many ranks, each a child of this process. Raises: what a rank raised; RankLostError."""
    if torch.cuda.is_initialized():
        raise LaunchError(
            given="shoal.verify() in a process that has used a GPU",
            conflict="its ranks are forked, and CUDA does not survive a fork",
            remedy="call it before anything touches the GPU, or use the command: shoal verify JOBFILE",
        )
    children: dict[int, int] = {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            for rank in range(world_size):
                descriptor = listener.fileno() if rank == 0 else None
                port = listener.getsockname()[1]
                environment = Environment(rank, world_size, rank, world_size, port=port, listen_fd=descriptor)
                children[_fork(work, environment, folder)] = rank
            lost = _wait(children, folder)
        finally:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    _raise_root(folder, lost)


def _fork(work: Callable[[Environment], None], environment: Environment, folder: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none that the parent had
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        work(environment)
        code = 0
    except BaseException as error:
        told = to_json(as_shoal_error(error), environment.rank, socket.gethostname())
        (folder / f"error-{environment.rank}.json").write_text(json.dumps(told), encoding="utf-8")
    finally:
        os._exit(code)


def _wait(children: dict[int, int], folder: Path) -> RankLostError | None:
    """Waits until all have ended, or one has failed and the others do not end; removes those that have."""
    lost: RankLostError | None = None
    deadline: float | None = None
    while children and (deadline is None or time.monotonic() < deadline):
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            rank = children.pop(pid)
            if status:
                deadline = deadline or time.monotonic() + _GRACE_SECONDS
                if not (folder / f"error-{rank}.json").exists():
                    lost = lost or _lost(rank, status)
        time.sleep(_POLL_SECONDS)
    return lost


def _raise_root(folder: Path, lost: RankLostError | None) -> None:
    """Raises: a rank's own error before its peers' complaints, and a silent death before those."""
    told = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("error-*.json"))]
    own = [t for t in told if t["kind"] != "PeerError"]
    if not own and lost is not None:
        raise lost
    for document in own or told:
        raise from_json(document)


def _lost(rank: int, status: int) -> RankLostError:
    return RankLostError(
        given=f"rank {rank} of the run to verify",
        conflict=f"it ended with code {os.waitstatus_to_exitcode(status)} and without a word",
        remedy="try the plan with shoal run",
    )
