"""Process environment: rank, world size and rendezvous address, as values. `environments/` reads them once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

FORK_FD = "SHOAL_FORK_FD"  # a socket over which the launcher asks this process to fork ranks
LISTEN_FD = "SHOAL_LISTEN_FD"  # a socket bound and listening for rank 0, inherited from the local launcher
REPORT_FILE = "SHOAL_REPORT_FILE"  # the file to which a worker writes its report for the local launcher
LAUNCHER_PID = "SHOAL_LAUNCHER_PID"  # process id of the local launcher; a worker must not outlive this process
RUN_KEY = "SHOAL_RUN_KEY"  # a secret with which processes prove to each other that they belong to this run
LOCK_FD = "SHOAL_RUN_LOCK_FD"  # the lock of the run directory, inherited from the local launcher
INSIDE = "SHOAL_INSIDE_RUN"  # set while this process runs a job's code, as the only rank or to inspect the job
REQUEST_FILE = "SHOAL_REQUEST_FILE"  # the run request that the local launcher passes to a worker
DIRECTORY_FILE = "SHOAL_DIRECTORY_FILE"  # the file to which a worker writes the run directory that it has claimed
ENGINE = "SHOAL_ENGINE"  # the engine on which shoal's own launcher started this rank, as NAME or NAME:JOB
RESTARTS = "SHOAL_RESTARTS"  # how many times shoal's own launcher has restarted all ranks
OWN_GPU = "SHOAL_OWN_GPU"  # set if a rank sees only its own GPU


@contextlib.contextmanager
def defaults(variables: MutableMapping[str, str], values: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are not yet set to `values` for the duration of the context."""
    added = {name: value for name, value in values.items() if name not in variables}
    variables.update(added)
    try:
        yield
    finally:
        for name in added:
            variables.pop(name, None)


def inside_run(variables: MutableMapping[str, str]) -> AbstractContextManager[None]:
    """Mark this process, for the duration of the context, as one that runs a job's code."""
    return defaults(variables, {INSIDE: "1"})


@dataclass(frozen=True)
class Environment:
    """Rank of this process, and the rendezvous of all ranks.

    If the engine starts only one process on each host, that process represents the host. It starts `num_to_start` ranks
    itself, and `rank` is the first of these ranks.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None  # an open listening socket for rank 0's store
    agent_store: bool = False  # whether a launcher already serves a store
    own_gpu: bool = False  # whether the process may see only its own GPU
    shares_gpu: bool = False  # whether ranks of a host may share its GPUs
    restarts: int = 0  # how many times the engine has restarted the ranks
    key: str | None = field(default=None, repr=False)  # a secret of the run, if its launcher made one
    host: int = 0  # the number of this host
    num_hosts: int = 1  # 0: unknown
    engine: str = ""  # "torchrun", "slurm", ...; empty if no engine started this process
    job: str = ""  # the engine's number or name for the job
    num_to_start: int = 0  # ranks that this process starts on its host; 0: this process is a rank itself

    @property
    def single_host(self) -> bool:
        """True if all ranks are on this host."""
        return self.local_world_size == self.world_size

    def variables(self) -> dict[str, str]:
        """Return the environment variables from which `joined` reads this value."""
        values: dict[str, object] = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        values |= {"LOCAL_WORLD_SIZE": self.local_world_size, "MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        values |= {LISTEN_FD: self.listen_fd, RUN_KEY: self.key, RESTARTS: self.restarts or None}
        if self.num_hosts > 1:
            values |= {"GROUP_RANK": self.host, "GROUP_WORLD_SIZE": self.num_hosts}
        values[ENGINE] = (f"{self.engine}:{self.job}" if self.job else self.engine) or None
        values[OWN_GPU] = "1" if self.own_gpu else None
        return {name: str(value) for name, value in values.items() if value is not None}
