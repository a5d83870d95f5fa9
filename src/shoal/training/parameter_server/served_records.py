"""Records of a parameter-server run: the state after each step, and statistics of the pushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from shoal.checkpoint.keeper import RunState, chain_digest
from shoal.distributed.mesh import from_rows
from shoal.parallel.base import StepSums
from shoal.plans.accounting.collectives import Range
from shoal.runs.records import Spread
from shoal.training.loop.trainer import TrainingParts
from shoal.training.observe.step_records import RecordWriter, StepRecords, Surroundings
from shoal.training.parameter_server.members import Member
from shoal.training.parameter_server.task_queue import Task
from shoal.training.update.optimizer_step import Update


@dataclass(frozen=True)
class Arrived:
    """Pushed part of a step. `version`: the version of the parameters that the worker used."""

    task: Task
    member: Member
    version: int
    sums: dict[Range, Tensor]
    row: list[float]


@dataclass
class PushCounts:
    """Counts of pushes in this call of a run.

    `staleness`: histogram of the updates applied between a step's pull and its own update. `late`: results of tasks
    that another worker had received since. `repeated`: pushes that a server had already. `again`: tasks of lost
    workers. `undone`: applied steps that were rolled back. `workers`: tasks, pushed bytes and pulled bytes by worker.
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
        """Count a worker's task, and the bytes of tensors that it sent to servers and received from them."""
        row = self.workers.setdefault(number, {"tasks": 0, "pushed_bytes": 0, "pulled_bytes": 0})
        row["tasks"] += 1
        row["pushed_bytes"] += pushed
        row["pulled_bytes"] += pulled

    def applied(self, parts: Iterable[Arrived], grains: Sequence[object], staleness: int) -> None:
        """Count a step that was applied."""
        self.staleness[staleness] += 1
        self.applied_steps += 1
        self.applied_pushes += len(list(parts))
        self.applied_grains += len(grains)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values, with the histogram of staleness in ascending order."""
        return {
            **vars(self),
            "staleness": {str(n): self.staleness[n] for n in sorted(self.staleness)},
            "workers": {str(number): self.workers[number] for number in sorted(self.workers)},
        }


def exactly_once(parts: Iterable[Arrived], num_grains: int) -> bool:
    """Return True if the parts contain every grain of a step exactly once."""
    nodes = sorted(node for part in parts for node in part.sums)
    ends = [0, *(stop for _, stop in nodes)]
    return all(node[0] == end for node, end in zip(nodes, ends, strict=False)) and ends[-1] == num_grains


class ServedRecords(StepRecords):
    """Records that count steps into `state`; each record is written after the next step, or after its evaluation."""

    def __init__(self, parts: TrainingParts, around: Surroundings, writer: RecordWriter, state: RunState) -> None:
        grains = parts.job.num_grains
        super().__init__(parts.mesh, parts.clock, parts.plan, num_grains=grains, around=around, writer=writer)
        self._parts, self._state = parts, state
        self.restart(None)

    def restart(self, why: dict[str, Any] | None) -> None:
        """Drop the steps after the state's; the next record stores the reason `why`."""
        self._words: dict[int, Any] = {}  # digests of steps that were applied before an earlier step
        self._digested, self._why = self._state.step, why
        self.forget_after(self._state.step)

    def count(
        self, sums: StepSums, update: Update, nonfinite: dict[str, Any] | None, push: Mapping[int, Arrived]
    ) -> None:
        """Count a step that was applied or skipped. `push`: its parts. `nonfinite`: culprits of a non-finite step."""
        self.write()
        parts, state, came = self._parts, self._state, [push[part] for part in sorted(push)]
        step, digest = came[0].task.step, state.digest
        staleness = state.step - min(part.version for part in came)
        state.advance(sums, update.skipped)
        self._words[step] = sums.digest
        while self._digested in self._words:
            digest = chain_digest(digest, self._words.pop(self._digested))
            self._digested += 1
        state.digest = digest
        spreads = from_rows(np.array([part.row for part in came])).spreads
        ranks = {n: Spread(s.min, s.max, came[s.rank_of_max].member.rank) for n, s in spreads.items()}
        self._slowest = ranks["busy_seconds"].rank_of_max
        pushed = {"step": step + 1, "workers": [part.member.number for part in came], "staleness": staleness}
        if self._why is not None:
            pushed["fell_back"], self._why = self._why, None
        epoch = parts.order.epoch(step)
        record = self.add(state, sums, update, nonfinite, epoch=epoch, ranks=ranks, push=pushed)
        parts.callbacks.stepped(state, record)
        parts.clock.begin()
