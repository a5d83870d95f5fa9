"""Whom the conductor welcomes, gives work to, waits for and ends; without a model to train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from shoal.training.parameter_server import conductor as conductor_module
from shoal.training.parameter_server.conductor import Conductor
from shoal.training.parameter_server.members import Member, WorkerEvent
from shoal.training.parameter_server.served_records import PushCounts
from shoal.training.parameter_server.task_queue import Rules, TaskQueue


class Told:
    """A crew that notes what is told to whom, and ends who is to be ended by losing it."""

    def __init__(self) -> None:
        self.ports, self.members, self.coming = [1], list[Member](), list[Member]()
        self.told: list[tuple[Member, str]] = []
        self.quiet: list[Member] = []
        self.ended: list[Member] = []

    def tell(self, member: Member, told: dict[str, Any], tensors: object = ()) -> None:
        self.told.append((member, told["kind"]))

    def silent(self) -> list[Member]:
        return [member for member in self.quiet if not member.ended]

    def end(self, member: Member) -> None:
        member.ended = True
        self.ended.append(member)

    def next(self, seconds: float) -> WorkerEvent | None:
        gone = [member for member in self.members if member.ended]
        for member in gone:
            self.members.remove(member)
            return WorkerEvent(member, {"kind": "lost"})
        return None


class Bare(Conductor):
    """A conductor of so much as its doings with workers need."""

    def __init__(self, crew: Told) -> None:
        self.crew = crew
        self._crew = crew  # type: ignore[assignment]
        parts = {"keeper": SimpleNamespace(every_steps=1), "callbacks": SimpleNamespace(request_bits=0)}
        self._engine = SimpleNamespace(model=nn.Linear(1, 1), **parts)  # type: ignore[assignment]
        self._around = SimpleNamespace(note=print, stop_requested=lambda: False)  # type: ignore[assignment]
        self.state = SimpleNamespace(step=0)  # type: ignore[assignment]
        self.servers = SimpleNamespace(names=[[]])  # type: ignore[assignment]
        self._retreat = SimpleNamespace(due=False, era=0)  # type: ignore[assignment]
        self._desk = TaskQueue(Rules(1, None), 0, lambda *part: True)
        self._desk.limit = 4
        self._computation, self._given, self._longest, self._alone_since = None, {}, 0.0, 0.0
        self._joined: set[int] = set()
        self.tally = PushCounts()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("shoal.training.parameter_server.conductor.time.monotonic", lambda: now[0])
    return now


def member() -> Member:
    return Member(0, 2, 1, "elsewhere", SimpleNamespace(), heard=0.0, came=0.0)  # type: ignore[arg-type]


def test_nothing_is_sent_to_a_worker_that_builds_its_model(now: list[float]) -> None:
    """It would not read it, and whoever sends more than the sockets hold waits with all others."""
    held, worker = Bare(Told()), member()
    held.crew.coming.append(worker)
    held._handle(WorkerEvent(worker, {"kind": "joined"}))
    held._give_out()
    assert held.crew.told == []
    held.crew.coming, held.crew.members = [], [worker]
    now[0] = 500.0
    held._handle(WorkerEvent(worker, {"kind": "ready"}))
    held._give_out()
    assert held.crew.told == [(worker, "welcome"), (worker, "task")]
    assert [since for _, since, _ in held._given.values()] == [500.0], "its first part is timed from then on"


def test_building_a_model_may_take_as_long_as_a_first_task(now: list[float]) -> None:
    held, worker = Bare(Told()), member()
    held._longest = 0.1  # others are fast
    held.crew.coming.append(worker)
    now[0] = conductor_module._FIRST_SECONDS - 1
    held._look_after()
    assert held.crew.ended == []
    now[0] += 2
    held._look_after()
    held._look_after()
    assert held.crew.ended == [worker], "once"
    assert "has not been ready for 600 s" in held.tally.incidents[0]["said"]


def test_a_worker_that_is_stopped_after_the_last_step_is_not_waited_for() -> None:
    held, well, stopped = Bare(Told()), member(), member()
    held.crew.members, held.crew.quiet = [well, stopped], [stopped]
    events = [WorkerEvent(well, {"kind": "shown"})]
    lose = held.crew.next
    turns = iter(range(20))

    def next_event(seconds: float) -> WorkerEvent | None:
        assert next(turns) < 10, "it waits for ever"
        return events.pop() if events else lose(seconds)

    held.crew.next = next_event  # type: ignore[method-assign]
    held.show()
    assert held.crew.ended == [stopped]
