"""Environment of a process that the mpirun of MPICH (Hydra), Intel MPI or MVAPICH has started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from shoal.launch.environment import OWN_GPU, RESTARTS, Environment
from shoal.launch.environments.reader import EnvironmentReader, numbers_of, port_of, refuse_missing, refuse_outside

_RANK, _SIZE = "PMI_RANK", "PMI_SIZE"
_LOCAL = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PROXY = "hydra_pmi_proxy"  # one on each host, the parent of its ranks
_MOST_PARENTS = 16


def read(variables: Mapping[str, str]) -> Environment | None:
    """Read the environment of one of several processes. On several hosts, MASTER_ADDR must name the host of rank 0.

    Tested with MPICH 4.0. Raises: LaunchError if this or another variable is missing or not a number.
    """
    size = numbers_of(variables, [_SIZE]).get(_SIZE, 1)
    if size == 1:
        return None
    refuse_missing(variables, (_RANK, _SIZE), "start with mpirun, which sets them")
    numbers = numbers_of(variables, (_RANK, *_LOCAL, RESTARTS))
    rank = numbers[_RANK]
    refuse_outside((_RANK, rank), (_SIZE, size))
    if "SLURM_STEP_NUM_TASKS" in variables and _LOCAL[0] not in variables:
        return None  # srun --mpi=pmi2, whose own variables say more
    refuse_missing(variables, (_RANK, _SIZE, *_LOCAL), "start with Hydra's mpirun, which sets them, or with torchrun")
    local_rank, local_size = (numbers[name] for name in _LOCAL)
    if local_size < size:
        refuse_missing(
            variables,
            (_RANK, _SIZE, "MASTER_ADDR", "MASTER_PORT"),
            "write mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT PORT, with the host of rank 0; or let "
            "shoal run --on mpi start mpirun",
        )
    return Environment(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        address=variables.get("MASTER_ADDR", "127.0.0.1"),
        port=port_of(variables, _proxy()),
        own_gpu=OWN_GPU in variables,
        restarts=numbers.get(RESTARTS, 0),
        host=rank // local_size,
        num_hosts=-(-size // local_size),
        engine="mpi",
    )


def _proxy() -> int:
    """Return the process id of the proxy that started this host's ranks, in place of a job id: PMI has none."""
    for pid, name in _parents():
        if name.startswith(_PROXY[:15]):  # the kernel shortens the name
            return pid
    return os.getppid()


def _parents() -> Iterator[tuple[int, str]]:
    pid = os.getppid()
    for _ in range(_MOST_PARENTS):
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        name, _, rest = text.partition("(")[2].rpartition(")")
        yield pid, name
        pid = int(rest.split()[1])


PMI = EnvironmentReader("MPICH's mpirun", _RANK, _SIZE, read, nests=True)
