"""Environment of a process that Open MPI's mpirun has started."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.launch.environment import OWN_GPU, RESTARTS, Environment
from shoal.launch.environments.reader import EnvironmentReader, numbers_of, port_of, refuse_missing, refuse_outside

_RANK, _SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


def read(variables: Mapping[str, str]) -> Environment | None:
    """Read the environment of one of several processes. On several hosts, MASTER_ADDR must name the host of rank 0.

    Tested with Open MPI 4.1. Raises: LaunchError if this or another variable is missing or not a number.
    """
    if numbers_of(variables, [_SIZE]).get(_SIZE, 1) == 1:
        return None
    refuse_missing(variables, (_RANK, _SIZE, *_LOCAL), "start with mpirun, which sets them")
    numbers = numbers_of(variables, (_RANK, _SIZE, *_LOCAL, RESTARTS))
    rank, size, local_rank, local_size = (numbers[name] for name in (_RANK, _SIZE, *_LOCAL))
    refuse_outside((_RANK, rank), (_SIZE, size))
    if local_size < size:
        refuse_missing(
            variables,
            (_RANK, _SIZE, "MASTER_ADDR"),
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


OPEN_MPI = EnvironmentReader("Open MPI's mpirun", _RANK, _SIZE, read, nests=True)
