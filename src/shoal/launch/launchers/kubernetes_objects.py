"""Kubernetes objects of a run: an Indexed Job with its Service, a TrainJob with its runtime, or a RayJob."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from shoal.errors import ExitCode, nearest
from shoal.launch.launchers.argument import Check, refuse_wrong

Object = dict[str, Any]

NOBODY_SAID = -1
KINDS = ("job", "trainjob", "rayjob")
_INDEX = "batch.kubernetes.io/job-completion-index"
_MANAGER = "shoal/run"  # owner of a TrainJob's patches
_CONTAINER = "node"  # the name in Trainer's own runtimes, used for all kinds
# Exit codes without a restart, since the same error would follow.
_FINAL = (ExitCode.USER, ExitCode.NONFINITE, ExitCode.STORAGE, ExitCode.INTEGRITY)

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_IMAGE = re.compile(r"[a-zA-Z0-9][\w./:@-]*")
# A pod's name ends in a hyphen and its index, in JobSet in "-node-0-" and its index; a host name has at most 63
# characters.
LONGEST_NAME = 45


@dataclass(frozen=True)
class KubernetesSettings:
    """Settings of `--on kubernetes:KIND,KEY=VALUE,...`; an empty text or 0 means that the user gave none."""

    kind: str = "job"
    image: str = ""
    name: str = ""
    namespace: str = ""  # default: the namespace of kubectl's context
    pods: int = 0
    cluster: str = ""  # a name or file as in `shoal plan --cluster`, for pods and gpus
    gpus: int = 0  # of a pod
    gpu: str = "nvidia.com/gpu"  # the resource's name
    cpu: str = ""
    memory: str = ""
    claim: str = ""  # a PersistentVolumeClaim for the run directory
    mount: str = "/runs"
    grace: int = 120  # seconds from SIGTERM to SIGKILL, for a checkpoint
    restarts: int = NOBODY_SAID  # default: --max-restarts
    port: int = 29500
    runtime: str = ""  # an existing ClusterTrainingRuntime for a TrainJob; default: a new runtime

    def check(self, given: str, num_ranks: int, *, needs_volume: bool = True) -> None:
        """Raise CommandError that lists everything that no cluster would accept or no run could use."""
        refuse_wrong(given, self._names() | self._sizes(num_ranks, needs_volume))

    def _names(self) -> dict[str, Check]:
        """Return checks of the names and the kind, by the conflict that a failure means."""
        label = "a small letter, then small letters, digits and hyphens"
        return {
            f"kind {self.kind!r} is not known{nearest(self.kind, list(KINDS))}": (
                lambda: self.kind in KINDS,
                f"write one of {', '.join(KINDS)}",
            ),
            f"image={self.image!r} names no image": (
                lambda: bool(_IMAGE.fullmatch(self.image)),
                "add image=REGISTRY/NAME:TAG, with shoal, torch and the job file in it",
            ),
            f"name={self.name!r} is no name of an object": (
                lambda: bool(_LABEL.fullmatch(self.name)) and len(self.name) <= LONGEST_NAME,
                f"write name=NAME: {label}, {LONGEST_NAME} at most",
            ),
            f"namespace={self.namespace!r} is none": (
                lambda: not self.namespace or bool(_LABEL.fullmatch(self.namespace) and len(self.namespace) < 64),
                f"write namespace=NAME: {label}",
            ),
            f"claim={self.claim!r} is no name of an object": (
                lambda: not self.claim or bool(_NAME.fullmatch(self.claim) and len(self.claim) < 254),
                "write claim=NAME: small letters, digits, hyphens and dots",
            ),
            f"mount={self.mount!r} is no absolute path": (
                lambda: self.mount.startswith("/") and ":" not in self.mount,
                "write mount=/PATH",
            ),
            f"runtime={self.runtime!r} with kind {self.kind!r}": (
                lambda: not self.runtime or self.kind == "trainjob",
                "leave runtime= out: only a TrainJob has one",
            ),
        }

    def _sizes(self, num_ranks: int, needs_volume: bool) -> dict[str, Check]:
        """Return checks of the number of pods and their resources, as `_names`."""
        quantity = "a number such as 4, 500m or 16Gi"
        gpus = f"{self.gpus} GPUs a pod for {num_ranks // max(1, self.pods)} ranks"
        return {
            f"{num_ranks} ranks in {self.pods} pods": (
                lambda: 0 < self.pods <= num_ranks and num_ranks % self.pods == 0,
                "write --devices as a multiple of pods",
            ),
            f"{gpus}: a GPU serves one rank": (
                lambda: self.gpus in (0, num_ranks // max(1, self.pods)),
                f"write gpus={num_ranks // max(1, self.pods)}, or leave it out for ranks on the CPU",
            ),
            f"cpu={self.cpu!r} is no quantity": (
                lambda: not self.cpu or bool(_QUANTITY.fullmatch(self.cpu)),
                f"write cpu=N: {quantity}",
            ),
            f"memory={self.memory!r} is no quantity": (
                lambda: not self.memory or bool(_QUANTITY.fullmatch(self.memory)),
                f"write memory=N: {quantity}",
            ),
            f"{self.pods} pods without a volume that all of them see": (
                lambda: self.pods == 1 or bool(self.claim) or not needs_volume,
                "add claim=NAME, a PersistentVolumeClaim that several pods can mount (ReadWriteMany), or --out s3://...",
            ),
            f"port={self.port} is none": (
                lambda: 1024 <= self.port < 65536,
                "write port=N from 1024 to 65535",
            ),
        }


@dataclass(frozen=True)
class PodRun:
    """Run in pods: their settings, the ranks of each pod, and the command of each, without a shell."""

    settings: KubernetesSettings
    ranks_per_pod: int
    command: tuple[str, ...]

    def objects(self) -> list[Object]:
        """Return the objects to apply, in order."""
        makers = {"job": self._indexed_job, "trainjob": self._train_job, "rayjob": self._ray_job}
        return makers[self.settings.kind]()

    @property
    def watched(self) -> tuple[str, str]:
        """The object whose status shows how the run ends, and the label selector of its pods."""
        name = self.settings.name
        return {
            "job": (f"job/{name}", f"batch.kubernetes.io/job-name={name}"),
            "trainjob": (f"trainjob/{name}", f"jobset.sigs.k8s.io/jobset-name={name}"),
            "rayjob": (f"rayjob/{name}", f"app.kubernetes.io/instance={name}"),
        }[self.settings.kind]

    def _metadata(self) -> Object:
        at = self.settings
        labels = {"app.kubernetes.io/name": "shoal", "app.kubernetes.io/instance": at.name}
        return {"name": at.name, **({"namespace": at.namespace} if at.namespace else {}), "labels": labels}

    def _indexed_job(self) -> list[Object]:
        at = self.settings
        rendezvous: list[Object] = [
            {"name": "PET_NNODES", "value": str(at.pods)},
            {"name": "PET_NPROC_PER_NODE", "value": str(self.ranks_per_pod)},
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}},
            {"name": "PET_MASTER_ADDR", "value": f"{at.name}-0.{at.name}"},
            {"name": "PET_MASTER_PORT", "value": str(at.port)},
        ]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,  # the ranks connect before any pod is ready
                "selector": {"batch.kubernetes.io/job-name": at.name},
                "ports": [{"name": "rendezvous", "port": at.port}],
            },
        }
        pod = self._pod(env=rendezvous) | {"subdomain": at.name}
        spec = self._job(at.restarts * at.pods, pod)  # the peers of a lost pod end too, and each counts
        return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata(), "spec": spec}]

    def _job(self, restarts: int, pod: Object) -> Object:
        """Return an Indexed Job's specification. Its pods are replaced, except after an error that would recur."""
        final = {"containerName": _CONTAINER, "operator": "In", "values": sorted(int(code) for code in _FINAL)}
        rules: list[Object] = [
            {"action": "FailJob", "onExitCodes": final},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
        return {
            "completionMode": "Indexed",
            "completions": self.settings.pods,
            "parallelism": self.settings.pods,
            "backoffLimit": restarts,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": self._metadata()["labels"]}, "spec": pod},
        }

    def _pod(self, env: list[Object], command: tuple[str, ...] | None = None) -> Object:
        at = self.settings
        container = {
            "name": _CONTAINER,
            "image": at.image,
            **({"command": list(command or self.command)} if command != () else {}),
            "env": [*env, {"name": "PYTHONUNBUFFERED", "value": "1"}],
            "resources": self._resources(),
            "volumeMounts": self._mounts(),
        }
        return {
            "restartPolicy": "Never",  # a new pod with the same index replaces a failed one, maybe elsewhere
            "terminationGracePeriodSeconds": at.grace,
            "containers": [container],
            "volumes": self._volumes(),
        }

    def _resources(self) -> Object:
        at = self.settings
        wanted = {"cpu": at.cpu, "memory": at.memory, at.gpu: str(at.gpus) if at.gpus else ""}
        found = {name: text for name, text in wanted.items() if text}
        return {"requests": found, "limits": {n: t for n, t in found.items() if n != "cpu"}} if found else {}

    def _volumes(self) -> list[Object]:
        memory: Object = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}  # a runtime's default has 64 MiB
        claim = {"name": "runs", "persistentVolumeClaim": {"claimName": self.settings.claim}}
        return [memory, claim] if self.settings.claim else [memory]

    def _mounts(self) -> list[Object]:
        memory = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108  (of the pod)
        claim = {"name": "runs", "mountPath": self.settings.mount}
        return [memory, claim] if self.settings.claim else [memory]

    def _train_job(self) -> list[Object]:
        at = self.settings
        trainer: Object = {
            "image": at.image,
            "command": list(self.command),
            "numNodes": at.pods,
            "numProcPerNode": self.ranks_per_pod,
            "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
            **({"resourcesPerNode": self._resources()} if self._resources() else {}),
        }
        spec: Object = {"runtimeRef": {"name": at.name, "kind": "TrainingRuntime"}, "trainer": trainer}
        if at.runtime:
            spec |= {"runtimeRef": {"name": at.runtime}, "runtimePatches": [self._patch()]}
        job = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": self._metadata(),
            "spec": spec,
        }
        return [job] if at.runtime else [self._runtime(), job]

    def _runtime(self) -> Object:
        """Return the TrainJob's own runtime. Only a runtime can specify that a lost pod restarts all pods."""
        at = self.settings
        job = self._job(0, self._pod(env=[], command=()))
        own = {name: value for name, value in job.items() if name not in ("completions", "parallelism")}
        replicated = {
            "name": _CONTAINER,
            "template": {
                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                "spec": own,  # Trainer sets its completions, image and command
            },
        }
        rules = [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
        job_set = {
            "replicatedJobs": [replicated],
            "failurePolicy": {"maxRestarts": at.restarts, "rules": rules},
        }
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": self._metadata(),
            "spec": {"mlPolicy": {"numNodes": at.pods, "torch": {}}, "template": {"spec": job_set}},
        }

    def _patch(self) -> Object:
        pod = {
            "terminationGracePeriodSeconds": self.settings.grace,
            "volumes": self._volumes(),
            "containers": [{"name": _CONTAINER, "volumeMounts": self._mounts()}],
        }
        job = {"name": _CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
        return {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}

    def _ray_job(self) -> list[Object]:
        at = self.settings
        head = {name: value for name, value in self._pod(env=[], command=()).items() if name != "restartPolicy"}
        group = {
            "groupName": "ranks",
            "replicas": at.pods,
            "minReplicas": at.pods,
            "maxReplicas": at.pods,
            "rayStartParams": {},
            "template": {"spec": head},
        }
        small = {**head, "containers": [{**head["containers"][0], "resources": {}}]}
        cluster = {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": {"spec": small}},
            "workerGroupSpecs": [group],
        }
        spec = {
            "entrypoint": shlex.join(self.command),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": at.restarts,
            "rayClusterSpec": cluster,
        }
        return [{"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": self._metadata(), "spec": spec}]
