"""Task queue: the next part of a step for a worker, and the parts that are out. Integers only; no clock, no channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Task:
    """Part `part` of `num_parts` of a step, handed out at that version under a unique ticket."""

    step: int
    part: int
    num_parts: int
    ticket: int = -1
    version: int = -1


@dataclass(frozen=True)
class Rules:
    """Rules of the queue: the parts of a step, and how far a version may run ahead of a worker's last pull.

    bound 0: a step begins when the one before is applied. None: no bound. In whole steps: `num_parts` is then 1.
    """

    num_parts: int
    bound: int | None

    def __post_init__(self) -> None:
        assert self.num_parts == 1 or self.bound == 0, "a step in parts is computed from one version"


class TaskQueue:
    """Queue of the steps from `version` on, up to `limit`; `busy` says whether (step, part, num_parts) has any work."""

    def __init__(self, rules: Rules, version: int, busy: Callable[[int, int, int], bool]) -> None:
        self._rules, self._busy = rules, busy
        self.version = version
        self.limit = version
        self.frontier = version  # the first step of which nothing has been given out
        self._ready: list[Task] = []
        self._out: dict[int, Task] = {}
        self._tickets = 0

    @property
    def out(self) -> list[Task]:
        """Tasks that workers compute now."""
        return list(self._out.values())

    def parts(self, step: int) -> int:
        """In how many parts a step is computed; those without grains are none."""
        return sum(self._busy(step, part, self._rules.num_parts) for part in range(self._rules.num_parts))

    def take(self) -> Task | None:
        """The next task; None where there is none, or the bound says to wait."""
        if not self._may_begin():
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

    def _may_begin(self) -> bool:
        """Whether one more task keeps every task's staleness within the bound.

        Each task that is out may be applied before any other of them, so that one that was given out at version v sees
        at most version - v + (number of the others) applied before it.
        """
        if self._rules.bound in (None, 0):
            return True
        others = len(self._out)  # of each that is out, with the new one
        return all(self.version - task.version + others <= self._rules.bound for task in self._out.values()) and (
            others <= self._rules.bound
        )

    def done(self, ticket: int) -> Task | None:
        """The task that is done with that; None where no such task is out: it was given to somebody else since."""
        return self._out.pop(ticket, None)

    def put_back(self, task: Task) -> None:
        """Gives a task out anew, before any other."""
        self._out.pop(task.ticket, None)
        self._ready.insert(0, task)

    def restart(self, rules: Rules, version: int) -> None:
        """Gives out the steps from `version` on once more, by other rules; where nothing is out."""
        assert not self._out, "between two steps"
        assert not self._ready, "between two steps"
        self._rules, self.version, self.limit, self.frontier = rules, version, version, version

    def applied(self) -> None:
        """Counts one more decided step."""
        self.version += 1
