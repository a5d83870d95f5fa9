"""Task queue: the next part of a step for a worker, and the parts in progress. Integers only; no clock, no channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Task:
    """Part `part` of `num_parts` of a step, handed out at `version` under a unique ticket."""

    step: int
    part: int
    num_parts: int
    ticket: int = -1
    version: int = -1


@dataclass(frozen=True)
class Rules:
    """Rules of the queue: the number of parts of a step, and the bound on staleness.

    `bound`: how far the version may run ahead of a worker's last pull. 0: a step begins when the previous step is
    applied. None: no bound. A bound other than 0 requires whole steps: `num_parts` = 1.
    """

    num_parts: int
    bound: int | None

    def __post_init__(self) -> None:
        assert self.num_parts == 1 or self.bound == 0, "a step in parts is computed from one version"


class TaskQueue:
    """Queue of the steps from `version` up to `limit`; `busy` returns whether (step, part, num_parts) has any work."""

    def __init__(self, rules: Rules, version: int, busy: Callable[[int, int, int], bool]) -> None:
        self._rules, self._busy = rules, busy
        self.version = version
        self.limit = version
        self.frontier = version  # the first step without a part that was handed out
        self._ready: list[Task] = []
        self._out: dict[int, Task] = {}
        self._tickets = 0

    @property
    def out(self) -> list[Task]:
        """Tasks that workers compute now."""
        return list(self._out.values())

    def parts(self, step: int) -> int:
        """Return the number of parts of a step that have grains."""
        return sum(self._busy(step, part, self._rules.num_parts) for part in range(self._rules.num_parts))

    def take(self) -> Task | None:
        """Return the next task, or None if there is none, or the bound requires a wait."""
        # Each task in progress may be applied after all others. A task handed out at version v then sees at most
        # version - v + (number of the other tasks) updates before its own.
        bound = self._rules.bound
        if bound not in (None, 0):
            others = len(self._out)  # for each task in progress, counting the new one
            if others > bound or any(self.version - task.version + others > bound for task in self._out.values()):
                return None
        if not self._ready and self.frontier < self.limit and (self._rules.bound != 0 or self.frontier == self.version):
            count = self._rules.num_parts
            parts = [part for part in range(count) if self._busy(self.frontier, part, count)]
            self._ready = [Task(self.frontier, part, count) for part in parts]
            self.frontier += 1
        if not self._ready:
            return None
        self._tickets += 1
        task = replace(self._ready.pop(0), ticket=self._tickets, version=self.version)
        self._out[task.ticket] = task
        return task

    def done(self, ticket: int) -> Task | None:
        """Remove and return the task with this ticket; None if another worker has received the task since."""
        return self._out.pop(ticket, None)

    def put_back(self, task: Task) -> None:
        """Return a task to the front of the queue."""
        self._out.pop(task.ticket, None)
        self._ready.insert(0, task)

    def restart(self, rules: Rules, version: int) -> None:
        """Hand out the steps from `version` on again, by the new `rules`; no task may be in progress."""
        assert not self._out, "between two steps"
        assert not self._ready, "between two steps"
        self._rules, self.version, self.limit, self.frontier = rules, version, version, version

    def applied(self) -> None:
        """Count one more decided step."""
        self.version += 1
