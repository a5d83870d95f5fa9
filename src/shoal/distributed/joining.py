"""Rendezvous of a run's ranks: an exchange through the store before a process group exists."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.errors import LaunchError
from shoal.launch.environment import Environment

JOIN_TIMEOUT = timedelta(seconds=45)  # together with the start of a process, less than a minute
_PROGRESS_SECONDS, _LOOK = 5.0, timedelta(seconds=1)
_LEAVING_SECONDS, _PAUSE_SECONDS = 3.0, 0.05
_REMEDY = "start every rank once, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"


_INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_interface(environment: Environment) -> None:
    """Let Gloo listen on the network interface that leads to rank 0, unless GLOO_SOCKET_IFNAME names an interface.

    By default Gloo takes the address of this host's own name, which is 127.0.1.1 on many systems.
    Raises: LaunchError for an interface that this host does not have.
    """
    known = psutil.net_if_addrs()
    given = os.environ.get(_INTERFACE)
    if given is not None:
        missing = [name for name in given.split(",") if name not in known]
        if missing:
            raise LaunchError(
                given=f"{_INTERFACE}={given}",
                conflict=f"{socket.gethostname()} has no network interface {', '.join(missing)}",
                remedy=f"use one of {', '.join(known)}, or unset {_INTERFACE}: the one that leads to rank 0 is taken",
            )
        return
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(environment.address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            own = probe.getsockname()[0]
        name = next((n for n, addresses in known.items() if any(a.address == own for a in addresses)), None)
        if name is not None and not ipaddress.ip_address(own).is_loopback:
            os.environ[_INTERFACE] = name


def refuse_loopback(environment: Environment) -> None:
    """Raise LaunchError if there are several hosts and rank 0's address is a loopback address."""
    try:
        place = socket.getaddrinfo(environment.address, environment.port, type=socket.SOCK_STREAM)[0][4]
    except OSError:  # the later attempt to listen reports this
        return
    if environment.num_hosts > 1 and ipaddress.ip_address(place[0]).is_loopback:
        raise LaunchError(
            given=f"MASTER_ADDR={environment.address}, ranks on {environment.num_hosts} hosts",
            conflict=f"on {socket.gethostname()}, where rank 0 is, that is {place[0]}, which no other host reaches",
            remedy="set MASTER_ADDR to the address by which other hosts reach it, or mend /etc/hosts there",
        )


class JoinLimit:
    """Time limit for the wait before a run begins. A line on stderr every 5 s says what is missing."""

    def __init__(self, says: bool) -> None:
        self._says, self._began = says, time.monotonic()
        self._next = self._began + _PROGRESS_SECONDS

    @property
    def is_over(self) -> bool:
        """True if the time has passed."""
        return time.monotonic() - self._began >= JOIN_TIMEOUT.total_seconds()

    @property
    def left(self) -> timedelta:
        """The remaining time, at least one second."""
        return max(_LOOK, JOIN_TIMEOUT - timedelta(seconds=time.monotonic() - self._began))

    def tell(self, what: str) -> None:
        """Print the line if it is due."""
        if self._says and time.monotonic() >= self._next:
            self._next += _PROGRESS_SECONDS
            seconds = round(time.monotonic() - self._began)
            said = f"waiting for {what}, {seconds} s of {JOIN_TIMEOUT.total_seconds():.0f} s"
            print(said, file=sys.stderr, flush=True)


def connect(environment: Environment, once: Callable[[timedelta], Store]) -> Store:
    """Connect to rank 0's store with `once`, which tries for the given time.

    torch prints 40 lines for each of its own attempts, so it tries only where somebody listens.
    Raises: OSError while nobody listens; the last error of `once`.
    """
    waiting = JoinLimit(environment.local_rank == 0)
    while True:
        limit = min(timedelta(seconds=_PROGRESS_SECONDS), waiting.left)
        try:
            socket.create_connection((environment.address, environment.port), limit.total_seconds()).close()
            return once(limit)
        except (dist.DistError, RuntimeError, OSError):
            if waiting.is_over:
                raise
            time.sleep(_PAUSE_SECONDS)
            waiting.tell(f"rank 0's store at {environment.address}:{environment.port}")


def meet(store: Store, environment: Environment, host: str, *, number: int = 1) -> None:
    """Wait until every rank has come.

    Args:
        store: the store of this start.
        environment: this process's environment.
        host: name of this host.
        number: how many processes have come as this rank, including this one.

    Raises:
        LaunchError: on every present rank, with the names of the present ranks. Either two processes have come as one
            rank, or world sizes differ, or a rank has not come within the time limit.
    """
    mine = {"rank": environment.rank, "host": host, "pid": os.getpid(), "world_size": environment.world_size}
    store.set(f"{environment.rank}" if number == 1 else f"{environment.rank} again", json.dumps(mine))
    store.add("come", 1)
    if number > 1:
        first = json.loads(store.get(f"{environment.rank}"))
        _leave(store, environment, {}, f"{_named(first)} and {_named(mine)} have both come as rank {mine['rank']}")
    waiting = JoinLimit(environment.rank == 0)
    keys = [str(rank) for rank in range(environment.world_size)]
    while True:
        with contextlib.suppress(dist.DistError):  # some ranks are missing
            store.wait(keys, _LOOK)
        present = {int(key): json.loads(store.get(key)) for key in keys if store.check([key])}
        if store.check(["trouble"]):
            _leave(store, environment, present, store.get("trouble").decode())
        other = next((one for one in present.values() if one["world_size"] != environment.world_size), None)
        if other is not None:
            _leave(store, environment, present, f"{_sized(other)}, and {_sized(mine)}")
        if len(present) == environment.world_size:
            return
        missing = ", ".join(key for key in keys if int(key) not in present)
        if waiting.is_over:
            limit = f"within {JOIN_TIMEOUT.total_seconds():.0f} s"
            _leave(store, environment, present, f"rank {missing} of {environment.world_size} did not come {limit}")
        waiting.tell(f"rank {missing} of {environment.world_size} (here are {_all(present)})")


def _leave(store: Store, environment: Environment, present: dict[int, dict[str, Any]], why: str) -> None:
    """Raise LaunchError. Rank 0, which serves the store, first waits until the others have read the reason."""
    if not store.check(["trouble"]):
        store.set("trouble", why)
    left, deadline = store.add("left", 1), time.monotonic() + _LEAVING_SECONDS
    while environment.rank == 0 and left < store.add("come", 0) and time.monotonic() < deadline:
        time.sleep(0.05)
        left = store.add("left", 0)
    here = f"; here are {_all(present)}" if present else ""
    raise LaunchError(
        given=f"rank {environment.rank} of {environment.world_size} at {environment.address}:{environment.port}",
        conflict=f"{why}{here}",
        remedy=_REMEDY,
    )


def _named(one: dict[str, Any]) -> str:
    return f"process {one['pid']} on {one['host']}"


def _sized(one: dict[str, Any]) -> str:
    return f"rank {one['rank']} ({_named(one)}) was started with WORLD_SIZE={one['world_size']}"


def _all(present: dict[int, dict[str, Any]]) -> str:
    return ", ".join(f"rank {rank} ({_named(one)})" for rank, one in sorted(present.items())[:16])
