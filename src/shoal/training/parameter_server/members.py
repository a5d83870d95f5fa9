"""Membership of a parameter-server run: the roles of its processes, how they join, and how losses are detected."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import LaunchError, PeerError, ShoalError, from_json
from shoal.jobs.job import Job
from shoal.launch.environment import Environment
from shoal.plans.plan import Plan
from shoal.runs.version import __version__
from shoal.training.parameter_server.channel import Channel, ClosedError, accept_each, connect

# The conductor listens once it has imported torch and built the model.
_JOIN_SECONDS = 60.0
_RETRY_SECONDS = 0.05
# A server answers within the time of an optimizer step, unless it is stopped.
ANSWER_SECONDS = 60.0
# Workers send a sign of life each second: after this silence a worker is stopped, or its host is gone.
SILENT_SECONDS = 5.0
# A request to a server, and its tensors.
Asked = tuple[dict[str, Any], Sequence[Tensor]]


@dataclass(frozen=True)
class Role:
    """Role of a process, and its number among the processes of this role."""

    kind: Literal["conductor", "server", "worker"]
    number: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "conductor" else f"{self.kind} {self.number}"


def role(plan: Plan, rank: int) -> Role:
    """Return the role of a rank among the plan's `num_processes`."""
    servers = plan.server.num_servers
    if rank == 0:
        return Role("conductor")
    return Role("server", rank - 1) if rank <= servers else Role("worker", rank - 1 - servers)


class OverError(Exception):
    """Error for a process that joins after the run has ended."""


