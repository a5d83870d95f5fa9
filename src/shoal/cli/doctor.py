"""The `shoal doctor` command: an examination of this machine, or of a run on disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from shoal.cli.options import DoctorOptions
from shoal.errors import CommandError, ExitCode
from shoal.hardware.health import HealthCheck, Severity, judged, worst
from shoal.hardware.host_facts import host_facts

_SIGNS = {Severity.OK: "ok", Severity.NOTE: "note", Severity.WARNING: "SLOW", Severity.ERROR: "FAULT"}


def doctor(options: DoctorOptions) -> ExitCode:
    """Examine this machine, or a run. Raises: CommandError, LaunchError; as `shoal.cli.doctor_of_run`."""
    if options.run is not None:
        if options.hosts:
            raise CommandError(
                given=f"shoal doctor {options.run} --hosts {options.hosts}",
                conflict="ports between hosts are of machines, and a run is given",
                remedy="leave one of them out",
            )
        from shoal.cli.doctor_of_run import examine  # imports plans, which are not needed for a machine

        return examine(options)
    given = {"--job": options.job, "--try": options.try_out, "--steps": options.steps}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise CommandError(
            given=f"shoal doctor {' '.join(wrong)}",
            conflict=f"{wrong[0]} is about a run, and none is given",
            remedy="write shoal doctor RUN, or leave it out to examine this machine",
        )
    facts = host_facts(Path(options.folder))
    checks = judged(facts)
    if options.hosts:
        from shoal.launch.launchers.ssh_ports import between  # imported late: rarely used

        checks = (*checks, *between(options.hosts))
    if options.json:
        told = {"host": facts.name, "severity": worst(checks).value, "checks": [asdict(check) for check in checks]}
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(lines(facts.name, checks)))
    return ExitCode.FAILED if worst(checks) is Severity.ERROR else ExitCode.DONE


def lines(host: str, checks: tuple[HealthCheck, ...]) -> list[str]:
    """Format checks for people, with a summary as the last line."""
    width = max(len(check.subject) for check in checks)
    found = [host]
    for check in checks:
        found.append(f"  {_SIGNS[check.severity]:<5} {check.subject:<{width}}  {check.seen}")
        if check.remedy:
            found.append(f"        {'':<{width}}  -> {check.remedy}")
    faults, slow = (sum(c.severity is s for c in checks) for s in (Severity.ERROR, Severity.WARNING))
    if not faults and not slow:
        return [*found, "nothing stands in the way of training here"]
    return [*found, f"{faults} that keep training from working, {slow} that make it slow or fragile"]
