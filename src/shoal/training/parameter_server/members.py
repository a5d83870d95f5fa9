"""Membership of a parameter-server run: the conductor's channels to servers and workers, and losses of them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import Tensor

from shoal.errors import LaunchError, PeerError, ShoalError
from shoal.launch.environment import Environment
from shoal.training.parameter_server.channel import Channel, ClosedError, accept_each
from shoal.training.parameter_server.peers import key_of, raise_if_error, refuse_stranger

_JOIN_SECONDS = 60.0
# A server answers within the time of an optimizer step; one that is stopped does not.
_ANSWER_SECONDS = 60.0
# Workers say each second that they run: one that says nothing for so long is stopped, or its host is gone.
SILENT_SECONDS = 5.0

# To each server, in order: what it is asked, and the tensors with it.
Asked = tuple[dict[str, Any], Sequence[Tensor]]


@dataclass
class Member:
    """Connected worker. Each one that is started anew is another member, of the same number."""

    number: int
    rank: int
    pid: int
    host: str
    wire: Channel
    heard: float = field(default_factory=time.monotonic)
    came: float = field(default_factory=time.monotonic)
    ended: bool = False  # by the conductor

    def __str__(self) -> str:
        return f"worker {self.number} (rank {self.rank}, process {self.pid})"


@dataclass(frozen=True)
class WorkerEvent:
    """Event of a worker: connected ("joined"), a message (the first is "ready"), or disconnected ("lost")."""

    member: Member
    told: dict[str, Any]
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
        self.members: list[Member] = []  # who is ready: has built its model, and reads what it is told
        self.coming: list[Member] = []  # who is not yet
        welcoming = self._listener, self._key, self._listen_to
        self._thread = threading.Thread(target=accept_each, args=welcoming, daemon=True)

    def __enter__(self) -> Members:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        servers = list(self._servers.values())
        # Workers first: one that finds its servers gone looks for the last word, which is there by then.
        for wire in (*(wire for wire in list(self._wires) if wire not in servers), *servers):
            _dismiss(wire)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _listen_to(self, wire: Channel) -> None:
        hello, _ = wire.receive()
        self._wires.append(wire)
        if self._closing:
            _dismiss(wire)
            return
        try:
            refuse_stranger(hello, self._identity)
        except LaunchError as error:
            self._events.put(error)
            return
        if hello["kind"] == "server":
            wire.limit(_ANSWER_SECONDS)
            self._ports[hello["number"]] = hello["port"]  # before it counts as there
            self._servers[hello["number"]] = wire
            if len(self._servers) == self._num_servers:
                self._complete.set()
            return
        wire.limit_sending(_ANSWER_SECONDS)
        member = Member(hello["number"], hello["rank"], hello["pid"], hello["host"], wire)
        self._events.put(WorkerEvent(member, {"kind": "joined"}))
        with contextlib.suppress(ClosedError):
            while True:
                told, tensors = wire.receive()
                member.heard = time.monotonic()
                if told["kind"] != "alive":
                    self._events.put(WorkerEvent(member, told, tensors))
        self._events.put(WorkerEvent(member, {"kind": "lost"}))

    def assemble(self) -> None:
        """Waits until every server is there. Raises: LaunchError."""
        if not self._complete.wait(_JOIN_SECONDS):
            missing = sorted(set(range(self._num_servers)) - set(self._servers))
            raise LaunchError(
                given=f"a run with {self._num_servers} server(s)",
                conflict=f"server {missing[0]} has not come within {_JOIN_SECONDS:.0f} s",
                remedy="look at what it says in logs/ of the run directory",
            )
        self.ports = [self._ports[number] for number in range(self._num_servers)]

    def next(self, seconds: float) -> WorkerEvent | None:
        """Next event within so many seconds. Raises: LaunchError where a stranger came."""
        try:
            found = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, ShoalError):
            raise found
        if found.told["kind"] == "joined":
            self.coming.append(found.member)
        elif found.told["kind"] == "ready":
            self.coming.remove(found.member)
            self.members.append(found.member)
        elif found.told["kind"] == "lost":
            (self.members if found.member in self.members else self.coming).remove(found.member)
        return found

    def tell(self, member: Member, told: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Sends a message to a worker; a lost one is reported by `next`."""
        with contextlib.suppress(ClosedError):
            member.wire.send(told, tensors)

    def ask(self, of: Callable[[int], Asked]) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Asks every server at once: the answers. Raises: what a server raised; PeerError where one does not answer."""
        number = 0
        try:
            for number in range(self._num_servers):
                self._servers[number].send(*of(number))
            answers = []
            for number in range(self._num_servers):
                answers.append(self._servers[number].receive())
        except (ClosedError, TimeoutError) as error:
            silent = isinstance(error, TimeoutError)
            said = f"has not answered for {_ANSWER_SECONDS:.0f} s" if silent else "is gone"
            raise PeerError(
                given=f"server {number} of this run",
                conflict=f"it {said}, and a shard of the parameters with it",
                remedy="--resume goes on from the newest checkpoint",
            ) from error
        for number, (answer, _) in enumerate(answers):
            raise_if_error(answer, f"server {number}")
        return answers

    def silent(self) -> list[Member]:
        """The workers that have said nothing for SILENT_SECONDS; one that builds its model may be unable to."""
        now = time.monotonic()
        away, self._looked = now - self._looked > SILENT_SECONDS / 2, now
        if away:  # it was this process that was stopped, or busy: what they have said may not have been read yet
            for member in self.members:
                member.heard = now
        return [member for member in self.members if now - member.heard > SILENT_SECONDS and not member.ended]

    def end(self, member: Member) -> None:
        """SIGKILL to a worker of this host, whose place its launcher fills again."""
        member.ended = True
        if member.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        member.wire.close()


def _dismiss(wire: Channel) -> None:
    """Tells a peer that the run has ended."""
    with contextlib.suppress(ClosedError, TimeoutError, OSError):
        wire.limit(1.0)
        wire.send({"kind": "end"})
    wire.close()
