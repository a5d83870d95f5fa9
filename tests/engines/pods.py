"""Pods without a cluster: hosts of `namespaces.py` with the names and variables that Kubernetes gives them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.engines import namespaces
from tests.engines.namespaces import Hosts


@contextlib.contextmanager
def two_pods(first_host: str) -> Iterator[Hosts]:
    """Two pods; `first_host` is the name by which a Service lets both find pod 0."""
    with namespaces.made("pod-0", "pod-1") as hosts:
        with hosts[0].known.open("a") as known:
            known.write(f"{hosts[0].address} {first_host}\n")
        yield hosts


def variables(container: dict[str, Any], index: int) -> dict[str, str]:
    """The environment of a container of an Indexed Job's pod, with references resolved as the kubelet does."""
    found = {"JOB_COMPLETION_INDEX": str(index)}
    for entry in container["env"]:
        if "value" in entry:
            found[entry["name"]] = entry["value"]
        else:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            found[entry["name"]] = str(index)
    return found


def trainer_variables(train_job: dict[str, Any], index: int) -> dict[str, str]:
    """The environment of a pod of a TrainJob: as Kubeflow's Trainer sets it for the policy torch."""
    name, trainer = train_job["metadata"]["name"], train_job["spec"]["trainer"]
    return {
        "JOB_COMPLETION_INDEX": str(index),
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
        **{entry["name"]: entry["value"] for entry in trainer["env"]},
    }
