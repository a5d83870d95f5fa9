"""Environments of processes that an mpirun has started: Open MPI's, or that of MPICH (Hydra), Intel MPI or MVAPICH."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.launch.environment import OWN_GPU, RESTARTS, Environment
from shoal.launch.environments.reader import EnvironmentReader, numbers_of, port_of, refuse_missing, refuse_outside

_OMPI_RANK, _OMPI_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_OMPI_LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_PMI_RANK, _PMI_SIZE = "PMI_RANK", "PMI_SIZE"
_PMI_LOCAL = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PROXY = "hydra_pmi_proxy"  # one on each host, the parent of its ranks
_MOST_PARENTS = 16


def _read_open_mpi(variables: Mapping[str, str]) -> Environment | None:
    """Read the environment of one of several processes. On several hosts, MASTER_ADDR must name the host of rank 0.

    Tested with Open MPI 4.1. Raises: LaunchError if this or another variable is missing or not a number.
    """
    if numbers_of(variables, [_OMPI_SIZE]).get(_OMPI_SIZE, 1) == 1:
        return None
    refuse_missing(variables, (_OMPI_RANK, _OMPI_SIZE, *_OMPI_LOCAL), "start with mpirun, which sets them")
    numbers = numbers_of(variables, (_OMPI_RANK, _OMPI_SIZE, *_OMPI_LOCAL, RESTARTS))
    rank, size, local_rank, local_size = (numbers[name] for name in (_OMPI_RANK, _OMPI_SIZE, *_OMPI_LOCAL))
    refuse_outside((_OMPI_RANK, rank), (_OMPI_SIZE, size))
    if local_size < size:
        refuse_missing(
            variables,
            (_OMPI_RANK, _OMPI_SIZE, "MASTER_ADDR"),
            "write mpirun -x MASTER_ADDR=HOST, with the host of rank 0; or let shoal run --on mpi start mpirun",
        )
    job = variables.get("PMIX_NAMESPACE", variables.get("OMPI_MCA_ess_base_jobid", ""))
    return Environment(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        address=variables.get("MASTER_ADDR", "127.0.0.1"),
        port=port_of(variables, sum(byte * 31**n for n, byte in enumerate(job.encode()))),
        own_gpu=OWN_GPU in variables,
        restarts=numbers.get(RESTARTS, 0),
        host=rank // local_size,
        num_hosts=-(-size // local_size),
        engine="mpi",
        job=job,
    )


def _read_pmi(variables: Mapping[str, str]) -> Environment | None:
    """Read the environment of one of several processes. On several hosts, MASTER_ADDR must name the host of rank 0.

    Tested with MPICH 4.0. Raises: LaunchError if this or another variable is missing or not a number.
    """
    size = numbers_of(variables, [_PMI_SIZE]).get(_PMI_SIZE, 1)
    if size == 1:
        return None
    refuse_missing(variables, (_PMI_RANK, _PMI_SIZE), "start with mpirun, which sets them")
    numbers = numbers_of(variables, (_PMI_RANK, *_PMI_LOCAL, RESTARTS))
    rank = numbers[_PMI_RANK]
    refuse_outside((_PMI_RANK, rank), (_PMI_SIZE, size))
    if "SLURM_STEP_NUM_TASKS" in variables and _PMI_LOCAL[0] not in variables:
        return None  # srun --mpi=pmi2, whose own variables say more
    refuse_missing(
        variables, (_PMI_RANK, _PMI_SIZE, *_PMI_LOCAL), "start with Hydra's mpirun, which sets them, or with torchrun"
    )
    local_rank, local_size = (numbers[name] for name in _PMI_LOCAL)
    if local_size < size:
        refuse_missing(
            variables,
            (_PMI_RANK, _PMI_SIZE, "MASTER_ADDR", "MASTER_PORT"),
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
    """Return the process id of the proxy that started this host's ranks. It replaces a job id, which PMI lacks."""
    pid = os.getppid()
    with contextlib.suppress(OSError):
        for _ in range(_MOST_PARENTS):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(")")
            if name.startswith(_PROXY[:15]):  # the kernel shortens the name
                return pid
            pid = int(rest.split()[1])
    return os.getppid()


OPEN_MPI = EnvironmentReader(
    "Open MPI's mpirun", _OMPI_RANK, _OMPI_SIZE, _read_open_mpi, nests=True, marks=(_OMPI_SIZE,)
)
PMI = EnvironmentReader("MPICH's mpirun", _PMI_RANK, _PMI_SIZE, _read_pmi, nests=True, marks=(_PMI_SIZE,))
