"""Who belongs to a run, who does not, and how each is told that it has ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

import shoal
from shoal.errors import LaunchError
from shoal.launch.environment import Environment
from shoal.plans.plan import Plan
from shoal.training.parameter_server import members as crew_module
from shoal.training.parameter_server.channel import Channel, connect, listen
from shoal.training.parameter_server.members import Members, OverError, Role, WorkerEvent, identity, introduce, key_of

PLAN = Plan().with_sections(server={"mode": "synchronous"})
KEY = "ab" * 32


def job(seed: int = 0) -> shoal.Job:
    return shoal.Job(
        model=lambda: None, loss=lambda m, b: None, optimizer=lambda p: None, train_data=[1], global_batch=8, seed=seed
    )


@pytest.fixture
def environment() -> Iterator[Environment]:
    with listen() as listener:
        yield Environment(0, 3, port=listener.getsockname()[1], listen_fd=listener.fileno(), key=KEY)


def joined(crew: Members, environment: Environment, number: int = 0) -> tuple[Channel, WorkerEvent]:
    wire = introduce(environment, Role("worker", number), job(), PLAN)
    event = crew.next(5.0)
    assert event is not None
    assert event.message == {"kind": "joined"}
    return wire, event


def test_a_worker_comes_speaks_and_goes(environment: Environment) -> None:
    with Members(environment, 1, identity(job(), PLAN)) as crew:
        wire, event = joined(crew, environment)
        assert (event.member.number, event.member.pid, crew.coming) == (0, os.getpid(), [event.member])
        assert crew.members == [], "it has no model yet"
        wire.send({"kind": "ready"})
        assert crew.next(5.0) == WorkerEvent(event.member, {"kind": "ready"}, [])
        assert (crew.coming, crew.members) == ([], [event.member])
        crew.tell(event.member, {"kind": "task"})
        assert wire.receive()[0] == {"kind": "task"}
        wire.send({"kind": "alive"})
        wire.send({"kind": "done"})
        said = crew.next(5.0)
        assert said is not None
        assert said.message["kind"] == "done", "that it is alive is no event"
        wire.close()
        lost = crew.next(5.0)
        assert lost is not None
        assert lost.message["kind"] == "lost"
        assert crew.members == []


def test_one_that_goes_before_it_is_ready(environment: Environment) -> None:
    with Members(environment, 1, identity(job(), PLAN)) as crew:
        wire, _ = joined(crew, environment)
        wire.close()
        lost = crew.next(5.0)
        assert lost is not None
        assert lost.message["kind"] == "lost"
        assert (crew.coming, crew.members) == ([], [])


def test_at_the_end_everybody_is_told_also_who_was_not_noticed_yet(environment: Environment) -> None:
    with Members(environment, 1, identity(job(), PLAN)) as crew:
        known, _ = joined(crew, environment)
        unnoticed = introduce(environment, Role("worker", 1), job(), PLAN)
        event = None
        while event is None:  # it is there, and nobody has asked
            event = crew._events.queue[0] if crew._events.qsize() else None
    for wire in (known, unnoticed):
        assert wire.receive()[0] == {"kind": "end"}
        wire.close()
    with pytest.raises(OverError):
        introduce(environment, Role("worker", 2), job(), PLAN)


def test_who_runs_something_else_is_refused_and_named(environment: Environment) -> None:
    with Members(environment, 1, identity(job(seed=1), PLAN)) as crew:
        wire = introduce(environment, Role("worker", 2), job(), PLAN)
        with pytest.raises(LaunchError, match=r"worker 2: job = .*'seed': 0.*'seed': 1"):
            crew.next(5.0)
        wire.close()


def test_who_does_not_know_the_key_is_no_event(environment: Environment) -> None:
    with Members(environment, 1, identity(job(), PLAN)) as crew:
        with pytest.raises(ConnectionError):
            connect("127.0.0.1", environment.port, bytes(32))
        with socket.create_connection(("127.0.0.1", environment.port)) as silent:
            silent.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            wire, _ = joined(crew, environment)
        assert crew.next(0.05) is None
        wire.close()


def test_one_that_says_nothing(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(crew_module.time, "monotonic", lambda: now[0])
    crew = Members(environment, 1, identity(job(), PLAN))
    quiet, loud = (crew_module.Member(n, n, 1, "elsewhere", Channel(socket.socket()), heard=100.0) for n in range(2))
    crew.members = [quiet, loud]
    for _ in range(3):
        now[0] += 2.0
        loud.heard = now[0]
        found = crew.silent()
    assert found == [quiet]
    crew.coming, crew.members = [quiet], [loud]
    assert crew.silent() == [], "who builds its model may be unable to speak"
    crew.coming, crew.members = [], [quiet, loud]
    crew.end(quiet)
    assert crew.silent() == [], "it is named once"
    quiet.ended = False
    now[0] += 100.0
    assert crew.silent() == [], "it was this process that was away"
    crew._listener.close()
    loud.wire.close()


def test_without_a_launcher_there_is_no_key() -> None:
    with pytest.raises(LaunchError, match="shoal's own launcher"):
        key_of(Environment(0, 3))
