"""Pods without a cluster: each is a network namespace with the name and the variables that Kubernetes gives it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SETTINGS = Path("/etc/netns")  # files that `ip netns exec` shows in place of those of /etc


@dataclass(frozen=True)
class PodNetwork:
    """Two namespaces with a link between them; pod 0 has the host name of its index under a headless Service."""

    names: tuple[str, ...]

    def command(self, pod: int, words: list[str]) -> list[str]:
        """A container's command, in the pod's namespace."""
        named = f'hostname pod-{pod} && exec ip netns exec {self.names[pod]} "$@"'
        return ["unshare", "--uts", "sh", "-c", named, "sh", *words]


def why_no_pods() -> str | None:
    """The reason why there can be no namespaces here; None where there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip"
    name = f"shoal-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@contextlib.contextmanager
def two_pods(first_host: str) -> Iterator[PodNetwork]:
    """Two pods on two networks' ends; `first_host` is the name by which both know pod 0."""
    mark = uuid.uuid4().hex[:6]
    names = tuple(f"shoal-{mark}-{i}" for i in range(2))
    links = [f"sp{mark}{i}" for i in range(2)]
    try:
        for i, name in enumerate(names):
            _ip("netns", "add", name)
            (_SETTINGS / name).mkdir(parents=True)
            known = f"127.0.0.1 localhost\n10.213.0.1 {first_host}\n10.213.0.{i + 1} pod-{i}\n"  # as the kubelet's
            (_SETTINGS / name / "hosts").write_text(known)
        _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            _ip("-n", name, "address", "add", f"10.213.0.{i + 1}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield PodNetwork(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(_SETTINGS / name, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


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
