"""Process environment: rank, world size and rendezvous address, as values; `environments/` reads them once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

FORK_FD = "SHOAL_FORK_FD"  # a socket on which this process is asked to fork ranks
LISTEN_FD = "SHOAL_LISTEN_FD"  # a socket bound and listening for rank 0, inherited from the local launcher
REPORT_FILE = "SHOAL_REPORT_FILE"  # where a worker writes how it ended, for the local launcher
LAUNCHER_PID = "SHOAL_LAUNCHER_PID"  # the local launcher, without which a worker must not live on
RUN_KEY = "SHOAL_RUN_KEY"  # a secret of this run, with which its processes prove to each other that they are of it
LOCK_FD = "SHOAL_RUN_LOCK_FD"  # the lock of the run directory, inherited from the local launcher
INSIDE = "SHOAL_INSIDE_RUN"  # set while this process runs a job's code: is its only rank, or looks at it
REQUEST_FILE = "SHOAL_REQUEST_FILE"  # the run request that the local launcher hands over to a worker
ENGINE = "SHOAL_ENGINE"  # the engine that shoal's own launcher has started this rank on, as NAME or NAME:JOB
RESTARTS = "SHOAL_RESTARTS"  # how often shoal's own launcher has started all ranks anew
OWN_GPU = "SHOAL_OWN_GPU"  # set where a rank sees its own GPU only


@contextlib.contextmanager
def inside_run(variables: MutableMapping[str, str]) -> Iterator[None]:
    """A context in which the variables say that this process runs a job's code."""
    before = variables.get(INSIDE)
    variables[INSIDE] = "1"
    try:
        yield
    finally:
        if before is None:
            del variables[INSIDE]


@contextlib.contextmanager
def defaults(variables: MutableMapping[str, str], values: Mapping[str, str]) -> Iterator[None]:
    """A context in which variables that nobody has set have these values."""
    added = {name: value for name, value in values.items() if name not in variables}
    variables.update(added)
    try:
        yield
    finally:
        for name in added:
            variables.pop(name, None)


@dataclass(frozen=True)
class Environment:
    """Rank of this process, and the rendezvous of all ranks.

    A process may also stand for a host: it is the only one that the engine has started there, and starts `num_to_start`
    ranks itself. `rank` is then the first of these.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None  # an open listening socket for rank 0's store
    agent_store: bool = False  # whether a launcher already serves a store
    own_gpu: bool = False  # whether a process may see its own GPU only
    restarts: int = 0  # how often the engine has started the ranks anew
    key: str | None = field(default=None, repr=False)  # a secret of the run, where its launcher made one
    host: int = 0  # the number of this host
    num_hosts: int = 1  # 0: nobody says
    engine: str = ""  # "torchrun", "slurm", ...; empty where nothing has started this process
    job: str = ""  # its number or name there
    num_to_start: int = 0  # ranks that this process is to start on its host; 0: it is a rank itself

    @property
    def single_host(self) -> bool:
        """Whether all the ranks are on this host."""
        return self.local_world_size == self.world_size

    def variables(self) -> dict[str, str]:
        """Environment variables from which `joined` reads this value."""
        found = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        found |= {"LOCAL_WORLD_SIZE": self.local_world_size, "MASTER_PORT": self.port}
        if self.listen_fd is not None:
            found[LISTEN_FD] = self.listen_fd
        if self.num_hosts > 1:
            found |= {"GROUP_RANK": self.host, "GROUP_WORLD_SIZE": self.num_hosts}
        if self.restarts:
            found[RESTARTS] = self.restarts
        texts = {"MASTER_ADDR": self.address} | ({RUN_KEY: self.key} if self.key is not None else {})
        if self.engine:
            texts[ENGINE] = f"{self.engine}:{self.job}" if self.job else self.engine
        if self.own_gpu:
            texts[OWN_GPU] = "1"
        return texts | {name: str(value) for name, value in found.items()}
