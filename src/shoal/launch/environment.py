"""Process environment: rank, world size and rendezvous address, read once at the edge, then passed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from shoal.errors import LaunchError

GATE_FD = "SHOAL_GATE_FD"  # a pipe on which a spare process waits until it is needed
LISTEN_FD = "SHOAL_LISTEN_FD"  # a socket bound and listening for rank 0, inherited from the local launcher
REPORT_FILE = "SHOAL_REPORT_FILE"  # where a worker writes how it ended, for the local launcher
LAUNCHER_PID = "SHOAL_LAUNCHER_PID"  # the local launcher, without which a worker must not live on
RUN_KEY = "SHOAL_RUN_KEY"  # a secret of this run, with which its processes prove to each other that they are of it
LOCK_FD = "SHOAL_RUN_LOCK_FD"  # the lock of the run directory, inherited from the local launcher
INSIDE = "SHOAL_INSIDE_RUN"  # set while this process runs a job's code: is its only rank, or looks at it
REQUEST_FILE = "SHOAL_REQUEST_FILE"  # the run request that the local launcher hands over to a worker


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


def refuse_rank(variables: Mapping[str, str], call: str) -> None:
    """Raises: LaunchError where a process that starts ranks is a rank itself, or one of a launcher's processes."""
    launched = joined(variables)
    if launched is None and INSIDE not in variables:
        return
    own = INSIDE in variables or LAUNCHER_PID in variables
    which = "" if launched is None else f" (RANK={launched.rank}, WORLD_SIZE={launched.world_size})"
    raise LaunchError(
        given=f"{call} inside of a running job{which}" if own else f"{call} under a launcher{which}",
        conflict="it starts its ranks itself, all on this host, and this process is one of a run's already",
        remedy='call it where no job\'s code runs: below `if __name__ == "__main__":` of a file that has a job'
        if own
        else "call it once and without the launcher; or start the command with it: torchrun ... -m shoal run JOBFILE",
    )


@dataclass(frozen=True)
class Environment:
    """Rank of this process, and the rendezvous of all ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None  # an open listening socket for rank 0's store
    agent_store: bool = False  # whether a launcher already serves a store
    own_gpu: bool = False  # whether a process may see its own GPU only
    restarts: int = 0  # how often torchrun has started the ranks anew
    key: str | None = field(default=None, repr=False)  # a secret of the run, where its launcher made one

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
        texts = {"MASTER_ADDR": self.address} | ({RUN_KEY: self.key} if self.key is not None else {})
        return texts | {name: str(value) for name, value in found.items()}


_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# What launchers that are not joined say of a process: its number, and of how many.
_UNKNOWN = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("an MPI launcher", "PMI_RANK", "PMI_SIZE"),
)
# Steps of Slurm from here on are no steps of srun: the batch script, an interactive shell.
_SPECIAL_STEPS = 0xFFFFFFF0


def joined(variables: Mapping[str, str]) -> Environment | None:
    """The environment that torchrun, srun or another launcher has set, or None where none has.

    Raises: LaunchError where the variables are incomplete or make no sense, all of that at once; or where they say that
    this is one of several processes, in words that are not joined: each would train by itself.
    """
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        task = _slurm_task(variables)
        if task is None:
            _refuse_unknown(variables)
        return task
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
        own_gpu=_OWN_GPU in variables,
        restarts=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


# srun shows a task of such a step its own GPUs only.
_BINDING = frozenset({"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"})
_OWN_GPU = "SHOAL_OWN_GPU"


def _slurm_task(variables: Mapping[str, str]) -> Environment | None:
    """A task of an srun step of several; None elsewhere, also in a batch script, which has SLURM_PROCID as well.

    Seen with Slurm 22.05: SLURM_STEP_NUM_TASKS is set by srun alone.
    """
    number = variables.get("SLURM_STEP_NUM_TASKS", "1")
    if number == "1" or int(variables.get("SLURM_STEP_ID", "0")) >= _SPECIAL_STEPS:
        return None
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    missing = [name for name in (*names, "SLURM_STEP_TASKS_PER_NODE") if name not in variables]
    if missing:
        raise LaunchError(
            given=f"SLURM_STEP_NUM_TASKS={number}",
            conflict=f"{', '.join(missing)} is not set",
            remedy="start with srun, which sets them, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    rank, local, node, job, step = (int(variables[name]) for name in names[:5])
    per_node = _repeated(variables["SLURM_STEP_TASKS_PER_NODE"])
    first = "127.0.0.1" if len(per_node) == 1 else _first_host(variables["SLURM_STEP_NODELIST"])
    port = variables.get("MASTER_PORT", str(_FIRST_PORT + (job * 97 + step) % _NUM_PORTS))
    return joined(
        {
            "RANK": str(rank),
            "WORLD_SIZE": number,
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(per_node[node]),
            "MASTER_ADDR": variables.get("MASTER_ADDR", first),
            "MASTER_PORT": port,
        }
        | ({_OWN_GPU: "1"} if _BINDING & variables.keys() else {})
    )


# Below those that systems give out by themselves. A function of job and step, so that all tasks know it.
_FIRST_PORT, _NUM_PORTS = 15_000, 16_000


def _repeated(text: str) -> list[int]:
    """[2, 2, 1] from "2(x2),1": how many tasks each node has."""
    counts = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts


def _first_host(nodes: str) -> str:
    """gpu007 from "gpu[007-009,012],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "it may be empty"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _refuse_unknown(variables: Mapping[str, str]) -> None:
    """Raises: LaunchError where another launcher has started this process beside others."""
    remedy = (
        "start one process, with --devices for the ranks of a host, or start the ranks with torchrun or srun; "
        "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
    )
    for launcher, rank, size in _UNKNOWN:
        if variables.get(size, "1") != "1":
            raise LaunchError(
                given=f"{rank}={variables.get(rank, '')}, {size}={variables[size]}",
                conflict=f"{launcher} has started several processes, and each would train the whole job by itself",
                remedy=remedy,
            )
    alone = {name: variables[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in variables}
    if any(text not in ("0", "1") for text in alone.values()) or alone.get("LOCAL_RANK") == "1":
        raise LaunchError(
            given=", ".join(f"{name}={text}" for name, text in alone.items()),
            conflict="this is one of several processes, but RANK and WORLD_SIZE are not set",
            remedy=remedy,
        )
