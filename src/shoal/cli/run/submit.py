"""Start of a run on an engine: from `--on`, or by processes that an engine has started, such as Ray Train's workers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cli.options import RunOptions
from shoal.errors import ExitCode, LaunchError, ShoalError, say_note
from shoal.hardware import cluster as find_cluster
from shoal.hardware.detect import cores
from shoal.launch.environment import DIRECTORY_FILE, INSIDE, LAUNCHER_PID, REQUEST_FILE, Environment
from shoal.launch.environments.torchrun import TORCHRUN
from shoal.launch.launchers.base import Submission, launcher
from shoal.launch.launchers.engine_rank import EngineRank, RankCommand, RankEnd
from shoal.launch.signals import Signals
from shoal.launch.supervise.ranks import LocalRun, launch
from shoal.launch.supervise.recovery import Recovery, verdict
from shoal.plans.legal import World, other_world, refuse
from shoal.runs.directory import RunDirectory
from shoal.runs.options import Origin, arguments_of
from shoal.runs.request import RunRequest, devices_here, dumped

# Options of this call that the ranks' command does not get.
_OWN = ("on", "dry_run", "max_restarts", "verify")


@dataclass(frozen=True)
class RunEnd:
    """End of a run's ranks: the exit code, the error if there is one, and the signals that this process received."""

    code: int
    error: ShoalError | None = None
    signals: tuple[int, ...] = ()


def submitted(
    options: RunOptions, request: RunRequest, signals: Signals | None = None, *, least: int | None = None
) -> int:
    """Submit the run to its engine and follow it, or print the submission; return the exit code.

    `least`: minimum number of processes, if fewer than requested are acceptable.
    Raises: CommandError for an invalid engine or option; PlanError; RunDirectoryError if the directory has a run.
    """
    engine, _, own = options.on.partition(":")
    engine_launcher = launcher(engine)
    request = request.with_devices(devices_here())
    request.check_plan()
    submission = submission_of(options, request, own, least)
    if options.dry_run:
        for name, text in engine_launcher.render(submission).items():
            print(f"# {name}\n{text.rstrip()}")
        return 0
    request.check()
    signals = signals or Signals(impatient=False)
    with signals.handled():
        return engine_launcher.start(submission, signals)


