"""Rendezvous of a parameter-server run: the conductor's address, and the identity that each process must show."""

from __future__ import annotations

import os
import platform
import socket
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shoal.errors import LaunchError, ShoalError, from_json
from shoal.job import Job
from shoal.launch.environment import Environment
from shoal.plans.plan import Plan
from shoal.runs.version import __version__
from shoal.training.parameter_server.channel import Channel, ClosedError, connect

# The conductor listens once it has imported torch and built the model.
_JOIN_SECONDS = 60.0
_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class Role:
    """Role of a process, and its number among those of the same role."""

    kind: Literal["conductor", "server", "worker"]
    number: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "conductor" else f"{self.kind} {self.number}"


def role(plan: Plan, rank: int) -> Role:
    """The role of a rank among the plan's `num_processes`."""
    servers = plan.server.num_servers
    if rank == 0:
        return Role("conductor")
    return Role("server", rank - 1) if rank <= servers else Role("worker", rank - 1 - servers)


class OverError(Exception):
    """The run ended before this process joined."""


def identity(job: Job, plan: Plan) -> dict[str, Any]:
    """Values that must be equal in all processes of a run. JSON values."""
    return {"shoal": __version__, "torch": torch.__version__, "job": job.describe(), "plan": plan.to_mapping()}


def key_of(environment: Environment) -> bytes:
    """The run's key. Raises: LaunchError where no launcher has made one."""
    if environment.key is None:
        raise LaunchError(
            given="a plan with servers, in processes that another launcher has started",
            conflict="shoal's own launcher replaces a worker that dies, and starts all of them",
            remedy='write `shoal run` without torchrun, on one host, or server.mode = "none"',
        )
    return bytes.fromhex(environment.key)


def introduce(environment: Environment, role: Role, job: Job, plan: Plan, port: int = 0) -> Channel:
    """Authenticated channel to the conductor; `port` is where a server listens.

    Raises: LaunchError where it does not answer; OverError where it has ended.
    """
    key = key_of(environment)
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        try:
            wire = connect(environment.address, environment.port, key)
            break
        except ClosedError as error:
            # The launcher has opened the socket before anybody was started, and the conductor shuts it at its end.
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise OverError from error
            if time.monotonic() > deadline:
                raise LaunchError(
                    given=f"{role} (rank {environment.rank}), which looks for {environment.address}:{environment.port}",
                    conflict=f"the conductor does not answer: {error}",
                    remedy="look at what rank 0 says; a plan with servers is started by shoal's own launcher",
                ) from error
            time.sleep(_RETRY_SECONDS)
    hello = {"kind": role.kind, "number": role.number, "pid": os.getpid(), "host": socket.gethostname(), "port": port}
    wire.send({**hello, "rank": environment.rank, "identity": identity(job, plan)})
    return wire


def refuse_stranger(hello: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises: LaunchError where a process does not run the same thing as this one."""
    told = hello["identity"]
    differing = next((name for name in own if told.get(name) != own[name]), None)
    if differing is not None:
        raise LaunchError(
            given=f"{hello['kind']} {hello['number']}: {differing} = {str(told.get(differing))[:200]}",
            conflict=f"the conductor on {platform.node()} has {differing} = {str(own[differing])[:200]}",
            remedy="change no file, setting or version while a run lasts",
        )


def raise_if_error(answer: dict[str, Any], who: str) -> None:
    """Raises: the error that a peer answered with, as its own."""
    if "error" in answer:
        error: ShoalError = from_json(answer["error"])
        error.host = f"{error.host}, {who}"
        raise error
