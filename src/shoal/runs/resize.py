"""Request to continue a run with another number of processes: a file in its directory, and the resulting plan."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import PlanError
from shoal.plans.legal import ModelFacts, conflicts, refuse
from shoal.plans.plan import Plan
from shoal.plans.resolve import relaid
from shoal.runs.directory import RunDirectory, read_json, write_file

# Minimum time between two checks by rank 0, so that they do not slow down short steps.
_LOOK_SECONDS = 0.1


def wish(directory: RunDirectory, devices: int) -> None:
    """Write the request, replacing a pending one. Raises: OSError."""
    write_file(directory.resize, json.dumps({"devices": devices}) + "\n")


def wished(directory: RunDirectory) -> int | None:
    """Return the requested number of processes, or None."""
    devices = (read_json(directory.resize) or {}).get("devices")
    return devices if isinstance(devices, int) and devices > 0 else None


def granted(directory: RunDirectory) -> None:
    """Remove the request."""
    with contextlib.suppress(OSError):
        directory.resize.unlink(missing_ok=True)


@dataclass
class ResizeWish:
    """Pending resize request of a run, which rank 0 checks at each step. Always false without a directory."""

    directory: RunDirectory | None
    _looked: float = field(default=0.0)
    _found: bool = False

    def __bool__(self) -> bool:
        now = time.monotonic()
        if self.directory is not None and not self._found and now - self._looked >= _LOOK_SECONDS:
            self._looked, self._found = now, wished(self.directory) is not None
        return self._found


def resized(plan: Plan, devices: int, job: Mapping[str, Any], gpus: int) -> Plan:
    """Return the plan with another degree of the data axis, for `devices` processes in total.

    `job`: content of job.json.
    `gpus`: number of GPUs that the run sees, 0 if it uses none.
    Raises: PlanError with the conflicts.
    """
    rest, given = plan.degrees.world_size // plan.layout.data, f"{devices} processes"
    conflict = None
    if plan.serves:
        conflict = "a run with parameter servers keeps its number of workers"
    elif devices % rest:
        conflict = f"a replica of the model takes {rest}, and only whole replicas join or leave during a run"
    elif 0 < gpus < devices:
        conflict = f"the run sees {gpus} GPU(s), and a GPU serves one process"
    if conflict is not None:
        remedy = "stop the run, and go on with another plan: shoal run ... --resume --plan"
        raise PlanError(given=given, conflict=conflict, remedy=remedy)
    new_plan, grains = relaid(plan, devices), job.get("grains")
    if isinstance(grains, int) and grains > 0 and new_plan.degrees.divides_grains > grains:
        facts = ModelFacts(grains, -(-int(job.get("global_batch", grains)) // grains))
        refuse(conflicts(new_plan, facts))
    refuse(conflicts(new_plan))
    return new_plan
