"""Environment: who this process is among the processes of a run. Read once at the edge, then passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.errors import LaunchError

LISTEN_FD = "SHOAL_LISTEN_FD"  # a socket bound and listening for rank 0, inherited from the local launcher
REPORT_FILE = "SHOAL_REPORT_FILE"  # where a worker writes how it ended, for the local launcher
LAUNCHER_PID = "SHOAL_LAUNCHER_PID"  # the local launcher, without which a worker must not live on
RUN_KEY = "SHOAL_RUN_KEY"  # a secret of this run, with which its processes prove to each other that they are of it
LOCK_FD = (
    "SHOAL_RUN_LOCK_FD"  # the lock of the run directory, inherited from the local launcher: it lasts as long as any
)
STARTED_AT = "SHOAL_STARTED_AT"  # time.time() at which the command began


@dataclass(frozen=True)
class Environment:
    """This process's rank and how the ranks find each other.

    `listen_fd` is an open listening socket for rank 0's store; `agent_store` says that a launcher already serves one.
    `key`: a secret of the run, where its launcher made one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None
    agent_store: bool = False
    key: str | None = field(default=None, repr=False)

    @property
    def single_host(self) -> bool:
        """Whether all the ranks are on this host."""
        return self.local_world_size == self.world_size

    def variables(self) -> dict[str, str]:
        """What `joined` reads this from."""
        found = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        found |= {"LOCAL_WORLD_SIZE": self.local_world_size, "MASTER_PORT": self.port}
        if self.listen_fd is not None:
            found[LISTEN_FD] = self.listen_fd
        texts = {"MASTER_ADDR": self.address} | ({RUN_KEY: self.key} if self.key is not None else {})
        return texts | {name: str(value) for name, value in found.items()}


_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def joined(variables: Mapping[str, str]) -> Environment | None:
    """The environment that torchrun or another launcher has set, or None where none has.

    Raises: LaunchError where the variables are incomplete or make no sense; all of that at once.
    """
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return None
    missing = [name for name in _NEEDED if name not in variables]
    if missing:
        raise LaunchError(
            given=", ".join(f"{n}={variables[n]}" for n in _NEEDED if n in variables),
            conflict=f"{', '.join(missing)} is not set",
            remedy="set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun does), or none of them",
        )
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: variables[name] for name in names if name in variables}
    wrong = {name: text for name, text in texts.items() if not text.isdecimal()}
    if wrong:
        raise LaunchError(
            given=", ".join(f"{name}={text}" for name, text in wrong.items()),
            conflict="these are whole numbers of at least 0",
            remedy=f"set {', '.join(wrong)} to integers",
        )
    numbers = {name: int(text) for name, text in texts.items()}
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    if not 0 <= rank < world_size:
        raise LaunchError(
            given=f"RANK={rank}, WORLD_SIZE={world_size}",
            conflict="ranks are numbered 0 to WORLD_SIZE - 1",
            remedy="start WORLD_SIZE processes with ranks from 0",
        )
    fd = variables.get(LISTEN_FD)
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=numbers.get("LOCAL_RANK", 0),
        local_world_size=numbers.get("LOCAL_WORLD_SIZE", 1),
        address=variables["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        listen_fd=int(fd) if fd else None,
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        key=variables.get(RUN_KEY),
    )
