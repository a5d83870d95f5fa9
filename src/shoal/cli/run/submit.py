"""Start of a run on an engine from `--on`, and of a host's ranks if an engine started one process per host."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from shoal.cli.options import RunOptions, arguments_of
from shoal.errors import ExitCode, LaunchError, ShoalError
from shoal.hardware import cluster as find_cluster
from shoal.hardware.detect import cores
from shoal.hardware.values import Cluster
from shoal.launch.environment import Environment
from shoal.launch.launchers.base import Submission, launcher
from shoal.launch.signals import Signals
from shoal.launch.supervise.ranks import LocalRun, launch
from shoal.launch.supervise.recovery import Recovery
from shoal.plans.legal import World, other_world, refuse
from shoal.runs.directory import RunDirectory
from shoal.runs.options import Origin
from shoal.runs.request import RunRequest, devices_here

# Options of this call that the ranks' command does not get.
_OWN = ("on", "dry_run", "max_restarts")


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
    cluster = _cluster_of(request)
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


def _cluster_of(request: RunRequest) -> Cluster | None:
    """Return the cluster that the plan was made for, or None if it is unknown."""
    name = request.what.plan.prediction.get("cluster")
    if request.origin("plan") is not Origin.FILE or not isinstance(name, str) or name == "here":
        return None
    try:
        return find_cluster(name)
    except ShoalError:
        print(
            f"note: the plan's cluster, {name}, is not known here: its hosts and GPUs are not asked for",
            file=sys.stderr,
        )
        return None


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
