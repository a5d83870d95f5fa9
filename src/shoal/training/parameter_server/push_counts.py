"""Statistics of a run's pushes, for its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.plans.accounting.partition import Range
from shoal.training.parameter_server.members import Member
from shoal.training.parameter_server.task_queue import Task


@dataclass(frozen=True)
class Arrived:
    """Pushed part of a step. `version`: that of the worker's parameters."""

    task: Task
    member: Member
    version: int
    sums: dict[Range, Tensor]
    row: list[float]


@dataclass
class PushCounts:
    """Counts of pushes in this call of a run.

    `staleness`: how many updates were applied between a step's pull and its own. `late`: results of tasks that somebody
    else had been given since. `repeated`: pushes that a server had already. `undone`: applied steps that were taken
    back and computed once more. `bytes` by worker: pushed, pulled, tasks.
    """

    staleness: Counter[int] = field(default_factory=Counter)
    applied_steps: int = 0
    applied_pushes: int = 0
    applied_grains: int = 0
    late: int = 0
    repeated: int = 0
    again: int = 0
    undone: int = 0
    incidents: list[dict[str, Any]] = field(default_factory=list)
    workers: dict[int, dict[str, int]] = field(default_factory=dict)

    def moved(self, number: int, pushed: int, pulled: int) -> None:
        """Counts a task of a worker, and the bytes of tensors that it sent to servers and got from them."""
        found = self.workers.setdefault(number, {"tasks": 0, "pushed_bytes": 0, "pulled_bytes": 0})
        found["tasks"] += 1
        found["pushed_bytes"] += pushed
        found["pulled_bytes"] += pulled

    def applied(self, parts: Iterable[Arrived], grains: Sequence[object], staleness: int) -> None:
        """Counts a step that was applied."""
        self.staleness[staleness] += 1
        self.applied_steps += 1
        self.applied_pushes += len(list(parts))
        self.applied_grains += len(grains)

    def to_json(self) -> dict[str, Any]:
        """JSON value of the counts, with a histogram by ascending staleness."""
        return {
            **vars(self),
            "staleness": {str(n): self.staleness[n] for n in sorted(self.staleness)},
            "workers": {str(number): self.workers[number] for number in sorted(self.workers)},
        }


def exactly_once(parts: Iterable[Arrived], num_grains: int) -> bool:
    """Whether the parts hold every grain of a step, and none of them twice."""
    nodes = sorted(node for part in parts for node in part.sums)
    ends = [0, *(stop for _, stop in nodes)]
    return all(node[0] == end for node, end in zip(nodes, ends, strict=False)) and ends[-1] == num_grains
