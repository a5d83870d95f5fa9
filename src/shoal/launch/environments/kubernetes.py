"""Environment of a pod of a Kubernetes Indexed Job or of the Kubeflow Trainer, which sets torchrun's PET_ variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.errors import LaunchError
from shoal.launch.environment import OWN_GPU, RESTARTS, Environment
from shoal.launch.environments.reader import EnvironmentReader, numbers_of, refuse_missing, refuse_outside
from shoal.runs.request import devices_here

_INDEX, _HOST, _HOSTS, _RANKS = "JOB_COMPLETION_INDEX", "PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE"
_ADDRESS, _PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"
_DEFAULT_PORT = 29500  # each pod has its own address
# torchrun's words for one process per device.
_ALL_DEVICES = ("auto", "gpu", "cpu", "xpu")


def read(variables: Mapping[str, str]) -> Environment | None:
    """Read a pod's environment: a rank if the pod runs one process, else a process that starts the pod's ranks.

    Raises: LaunchError if variables are missing, are not numbers, or do not fix the number of pods.
    """
    if _HOSTS not in variables and _INDEX not in variables:
        return None
    if "RANK" in variables and ("TORCHELASTIC_RUN_ID" in variables or ":" in variables.get(_HOSTS, "")):
        return None  # torchrun has started this process, and the variables are torchrun's own defaults
    if ":" in variables.get(_HOSTS, "") or "PET_RDZV_ENDPOINT" in variables:
        raise LaunchError(
            given=f"{_HOSTS}={variables.get(_HOSTS, '')}",
            conflict="the number of pods is not fixed: torchrun's rendezvous sets it when the pods start",
            remedy="start the pods with the command: torchrun -m shoal run JOBFILE",
        )
    if _HOSTS not in variables:
        refuse_missing(variables, (_INDEX, _HOSTS), f"set {_HOSTS} to the number of pods: 1 where each is a run")
    hosts = numbers_of(variables, [_HOSTS])[_HOSTS]
    text = variables.get(_RANKS, "1")
    ranks = devices_here() if text in _ALL_DEVICES else max(1, numbers_of(variables, [_RANKS]).get(_RANKS, 1))
    if hosts == 1:
        return None if ranks == 1 else Environment(0, ranks, 0, ranks, engine="kubernetes", num_to_start=ranks)
    host_name = _HOST if _HOST in variables else _INDEX
    refuse_missing(variables, (_HOSTS, host_name, _ADDRESS), "let the manifest set them, as shoal run --on kubernetes")
    numbers = numbers_of(variables, (host_name, _PORT, RESTARTS))
    host = numbers[host_name]
    refuse_outside((host_name, host), (_HOSTS, hosts))
    port, own_gpu, restarts = numbers.get(_PORT, _DEFAULT_PORT), OWN_GPU in variables, numbers.get(RESTARTS, 0)
    place = Environment(host * ranks, hosts * ranks, 0, ranks, variables[_ADDRESS], port, host=host, num_hosts=hosts)
    to_start = 0 if ranks == 1 else ranks
    return replace(place, own_gpu=own_gpu, restarts=restarts, engine="kubernetes", num_to_start=to_start)


KUBERNETES = EnvironmentReader("Kubernetes", _HOST, _HOSTS, read, marks=(_HOSTS, _INDEX))
