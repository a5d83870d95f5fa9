"""Environments of processes that an mpirun has started: Open MPI's, or that of MPICH (Hydra), Intel MPI or MVAPICH."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.launch.environment import OWN_GPU, RESTARTS, Environment
from shoal.launch.environments.reader import EnvironmentReader, numbers_of, port_of, refuse_missing, refuse_outside

# Variables with the rank, the world size, the local rank and the local world size.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PROXY = "hydra_pmi_proxy"  # one on each host, the parent of its ranks
_MOST_PARENTS = 16


def _read(variables: Mapping[str, str], *, pmi: bool) -> Environment | None:
    """Read the environment of one of several processes. On several hosts, MASTER_ADDR must name the host of rank 0.

    Tested with Open MPI 4.1 and MPICH 4.0. Raises: LaunchError if this or another variable is missing or not a number.
    """
    names = _PMI if pmi else _OPEN_MPI
    if numbers_of(variables, names[1:2]).get(names[1], 1) == 1:
        return None
    if pmi and names[0] in variables and "SLURM_STEP_NUM_TASKS" in variables and names[2] not in variables:
        return None  # srun --mpi=pmi2, whose own variables say more
    by = "Hydra's mpirun, which sets them, or with torchrun" if pmi else "mpirun, which sets them"
    refuse_missing(variables, names, f"start with {by}")
    numbers = numbers_of(variables, (*names, RESTARTS))
    rank, size, local_rank, local_size = (numbers[name] for name in names)
    refuse_outside((names[0], rank), (names[1], size))
    if local_size < size:
        words = "-genv MASTER_ADDR HOST -genv MASTER_PORT PORT" if pmi else "-x MASTER_ADDR=HOST"
        refuse_missing(
            variables,
            (*names[:2], "MASTER_ADDR", *(("MASTER_PORT",) if pmi else ())),
            f"write mpirun {words}, with the host of rank 0; or let shoal run --on mpi start mpirun",
        )
    job = "" if pmi else variables.get("PMIX_NAMESPACE", variables.get("OMPI_MCA_ess_base_jobid", ""))
    port = port_of(variables, _proxy() if pmi else sum(byte * 31**n for n, byte in enumerate(job.encode())))
    place = Environment(rank, size, local_rank, local_size, variables.get("MASTER_ADDR", "127.0.0.1"), port)
    own_gpu, restarts = OWN_GPU in variables, numbers.get(RESTARTS, 0)
    host, num_hosts = rank // local_size, -(-size // local_size)
    return replace(place, own_gpu=own_gpu, restarts=restarts, host=host, num_hosts=num_hosts, engine="mpi", job=job)


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


OPEN_MPI, PMI = (
    EnvironmentReader(title, names[0], names[1], partial(_read, pmi=names is _PMI), nests=True, marks=names[1:2])
    for title, names in (("Open MPI's mpirun", _OPEN_MPI), ("MPICH's mpirun", _PMI))
)