def identity(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the values that must be equal in all processes of a run, as JSON values."""
    return {"shoal": __version__, "torch": torch.__version__, "job": job.describe(), "plan": plan.to_mapping()}


def key_of(environment: Environment) -> bytes:
    """Return the run's key. Raises: LaunchError if the launcher has made none."""
    if environment.key is None:
        raise LaunchError(
            given="a plan with servers, in processes that another launcher has started",
            conflict="shoal's own launcher replaces a worker that dies, and starts all of them",
            remedy='write `shoal run` without torchrun, on one host, or server.mode = "none"',
        )
    return bytes.fromhex(environment.key)


def introduce(environment: Environment, role: Role, job: Job, plan: Plan, port: int = 0) -> Channel:
    """Connect to the conductor, and introduce this process; a server listens at `port`.

    Raises: LaunchError if the conductor does not answer; OverError if the run has ended.
    """
    key = key_of(environment)
    hello = {"kind": role.kind, "number": role.number, "pid": os.getpid(), "host": socket.gethostname(), "port": port}
    greeting = {**hello, "rank": environment.rank, "identity": identity(job, plan)}
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        try:
            wire = connect(environment.address, environment.port, key)
            wire.send(greeting)
            return wire
        except ClosedError as error:
            # The launcher opens the socket before any process starts, and the conductor closes it at the end.
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise OverError from error
            if time.monotonic() > deadline:
                raise LaunchError(
                    given=f"{role} (rank {environment.rank}), which looks for {environment.address}:{environment.port}",
                    conflict=f"the conductor does not answer: {error}",
                    remedy="look at what rank 0 says; a plan with servers is started by shoal's own launcher",
                ) from error
            time.sleep(_RETRY_SECONDS)


def raise_if_error(answer: dict[str, Any], who: str) -> None:
    """Raise the error in a peer's answer, if any."""
    if "error" in answer:
        error: ShoalError = from_json(answer["error"])
        error.host = f"{error.host}, {who}"
        raise error


@dataclass
class Member:
    """A connected worker. A restarted worker is another member with the same number."""

    number: int
    rank: int
    pid: int
    host: str
    wire: Channel
    heard: float = field(default_factory=time.monotonic)
    came: float = field(default_factory=time.monotonic)
    ended: bool = False  # True once the conductor has ended it

    def __str__(self) -> str:
        return f"worker {self.number} (rank {self.rank}, process {self.pid})"


@dataclass(frozen=True)
class WorkerEvent:
    """Event of a worker: connected ("joined"), a message (the first is "ready"), or disconnected ("lost")."""

    member: Member
    message: dict[str, Any]
    tensors: Sequence[Tensor] = ()


class Members:
    """Connected servers and workers of a run, on the socket that the launcher has opened."""

    def __init__(self, environment: Environment, num_servers: int, identity: dict[str, Any]) -> None:
        self._key, self._identity = key_of(environment), identity
        assert environment.listen_fd is not None, "who made the key has opened a socket"
        self._listener = socket.socket(fileno=os.dup(environment.listen_fd))
        self._num_servers = num_servers
        self._events: queue.Queue[WorkerEvent | ShoalError] = queue.Queue()
        self._wires: list[Channel] = []
        self._servers: dict[int, Channel] = {}
        self.ports: list[int] = []
        self._ports: dict[int, int] = {}
        self._complete = threading.Event()
        self._closing = False
        self._looked = time.monotonic()
        self.members: list[Member] = []  # ready workers, which have built their models and read messages
        self.coming: list[Member] = []  # connected workers that are not ready yet
        welcoming = self._listener, self._key, self._listen_to
        self._thread = threading.Thread(target=accept_each, args=welcoming, daemon=True)

    def __enter__(self) -> Members:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # first: a process that loses its connection checks whether this is open
            self._listener.shutdown(socket.SHUT_RDWR)
        servers = list(self._servers.values())
        # Workers first: a worker that loses its servers looks for the last message, which has arrived by then.
        for wire in (*(wire for wire in list(self._wires) if wire not in servers), *servers):
            _dismiss(wire)
        self._listener.close()
        self._thread.join()

    def _listen_to(self, wire: Channel) -> None:
        hello, _ = wire.receive()
        self._wires.append(wire)
        if self._closing:
            _dismiss(wire)
            return
        theirs, own = hello["identity"], self._identity
        differing = next((name for name in own if theirs.get(name) != own[name]), None)
        if differing is not None:
            error = LaunchError(
                given=f"{hello['kind']} {hello['number']}: {differing} = {str(theirs.get(differing))[:200]}",
                conflict=f"the conductor on {platform.node()} has {differing} = {str(own[differing])[:200]}",
                remedy="change no file, setting or version while a run lasts",
            )
            self._events.put(error)
            return
        if hello["kind"] == "server":
            wire.limit(ANSWER_SECONDS)
            self._ports[hello["number"]] = hello["port"]  # before it counts as present
            self._servers[hello["number"]] = wire
            if len(self._servers) == self._num_servers:
                self._complete.set()
            return
        wire.limit_sending(ANSWER_SECONDS)
        member = Member(hello["number"], hello["rank"], hello["pid"], hello["host"], wire)
        self._events.put(WorkerEvent(member, {"kind": "joined"}))
        with contextlib.suppress(ClosedError):
            while True:
                message, tensors = wire.receive()
                member.heard = time.monotonic()
                if message["kind"] != "alive":
                    self._events.put(WorkerEvent(member, message, tensors))
        self._events.put(WorkerEvent(member, {"kind": "lost"}))

    def assemble(self) -> None:
        """Wait until every server is present. Raises: LaunchError."""
        if not self._complete.wait(_JOIN_SECONDS):
            missing = sorted(set(range(self._num_servers)) - set(self._servers))
            raise LaunchError(
                given=f"a run with {self._num_servers} server(s)",
                conflict=f"server {missing[0]} has not come within {_JOIN_SECONDS:.0f} s",
                remedy="look at what it says in logs/ of the run directory",
            )
        self.ports = [self._ports[number] for number in range(self._num_servers)]

    def next(self, seconds: float) -> WorkerEvent | None:
        """Return the next event within `seconds`, or None. Raises: LaunchError if a process does not match the run."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, ShoalError):
            raise event
        if event.message["kind"] == "joined":
            self.coming.append(event.member)
        elif event.message["kind"] == "ready":
            self.coming.remove(event.member)
            self.members.append(event.member)
        elif event.message["kind"] == "lost":
            (self.members if event.member in self.members else self.coming).remove(event.member)
        return event

    def tell(self, member: Member, message: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message to a worker; `next` reports a lost worker."""
        with contextlib.suppress(ClosedError):
            member.wire.send(message, tensors)

    def ask(self, of: Callable[[int], Asked]) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Send a request to every server at once, and return the answers.

        Raises: errors of a server; PeerError if a server does not answer.
        """
        number = 0
        try:
            for number in range(self._num_servers):
                self._servers[number].send(*of(number))
            answers = []
            for number in range(self._num_servers):
                answers.append(self._servers[number].receive())
        except (ClosedError, TimeoutError) as error:
            silent = isinstance(error, TimeoutError)
            said = f"has not answered for {ANSWER_SECONDS:.0f} s" if silent else "is gone"
            raise PeerError(
                given=f"server {number} of this run",
                conflict=f"it {said}, and a shard of the parameters with it",
                remedy="--resume goes on from the newest checkpoint",
            ) from error
        for number, (answer, _) in enumerate(answers):
            raise_if_error(answer, f"server {number}")
        return answers

    def silent(self) -> list[Member]:
        """Return the ready workers that have been silent for SILENT_SECONDS."""
        now = time.monotonic()
        away, self._looked = now - self._looked > SILENT_SECONDS / 2, now
        if away:  # this process was stopped or busy: messages of the workers may be unread
            for member in self.members:
                member.heard = now
        return [member for member in self.members if now - member.heard > SILENT_SECONDS and not member.ended]

    def end(self, member: Member) -> None:
        """Kill a worker on this host, which its launcher then restarts."""
        member.ended = True
        if member.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        member.wire.close()


def _dismiss(wire: Channel) -> None:
    with contextlib.suppress(ClosedError, TimeoutError, OSError):
        wire.limit(1.0)
        wire.send({"kind": "end"})
    wire.close()
