"""The `shoal doctor` command: what of this machine, or of a run, costs time, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from shoal.cli.options import DoctorOptions
from shoal.errors import ExitCode
from shoal.hardware.health import HealthCheck, Severity, judged, worst
from shoal.hardware.host_facts import host_facts

_SIGNS = {Severity.OK: "ok", Severity.NOTE: "note", Severity.WARNING: "SLOW", Severity.ERROR: "FAULT"}


def doctor(options: DoctorOptions) -> ExitCode:
    """Examines this machine."""
    facts = host_facts(Path(options.folder))
    checks = judged(facts)
    if options.json:
        told = {"host": facts.name, "severity": worst(checks).value, "checks": [asdict(check) for check in checks]}
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(lines(facts.name, checks)))
    return ExitCode.FAILED if worst(checks) is Severity.ERROR else ExitCode.DONE


def lines(host: str, checks: tuple[HealthCheck, ...]) -> list[str]:
    """Checks as people read them, and a last line that says what they come to."""
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
