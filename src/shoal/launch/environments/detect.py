"""Detection of the environment: the order of precedence of the engines, and an error if two disagree."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import LaunchError
from shoal.launch.environment import ENGINE, INSIDE, LAUNCHER_PID, RESTARTS, Environment
from shoal.launch.environments.kubernetes import KUBERNETES
from shoal.launch.environments.mpi import OPEN_MPI, PMI
from shoal.launch.environments.reader import START_RANKS, EnvironmentReader, numbers_of
from shoal.launch.environments.slurm import SLURM
from shoal.launch.environments.torchrun import RAY, SPARK, TORCHRUN

# Innermost first: each engine may be started inside the engines after it.
READERS = (RAY, SPARK, TORCHRUN, OPEN_MPI, PMI, KUBERNETES, SLURM)

_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", RESTARTS)
# Variables of MVAPICH, which is not supported.
_MVAPICH_RANK, _MVAPICH_SIZE = "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"


def detected(variables: Mapping[str, str]) -> Environment | None:
    """Return the environment that an engine has set for this process, or None without an engine.

    The process is a rank or starts the ranks of its host. The first of `READERS` that reads an environment wins.
    Raises: LaunchError if another reader disagrees, if variables are missing or invalid, or if an unsupported launcher
    has set them, since each process would then train alone.
    """
    readings = _read(variables)
    if not readings:
        if variables.get(_MVAPICH_SIZE, "1") == "1":
            return None
        raise LaunchError(
            given=f"{_MVAPICH_RANK}={variables.get(_MVAPICH_RANK, '')}, {_MVAPICH_SIZE}={variables[_MVAPICH_SIZE]}",
            conflict="MVAPICH has started several processes, and each would train the whole job by itself",
            remedy=START_RANKS,
        )
    inner, environment = readings[0]
    for outer, other in readings[1:]:
        if not _agree(environment, other, nested=inner.nests and _is_started(inner, variables)):
            ranks = [
                f"rank {one.rank} of {one.world_size} by {reader.title}"
                for reader, one in ((inner, environment), (outer, other))
            ]
            names = [f"{reader.rank_name} and {reader.size_name}" for reader in (inner, outer)]
            raise LaunchError(
                given=" and ".join(f"{reader.shown(variables)} ({reader.title})" for reader in (inner, outer)),
                conflict=f"two environments disagree: this process is {ranks[0]}, and {ranks[1]}",
                remedy=f"unset {names[0]} where {outer.title} starts the ranks, or {names[1]} where {inner.title} does",
            )
    return environment


def _read(variables: Mapping[str, str]) -> list[tuple[EnvironmentReader, Environment]]:
    """Return the environments in the variables, the innermost first. Raises: LaunchError."""
    readings: list[tuple[EnvironmentReader, Environment]] = []
    for reader in READERS:
        if not any(name in variables for name in reader.marks):
            continue
        try:
            environment = reader.read(variables)
        except LaunchError:
            if readings and _is_started(readings[0][0], variables):
                continue  # variables of the engine that started the inner launcher
            raise
        if environment is None:
            continue
        readings.append((reader, environment))
        if LAUNCHER_PID in variables or ENGINE in variables:  # shoal's own launcher, which knew of the others
            break
    return readings


def joined(variables: Mapping[str, str]) -> Environment | None:
    """Return the environment of a rank, as `detected`. Raises: LaunchError also if this process should start ranks."""
    environment = detected(variables)
    if environment is not None and environment.num_to_start:
        raise LaunchError(
            given=f"{environment.num_to_start} ranks of this host ({environment.engine}), and one process",
            conflict="this process is not a rank, and does not start ranks",
            remedy="start it with torchrun, which reads the same variables",
        )
    return environment


def has_launcher(variables: Mapping[str, str]) -> bool:
    """Return True if a launcher has started this process, and kills it if it has to end at once.

    A person may set RANK and WORLD_SIZE, and start each rank in a terminal of its own.
    """
    if LAUNCHER_PID in variables or ENGINE in variables:
        return True
    readings = _read(variables)
    return bool(readings) and _is_started(readings[0][0], variables)


def restarts(variables: Mapping[str, str]) -> int:
    """Return how many times an engine has restarted this command, also if the engine starts only one process."""
    return sum(numbers_of(variables, _RESTARTS).values())


def refuse_rank(variables: Mapping[str, str], call: str) -> None:
    """Raise LaunchError if a process that starts ranks is itself a rank or a launcher's process."""
    own = INSIDE in variables or LAUNCHER_PID in variables
    launched = None if own else detected(variables)  # while a job is loaded, some variables of its rank are hidden
    if launched is not None and launched.num_to_start and launched.num_hosts == 1:
        launched = None  # a pod that starts its own ranks, which this process does
    if launched is None and not own:
        return
    which = "" if launched is None else f" (RANK={launched.rank}, WORLD_SIZE={launched.world_size})"
    raise LaunchError(
        given=f"{call} inside of a running job{which}" if own else f"{call} under a launcher{which}",
        conflict="it starts its ranks itself, all on this host, and this process is one of a run's already",
        remedy='call it where no job\'s code runs: below `if __name__ == "__main__":` of a file that has a job'
        if own
        else "call it once and without the launcher; or start the command with it: torchrun ... -m shoal run JOBFILE",
    )


def _is_started(reader: EnvironmentReader, variables: Mapping[str, str]) -> bool:
    """Check whether this launcher itself set the variables. RANK and WORLD_SIZE may come from another program."""
    return reader is not TORCHRUN or "TORCHELASTIC_RUN_ID" in variables


def _agree(inner: Environment, outer: Environment, *, nested: bool) -> bool:
    """Check that both environments name the same rank, or that `outer` started one launcher of `inner` on each host."""
    if outer.num_to_start:
        return (inner.world_size, inner.num_hosts) == (outer.world_size, outer.num_hosts)
    if (inner.rank, inner.world_size) == (outer.rank, outer.world_size):
        return True
    return nested and outer.local_world_size == 1 and inner.num_hosts >= outer.num_hosts
