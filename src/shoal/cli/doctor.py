"""The `shoal doctor` command: an examination of this machine, of a run on disk, or of a training script."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from shoal.cli.options import DoctorOptions
from shoal.cli.script import place_of, refuse_script_options, script_of
from shoal.doctor.health import Severity, judged, lines, worst
from shoal.doctor.host_facts import host_facts
from shoal.errors import CommandError, ExitCode
from shoal.launch.signals import exiting, stop_signals

_SCRIPT_STEPS = 20


def doctor(options: DoctorOptions) -> ExitCode:
    """Examine this machine, a run or a script. Raises: CommandError, LaunchError; as `run_diagnosis.examine`."""
    if options.script is not None:
        script = script_of("doctor", options)
        from shoal.doctor.script_diagnosis import diagnose_script  # torch

        with exiting(stop_signals(), ExitCode.INTERRUPTED):
            devices, out = place_of(options, f"{script.name}-doctor")
            diagnose_script(script, devices, options.steps or _SCRIPT_STEPS, out, as_json=options.json)
        return ExitCode.DONE
    refuse_script_options("doctor", options)
    if options.run is not None:
        if options.hosts:
            raise CommandError(
                given=f"shoal doctor {options.run} --hosts {options.hosts}",
                conflict="ports between hosts are of machines, and a run is given",
                remedy="leave one of them out",
            )
        if options.set and options.job is None:
            raise CommandError(
                given=f"shoal doctor {options.run} --set",
                conflict="a setting is a parameter of the run's job, and no job is given",
                remedy="add --job JOBFILE[:FUNCTION]",
            )
        from shoal.doctor.run_diagnosis import examine  # imports plans, which are not needed for a machine
        from shoal.jobs.job_file import parse_target

        job = parse_target(options.job, options.set) if options.job is not None else None
        examine(options.run, job, try_out=options.try_out, steps=options.steps, as_json=options.json)
        return ExitCode.DONE
    given = {"--job": options.job, "--set": options.set, "--try": options.try_out, "--steps": options.steps}
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
        from shoal.doctor.ssh_ports import between  # imported late: rarely used

        checks = (*checks, *between(options.hosts))
    if options.json:
        document = {"host": facts.name, "severity": worst(checks).value, "checks": [asdict(check) for check in checks]}
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(lines(facts.name, checks)))
    return ExitCode.FAILED if worst(checks) is Severity.ERROR else ExitCode.DONE
