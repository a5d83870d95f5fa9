"""Plan of a run from `--layout`, `--plan auto` and `--devices auto`, before any rank starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import RunOptions
from shoal.errors import CommandError, PlanError, from_json, nearest, say_note
from shoal.hardware import cluster as find_cluster
from shoal.hardware import dump
from shoal.hardware.detect import cores, visible_gpus
from shoal.jobs.job_file import JobRequest, load, parse_target
from shoal.launch.environment import Environment, inside_run
from shoal.launch.launchers.ssh_cluster import ask_hosts
from shoal.launch.supervise.child import in_child
from shoal.plans import Plan
from shoal.plans.legal import World, other_world, refuse
from shoal.plans.plan import DEGREES, described, plan_text
from shoal.plans.resolve import without_step
from shoal.runs.directory import RunDirectory, default_directory, write_file
from shoal.runs.request import dumped, loaded

if TYPE_CHECKING:
    from shoal.planner.search.search import Candidate

AUTO = "auto"


def with_plan(options: RunOptions, environment: Environment | None) -> RunOptions:
    """Return the options with the planner's plan in place of `--plan auto` and `--devices auto`.

    Raises: CommandError for options that exclude each other; PlanError if nothing fits.
    """
    asks = options.plan == AUTO or options.devices == AUTO
    _check(options, asks)
    if not asks:
        return options
    if environment is not None:
        raise CommandError(
            given=f"{_spelled(options)}, in a process that {environment.engine or 'a launcher'} has started",
            conflict="the planner chooses the number of processes, and they run already",
            remedy="write the plan first, with shoal plan JOB -o plan.toml, and give it with --plan plan.toml",
        )
    if options.resume or options.resume_if_exists:
        out = Path(options.out) if options.out else default_directory(_target(options).name, True)
        if RunDirectory(out).plan.exists():
            devices = None if options.devices == AUTO else options.devices
            on = f", on {devices} devices" if devices is not None else ""
            say_note(f"{_spelled(options)}: the run goes on with its own plan{on}")
            return replace(options, plan=None, devices=devices, cluster=None)
    engine, _, of_engine = options.on.partition(":")
    if engine == "local" and ":" in str(options.devices) and options.cluster is None:
        return replace(options, plan=None)  # the planner is asked for a range anyway
    if ":" in str(options.devices):
        raise CommandError(
            given=f"--devices {options.devices} {_spelled(options)}",
            conflict="a plan for a cluster has one number of devices",
            remedy="write the most that it may take, such as --devices 16",
        )
    hosts, where = None, options.cluster or "this machine"
    if engine == "hosts" and options.cluster is None:
        hosts = ask_hosts(of_engine)
        description = _beside(options, "cluster.toml")
        write_file(description, dump(hosts.cluster))
        options = replace(options, cluster=str(description))
        kind = hosts.cluster.device.name if hosts.cluster.device.kind == "gpu" else "cores"
        where = f"{', '.join(hosts.hosts)} ({hosts.cluster.num_devices} {kind})"
    elif engine != "local" and options.cluster is None:
        raise CommandError(
            given=f"{_spelled(options)} --on {options.on}",
            conflict=f"the devices that {engine} will give are not known here",
            remedy="add --cluster, such as --cluster 8xH100, or a file that shoal bench wrote there",
        )
    most = None
    if engine == "local" and not (options.dry_run and options.cluster is not None):
        most = visible_gpus() or cores()
        if options.cluster is not None:
            given = f"{_spelled(options)} --cluster {options.cluster}"
            cluster = find_cluster(options.cluster or "here")
            here, own_kind = f"{most} {'GPUs' if visible_gpus() else 'cores'}", "gpu" if visible_gpus() else "cpu"
            bounded = int(options.devices) if str(options.devices).isdecimal() else cluster.num_devices  # type: ignore[arg-type]
            if cluster.device.kind != own_kind or min(bounded, cluster.num_devices) > most:
                raise CommandError(
                    given=given,
                    conflict=f"without --on the run trains on this machine, which has {here}",
                    remedy="write --dry-run for the plan alone, --on ENGINE to train there, or leave --cluster out",
                )
            say_note(f"{given}: planned for {options.cluster}, trains on this machine, which has {here}")
    if isinstance(options.devices, int) or (options.devices or "").isdecimal():
        most = min(int(options.devices or 1), most or int(options.devices or 1))
    plan, lines = ask_planner(options, most, where=where)
    assert plan is not None, "without limits the planner has a plan, or an error"
    for line in lines:
        say_note(line)
    if options.exact:  # exact mode has its own microbatches and sums
        degrees = {name: getattr(plan, name) for name in ("layout", "shard", "tensor", "pipeline")}
        plan = Plan().model_copy(update=degrees)
    chosen: Plan | str = plan
    if engine != "local" or options.dry_run:  # the engine's processes, or whoever starts it later, read a file
        file = _beside(options, "plan.toml").absolute()
        write_file(file, plan_text(plan))
        seen = ", which all hosts must see" if engine != "local" else ""
        say_note(f"the plan is in {file}{seen}")
        chosen = str(file)
    if hosts is not None:
        options = replace(options, on=hosts.for_devices(plan.num_processes))
    return replace(options, plan=chosen, devices=None, cluster=None)


def with_layout(plan: Plan, layout: str, devices: int | None) -> Plan:
    """Return the plan with the degrees in a text such as `data=2,tensor=2`; other degrees are 1.

    `devices`: number of processes that is asked for beside it. Raises: PlanError.
    """
    degrees: dict[str, int] = {}
    for part in layout.split(","):
        axis, _, number = part.strip().partition("=")
        wrong = None
        if axis not in DEGREES:
            wrong = f"no axis is called {axis}{nearest(axis, list(DEGREES))}"
        elif axis in degrees:
            wrong = f"{axis} is there twice"
        elif not number.isdecimal() or int(number) < 1:
            wrong = f"{axis} takes a whole number of at least 1"
        if wrong is not None:
            raise PlanError(
                given=f"--layout {layout}",
                conflict=wrong,
                remedy=f"write --layout data=2,tensor=2, say, with axes of {', '.join(DEGREES)}",
            )
        degrees[axis] = int(number)
    plan = plan.with_sections(
        layout={axis: degrees.get(axis, 1) for axis in DEGREES} | {"shares": []}, shard={"sizes": []}
    )
    if devices is not None:
        refuse(other_world(plan, World(devices, f"--devices {devices}")))
    return plan


def _check(options: RunOptions, asks: bool) -> None:
    """Refuse options that exclude each other. Raises: CommandError."""
    plan = options.plan if isinstance(options.plan, str) else "..."
    given, conflict, remedy = "", "", ""
    if options.layout is not None and options.plan is not None:
        given, conflict = f"--layout {options.layout} --plan {plan}", "each of them is a plan"
        remedy = "write one of --plan FILE, --plan auto and --layout"
    elif options.devices == AUTO and (options.layout is not None or options.plan not in (None, AUTO)):
        given = f"--devices auto {f'--layout {options.layout}' if options.layout else f'--plan {plan}'}"
        conflict, remedy = "a plan has its number of devices", "leave --devices out"
    elif options.cluster is not None and not asks:
        given, conflict = f"--cluster {options.cluster}", "only the planner asks for it"
        remedy = "add --plan auto, or leave --cluster out"
    elif options.share_gpu and (asks or ":" in str(options.devices)):
        given = f"--share-gpu {_spelled(options) if asks else f'--devices {options.devices}'}"
        conflict = "the planner expects a GPU for each process"
        remedy = "write --devices 2 or --layout tensor=2, say, or leave --share-gpu out"
    else:
        return
    raise CommandError(given=given, conflict=conflict, remedy=remedy)


def _beside(options: RunOptions, suffix: str) -> Path:
    """Return the path of a file beside the run directory, in a folder that exists."""
    out = Path(options.out) if options.out and options.address is None else Path("runs") / _target(options).name
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.with_name(f"{out.name}.{suffix}")


def _spelled(options: RunOptions) -> str:
    return "--devices auto" if options.devices == AUTO else "--plan auto"


def _target(options: RunOptions) -> JobRequest:
    return parse_target(options.job, options.set, options.config)


def ask_planner(
    options: RunOptions, most: int | None, least: int | None = None, where: str = "this machine"
) -> tuple[Plan | None, list[str]]:
    """Return the planner's plan for at most `most` devices, with two lines on it. A child process loads torch and job.

    `least`: the fewest devices; the plan is then None if none fits. `where`: the devices, in words.
    Raises: the error of the job or of the planner.
    """

    def search() -> dict[str, Any]:
        from shoal.cli.options import PlanOptions
        from shoal.cli.plan import answered
        from shoal.distributed.failures import as_shoal_error, to_json
        from shoal.report.quantities import seconds, size

        try:
            target = _target(options)
            name = f"{target.target}:{target.function or 'job'}"
            cluster, precision = options.cluster or "here", options.precision
            wanted = PlanOptions(
                job=name, cluster=cluster, max_devices=most, precision=precision, set=options.set, config=options.config
            )
            with inside_run(os.environ):
                answer = answered(wanted, (load(target).job, name), data_only=options.devices == AUTO)
        except (Exception, SystemExit) as caught:
            return {"error": to_json(as_shoal_error(caught), 0, "")}
        points = {point.devices: point.best for point in answer.curve.points if point.best is not None}
        best: Candidate | None = answer.best
        if least is not None:
            within = (one for devices, one in points.items() if devices >= least and (most is None or devices <= most))
            best = min(within, key=lambda candidate: candidate.rank, default=None)
        if best is None:
            return {"plan": None, "lines": []}
        gain = ""
        if 1 in points and best.plan.num_processes > 1:
            times = points[1].prediction.step_seconds / best.prediction.step_seconds
            gain = f", {times:.2g} times as fast as one device"
        took = f"{_spelled(options)}: {described(best.plan)} on {where}"
        step, memory = seconds(best.prediction.step_seconds), size(best.prediction.peak_bytes)
        reasons = f"shoal plan {target.target}" + (f" --cluster {options.cluster}" if options.cluster else "")
        lines = [f"{took}: {step} a step{gain}, {memory} a device", f"for the reasons: {reasons}"]
        return {"plan": dumped(best.plan), "lines": lines}

    choice = in_child(search)
    if "error" in choice:
        error = from_json(choice["error"])
        error.rank = None  # none has started
        raise error
    return without_step(loaded(Plan, choice["plan"])) if choice["plan"] is not None else None, choice["lines"]
