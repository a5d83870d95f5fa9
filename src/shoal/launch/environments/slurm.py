"""Environment of a task that Slurm's srun has started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from shoal.launch.environment import OWN_GPU, Environment
from shoal.launch.environments.reader import EnvironmentReader, numbers_of, port_of, refuse_missing, refuse_outside

# Step ids from here on are not steps of srun: the batch script, an interactive shell.
_SPECIAL_STEPS = 0xFFFFFFF0
_SIZE = "SLURM_STEP_NUM_TASKS"
_NUMBERS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_NODES, _PER_NODE = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
# srun shows each task of such a step only its own GPUs.
_BINDING = frozenset({"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"})


def read(variables: Mapping[str, str]) -> Environment | None:
    """Read the environment of one of several tasks of an srun step; None elsewhere.

    A batch script has SLURM_PROCID too. With Slurm 22.05, only srun sets SLURM_STEP_NUM_TASKS.
    """
    step_numbers = numbers_of(variables, (_SIZE, "SLURM_STEP_ID"))
    if step_numbers.get(_SIZE, 1) == 1 or step_numbers.get("SLURM_STEP_ID", 0) >= _SPECIAL_STEPS:
        return None
    refuse_missing(
        variables,
        (_SIZE, *_NUMBERS, _NODES, _PER_NODE),
        "start with srun, which sets them, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
    )
    numbers = numbers_of(variables, (_SIZE, *_NUMBERS, "SLURM_RESTART_COUNT"))
    rank, local, host, job, step = (numbers[name] for name in _NUMBERS)
    refuse_outside(("SLURM_PROCID", rank), (_SIZE, numbers[_SIZE]))
    per_host = []
    for part in variables[_PER_NODE].split(","):
        number, _, times = part.partition("(x")
        per_host += [int(number)] * int(times.rstrip(")") or 1)
    first = "127.0.0.1" if len(per_host) == 1 else _first_host(variables[_NODES])
    address, port = variables.get("MASTER_ADDR", first), port_of(variables, job * 97 + step)
    place = Environment(rank, numbers[_SIZE], local, per_host[host], address, port, host=host, num_hosts=len(per_host))
    own_gpu = bool(_BINDING & variables.keys()) or OWN_GPU in variables
    restarts = numbers.get("SLURM_RESTART_COUNT", 0)
    return replace(place, own_gpu=own_gpu, restarts=restarts, engine="slurm", job=variables["SLURM_JOB_ID"])


def _first_host(nodes: str) -> str:
    """Return the first host: gpu007 for "gpu[007-009,012],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "it may be empty"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


SLURM = EnvironmentReader("Slurm's srun", "SLURM_PROCID", _SIZE, read, marks=(_SIZE, "SLURM_STEP_ID"))