def submission_of(options: RunOptions, request: RunRequest, own: str = "", least: int | None = None) -> Submission:
    """Return the submission for a launcher, with a fixed run directory and number of processes."""
    fixed = replace(options, out=options.address or str(request.where.out.absolute()))
    if request.origin("layout") is Origin.CHOSEN:
        fixed = replace(fixed, devices=request.what.plan.num_processes)
    cluster, name = None, request.what.plan.prediction.get("cluster")
    has_name = isinstance(name, str) and name != "here" and not options.on.startswith("hosts")  # these are named
    if request.origin("plan") is Origin.FILE and has_name:
        try:
            cluster = find_cluster(str(name))
        except ShoalError:
            say_note(f"the plan's cluster, {name}, is not known here: its hosts and GPUs are not asked for")
    if least is not None:
        fixed = replace(fixed, devices=f"{least}:{request.what.plan.num_processes}")
    return Submission(
        arguments=("run", *arguments_of(fixed, without=_OWN)),
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", request.what.job.name) or "shoal",
        out=request.where.out.absolute(),
        folder=Path.cwd(),
        num_processes=request.what.plan.num_processes,
        least_processes=least,
        options=own,
        threads=1 if request.what.plan.execution.exact else None,
        num_hosts=-(-request.what.plan.num_processes // cluster.devices_per_host) if cluster is not None else None,
        gpus=cluster.device.kind == "gpu" if cluster is not None else None,
        cluster=cluster.name if cluster is not None else None,
        max_restarts=options.max_restarts,
        address=options.address,
    )


def started_on_host(options: RunOptions, request: RunRequest, environment: Environment) -> int:
    """Start this host's ranks of a run on several hosts, wait for them, and return the exit code.

    Rank 0 locks the run directory, since the hosts' processes do not know each other.
    """
    size = environment.world_size
    request = request.with_devices(size, Origin.OPTION)
    if environment.single_host:
        request = request.with_own_sums()
    refuse(other_world(request.what.plan, World(size, f"{size} processes on {environment.num_hosts} hosts")))
    run = LocalRun(
        ["run", *arguments_of(replace(options, out=request.where.shown, resume=request.course.resume), without=_OWN)],
        environment.num_to_start,
        1 if request.what.plan.execution.exact else max(1, cores() // environment.num_to_start),
        request.where.out / "logs",
        share=environment,
        unsaved=Recovery(0, RunDirectory(request.where.out)).unsaved_seconds,
    )
    signals = Signals(impatient=False)
    try:
        with signals.handled():
            ended = launch(run, signals)
    except LaunchError as error:
        if environment.engine != "kubernetes":
            raise
        print(error.render(), file=sys.stderr)  # for example a name that is not known yet; a new pod may succeed
        return int(ExitCode.RANK_LOST)
    if ended.error is not None:
        print(ended.error.render(), file=sys.stderr)
    return ended.code


def joined_request(request: RunRequest, environment: Environment) -> RunRequest:
    """Return the request of a rank that a launcher has started. Raises: PlanError for another number of processes."""
    size = environment.world_size
    request = request.with_devices(size, Origin.OPTION)
    if environment.single_host:
        request = request.with_own_sums()
    left_over = " (unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where no launcher has started this process)"
    refuse(other_world(request.what.plan, World(size, f"WORLD_SIZE={size}{left_over if size == 1 else ''}")))
    return request


_LOOK_SECONDS = 0.3


def is_worker(variables: Mapping[str, str]) -> bool:
    """Check whether this process is a worker of Ray Train in its training function."""
    train = sys.modules.get("ray.train")
    if train is None or "RANK" not in variables or INSIDE in variables or LAUNCHER_PID in variables:
        return False
    try:
        return str(train.get_context().get_world_rank()) == variables["RANK"]
    except Exception:  # outside of such a function; the error depends on Ray's version
        return False


def trained_in_worker(options: RunOptions, request: RunRequest, signals: Signals) -> RunEnd:
    """Train as this worker's rank and show rank 0's output.

    The rank is a separate process, so the worker keeps the process group that Ray created. The rank uses another port,
    since `MASTER_PORT` is in use.
    Collective: all workers.
    """
    import torch.distributed as dist

    environment = TORCHRUN.read(os.environ)
    assert environment is not None, "RANK is set"
    port = [0]
    with contextlib.closing(EngineRank()) as rank:
        if environment.rank == 0:
            port = [rank.listen(environment.address)]
        dist.broadcast_object_list(port, src=0)
        out = request.where.address or str(request.where.out.absolute())
        words = ("run", *arguments_of(replace(options, out=out), without=("on", "max_restarts")))
        variables = replace(environment, port=port[0], engine="ray").variables()
        logs = str(request.where.out / "logs") if environment.rank else ""
        rank.start(RankCommand(words, os.getcwd(), variables, logs))
        return _followed(rank, environment, signals)


def trained_as_rank(
    request: RunRequest, environment: Environment, folder: Path, signals: Signals
) -> tuple[RunRequest, RunEnd]:
    """Train as the rank of a program that a launcher has started once for each rank, and show rank 0's output.

    The rank is a separate process, whose bits do not depend on what the program did before. `folder`: for its request.
    Returns the request with the run directory that the ranks have claimed.
    """
    words, known = ("run", request.what.job.target), folder / "directory"
    (folder / "request.json").write_text(dumped(request), encoding="utf-8")
    variables = {REQUEST_FILE: str(folder / "request.json"), DIRECTORY_FILE: str(known)}
    with contextlib.closing(EngineRank()) as rank:
        logs = str(folder / "logs") if environment.rank else ""
        rank.start(RankCommand(words, os.getcwd(), environment.variables() | variables, logs))
        ended = _followed(rank, environment, signals)
    if known.is_file():
        request = replace(request, where=replace(request.where, out=Path(known.read_text(encoding="utf-8"))))
    return request, ended


def _followed(rank: EngineRank, environment: Environment, signals: Signals) -> RunEnd:
    """Wait for a rank's end, hand signals on to it, and show rank 0's output."""
    handed_on = 0
    while True:
        look = rank.look(_LOOK_SECONDS)
        if environment.rank == 0 and look.text:
            print(look.text, end="", flush=True)
        if look.code is not None:
            break
        if len(signals.received) > handed_on:
            handed_on = len(signals.received)
            rank.tell(signal.SIGKILL if signals.twice else signals.received[0])
    end = RankEnd(environment.rank, os.uname().nodename, look)
    return RunEnd(*verdict([end.ended()], signals), tuple(signals.received))
