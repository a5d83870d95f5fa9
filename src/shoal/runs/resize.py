"""Wish that a run goes on with another number of processes: a file in its directory, and the plan that it leads to."""

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
from shoal.plans.relaid import relaid
from shoal.runs.directory import RunDirectory, read_json, write_file

# Between two looks of rank 0, so that short steps do not pay for them.
_LOOK_SECONDS = 0.1


def wish(directory: RunDirectory, devices: int) -> None:
    """Writes the wish, in place of another that was not granted yet. Raises: OSError."""
    write_file(directory.resize, json.dumps({"devices": devices}) + "\n")


def wished(directory: RunDirectory) -> int | None:
    """The number of processes that is wished for; None where nobody wishes for another."""
    devices = (read_json(directory.resize) or {}).get("devices")
    return devices if isinstance(devices, int) and devices > 0 else None


def granted(directory: RunDirectory) -> None:
    """Removes the wish."""
    with contextlib.suppress(OSError):
        directory.resize.unlink(missing_ok=True)


@dataclass
class ResizeWish:
    """Wish in the directory of a run, of which rank 0 asks at each step; without a directory there is none."""

    directory: RunDirectory | None
    _looked: float = field(default=0.0)
    _found: bool = False

    def __bool__(self) -> bool:
        now = time.monotonic()
        if self.directory is not None and not self._found and now - self._looked >= _LOOK_SECONDS:
            self._looked, self._found = now, wished(self.directory) is not None
        return self._found


def resized(plan: Plan, devices: int, job: Mapping[str, Any], gpus: int) -> Plan:
    """The plan with another degree of its data axis, for so many processes in all.

    `job` as in job.json; `gpus`: those that the run sees, 0 where none is used. Raises: PlanError with what stands
    against it.
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
    found, grains = relaid(plan, devices), job.get("grains")
    if isinstance(grains, int) and grains > 0 and found.degrees.divides_grains > grains:
        facts = ModelFacts(grains, -(-int(job.get("global_batch", grains)) // grains))
        refuse(conflicts(found, facts))
    refuse(conflicts(found))
    return found
