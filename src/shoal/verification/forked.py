"""Forked ranks: the ranks of a run as children of this process, so that a job made of lambdas needs no file."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from shoal.distributed.failures import as_shoal_error, to_json
from shoal.distributed.process_setup import prepare_process
from shoal.errors import LaunchError, RankLostError, from_json
from shoal.hardware.detect import GPU_FOLDER
from shoal.jobs.job import Job
from shoal.launch.environment import LAUNCHER_PID, Environment
from shoal.launch.environments.detect import joined
from shoal.launch.supervise.child import die_with_launcher, fork
from shoal.plans.resolve import CompletePlan
from shoal.training.setup.engine import Options
from shoal.verification.traced_run import AS_PLANNED, runs, trace_rank

_POLL_SECONDS = 0.005
# After one rank has failed, the others fail in their next collective, or are killed after this time.
_GRACE_SECONDS = 5.0


def trace_forked(
    make: Callable[[], Job],
    plan: CompletePlan,
    folder: Path,
    num_steps: int,
    num_threads: int = 1,
    *,
    options: Options = AS_PLANNED,
    shares_gpu: bool = False,
) -> None:
    """Trace the plan's `runs` of `make()` on this host, each into the folder of its name.

    `options`: the engine's. `shares_gpu`: whether ranks may share a GPU.
    Raises: the error of a rank; RankLostError.
    """

    def trace(ranks: CompletePlan, into: Path, environment: Environment) -> None:
        prepare_process(ranks.execution.exact, None)
        if not ranks.execution.exact:
            torch.set_num_threads(num_threads)
        environment = replace(environment, shares_gpu=shares_gpu)
        trace_rank(make(), ranks, environment, into, num_steps, options=options)

    with contextlib.ExitStack() as groups:
        waits = []
        for kind, ranks in runs(plan).items():
            work = functools.partial(trace, ranks, folder / kind)
            group = forked(ranks.num_processes, work, folder / kind, aloud=kind == "parallel")
            waits.append(groups.enter_context(group))
            if GPU_FOLDER.exists():  # one after the other: two models may not fit on a GPU
                waits.pop()()
        for wait in waits:
            wait()


@contextlib.contextmanager
def forked(
    world_size: int, work: Callable[[Environment], None], folder: Path, aloud: bool = True
) -> Iterator[Callable[[], None]]:
    """Run `work` on `world_size` ranks, children of this process; the context yields a function that waits for them.

    `folder`: a new folder for logs and errors. `aloud`: rank 0 prints instead of writing a log. Raises: the error of a
    rank; RankLostError; LaunchError under a launcher or after CUDA was used.
    """
    launched = joined(os.environ)
    if launched is not None:
        raise LaunchError(
            given=f"a verification under a launcher (RANK={launched.rank}, WORLD_SIZE={launched.world_size})",
            conflict="it starts its ranks itself, all on this host",
            remedy=f"call it once and without the launcher, for {launched.world_size} devices",
        )
    if torch.cuda.is_initialized():
        raise _cuda_in_use()
    folder.mkdir(parents=True)
    children: dict[int, int] = {}
    key = secrets.token_hex(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            for rank in range(world_size):
                descriptor = listener.fileno() if rank == 0 else None
                port = listener.getsockname()[1]
                environment = Environment(rank, world_size, rank, world_size, port=port, listen_fd=descriptor, key=key)
                log = None if rank == 0 and aloud else _log(folder, rank)
                children[fork(functools.partial(_work, work, environment, folder, log, os.getpid()))] = rank
            yield lambda: _wait(children, folder)
        finally:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _work(
    work: Callable[[Environment], None], environment: Environment, folder: Path, log: Path | None, parent: int
) -> None:
    """Run `work` as a rank, a child of `parent`; write an error to the folder, and raise it."""
    try:
        os.environ[LAUNCHER_PID] = str(parent)
        die_with_launcher()
        if GPU_FOLDER.exists() and torch.cuda._is_in_bad_fork():  # as after torch.cuda.is_available()
            raise _cuda_in_use()
        if environment.world_size > 1:
            os.environ.update(environment.variables())
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
        torch.set_num_threads(1)  # the parent's threads do not exist in a fork
        _refuse_lost_threads()
        work(environment)
    except BaseException as error:
        document = to_json(as_shoal_error(error), environment.rank, socket.gethostname())
        (folder / f"error-{environment.rank}.json").write_text(json.dumps(document), encoding="utf-8")
        raise


def _wait(children: dict[int, int], folder: Path) -> None:
    """Wait until all ranks have ended, or until the grace period after a failure; remove ended ranks from `children`.

    Raises: a rank's own error; if there is none, RankLostError for a silent death; else a PeerError.
    """
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
                    lost = lost or _lost(rank, status, folder)
        time.sleep(_POLL_SECONDS)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("error-*.json"))]
    own = [t for t in documents if t["kind"] != "PeerError"]
    if not own and lost is not None:
        raise lost
    for document in own or documents:
        raise from_json(document)


def _cuda_in_use() -> LaunchError:
    return LaunchError(
        given="a verification in a process that has asked or used CUDA",
        conflict="its ranks are forked, and CUDA does not survive a fork",
        remedy="call it before anything touches the GPU, or use the command: shoal verify JOBFILE",
    )


def _refuse_lost_threads() -> None:
    """Check that a backward works in this fork. Raises: LaunchError if the parent had autograd's own threads.

    The parent has these threads after a backward with an accelerator, or after backwards nested 60 deep. torch reports
    them only by failing.
    """
    try:
        torch.ones((), requires_grad=True).square().backward()
    except RuntimeError as error:
        if "fork-based" not in str(error):
            raise
        raise LaunchError(
            given="a verification in a process whose earlier backward has started threads of torch's autograd",
            conflict="its ranks are forked, and these threads do not survive a fork: the job is not at fault",
            remedy="call it before that backward, or use the command: shoal verify JOBFILE",
        ) from None


def _log(folder: Path, rank: int) -> Path:
    return folder / f"log-{rank}.txt"


def _lost(rank: int, status: int, folder: Path) -> RankLostError:
    log = _log(folder, rank)
    lines = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
    said = "".join(f"\n{line[:200]}" for line in lines)
    return RankLostError(
        given=f"rank {rank} of the run to verify",
        conflict=f"it ended with code {os.waitstatus_to_exitcode(status)} and without a word{said}",
        remedy="try the plan with shoal run",
    )
