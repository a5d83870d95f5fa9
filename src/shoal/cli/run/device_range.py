"""Range of the number of devices, `--devices 4:16`: limited by the available ones, and on this host by the planner."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from shoal.cli.options import RunOptions
from shoal.errors import CommandError, LaunchError, from_json
from shoal.hardware.detect import cores, visible_gpus
from shoal.launch.environment import Environment, inside_run
from shoal.launch.supervise.child import in_child
from shoal.plans import Plan
from shoal.plans.plan import described
from shoal.runs.options import whole_number
from shoal.runs.request import dumped, loaded

_RANGE = re.compile(r"(\d+):(\d+)")
# Engines whose launcher chooses the number when it knows the available devices.
ELASTIC = ("hosts", "slurm", "ray", "spark")


@dataclass(frozen=True)
class DeviceRange:
    """Inclusive limits of the number of devices."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def range_of(options: RunOptions) -> DeviceRange | None:
    """Return the range in the options, or None if they have none. Raises: CommandError for an invalid range."""
    match = _RANGE.fullmatch(str(options.devices)) if options.devices is not None else None
    if match is None:
        return None
    limits = DeviceRange(int(match[1]), int(match[2]))
    if not 1 <= limits.least <= limits.most:
        raise CommandError(
            given=f"--devices {limits}", conflict="the first is the least number, from 1", remedy="write --devices 4:16"
        )
    if options.plan is not None:
        raise CommandError(
            given=f"--devices {limits} --plan {options.plan}",
            conflict="a plan is for one number of devices",
            remedy="leave --plan out: the planner makes one for what there is; or write a number",
        )
    return limits


def with_number(options: RunOptions, environment: Environment | None) -> RunOptions:
    """Return the options with a number of devices or a plan. Raises: CommandError; LaunchError for too few devices."""
    limits = range_of(options)
    if limits is None:
        return replace(options, devices=whole_number("devices", options.devices, 1))
    if environment is not None:
        return replace(options, devices=_started(limits, environment))
    engine = options.on.partition(":")[0]
    if engine == "local":
        found_gpus = visible_gpus()
        there, kind = (found_gpus, "GPUs") if found_gpus else (cores(), "cores")
        if there < limits.least:
            raise LaunchError(
                given=f"--devices {limits}",
                conflict=f"this host has {there} {kind}",
                remedy=f"write --devices {there}, or start it where there are more",
            )
        most = min(limits.most, there)
        if options.resume or options.resume_if_exists:
            print(f"note: --devices {limits} is {most}: so many {kind} are here", file=sys.stderr)
            return replace(options, devices=most)
        choice = in_child(lambda: _planned(options, replace(limits, most=most)))
        if "error" in choice:
            raise from_json(choice["error"])
        plan = loaded(Plan, choice["plan"]) if choice["plan"] is not None else None
        number = plan.num_processes if plan is not None else most
        why = f"the planner chose {described(plan)}" if plan is not None else "the planner has no plan that fits"
        print(f"note: --devices {limits} is {number} of {there} {kind} here: {why}", file=sys.stderr)
        if plan is None or options.exact:
            return replace(options, devices=number)
        return replace(options, devices=None, plan=plan)
    if engine not in ELASTIC:
        raise CommandError(
            given=f"--devices {limits} --on {options.on}",
            conflict=f"{engine} is asked for one number of processes, and gives it",
            remedy=f"write a number; a range is for local, torchrun, {', '.join(ELASTIC)}",
        )
    return replace(options, devices=limits.most)


def _started(limits: DeviceRange, environment: Environment) -> int:
    """Return the number of processes that an engine has started. Raises: LaunchError if it is out of range."""
    size = environment.world_size
    if limits.least <= size <= limits.most:
        return size
    raise LaunchError(
        given=f"--devices {limits}, and {size} processes by {environment.engine or 'a launcher'}",
        conflict=f"the number of processes is not within {limits}",
        remedy="start another number, or write other limits",
    )


def _planned(options: RunOptions, limits: DeviceRange) -> dict[str, Any]:
    """Return the fastest plan within the limits, as JSON.

    Call this in a child process, since it loads torch and the job.
    """
    from shoal.cli.options import PlanOptions
    from shoal.cli.plan import answered
    from shoal.distributed.failures import as_shoal_error, to_json

    try:
        with inside_run(os.environ):
            plan_options = PlanOptions(
                job=str(options.job), set=options.set, max_devices=limits.most, precision=options.precision
            )
            points = answered(plan_options).curve.points
    except (Exception, SystemExit) as caught:
        return {"error": to_json(as_shoal_error(caught), 0, "")}
    fit = [p.best for p in points if p.best is not None and limits.least <= p.devices <= limits.most]
    best = min(fit, key=lambda candidate: candidate.rank, default=None)
    return {"plan": dumped(best.plan) if best is not None else None}
