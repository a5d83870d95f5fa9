"""Kubernetes objects of a run: an Indexed Job with its Service, a TrainJob with its runtime, or a RayJob."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from shoal.errors import CommandError, ExitCode, nearest

Object = dict[str, Any]

NOBODY_SAID = -1
KINDS = ("job", "trainjob", "rayjob")
_INDEX = "batch.kubernetes.io/job-completion-index"
_MANAGER = "shoal/run"  # owner of a TrainJob's patches
_CONTAINER = "node"  # the name in Trainer's own runtimes, used for all kinds
# Exit codes without a restart, since the same error would follow.
_FINAL = (ExitCode.USER, ExitCode.NONFINITE, ExitCode.STORAGE, ExitCode.INTEGRITY)

# A pod's name ends in a hyphen and its index, in JobSet in "-node-0-" and its index; a host name has at most 63
# characters.
LONGEST_NAME = 45
_LABEL, _QUANTITY = r"[a-z]([-a-z0-9]{0,%d}[a-z0-9])?", r"(\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?)?"
_LETTERS, _SIZE = "a small letter, then small letters, digits and hyphens", "a number such as 4, 500m or 16Gi"
# Of a setting: its form, what is wrong with another one, and what to write.
_FORMS = (
    (
        *("image", r"[a-zA-Z0-9][\w./:@-]*", "names no image"),
        "add image=REGISTRY/NAME:TAG, with shoal, torch and the job file in it",
    ),
    (
        *("name", _LABEL % (LONGEST_NAME - 2), "is no name of an object"),
        f"write name=NAME: {_LETTERS}, {LONGEST_NAME} at most",
    ),
    ("namespace", f"({_LABEL % 61})?", "is none", f"write namespace=NAME: {_LETTERS}"),
    (
        *("claim", r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?)?", "is no name of an object"),
        "write claim=NAME: small letters, digits, hyphens and dots",
    ),
    ("mount", "/[^:]*", "is no absolute path", "write mount=/PATH"),
    ("cpu", _QUANTITY, "is no quantity", f"write cpu=N: {_SIZE}"),
    ("memory", _QUANTITY, "is no quantity", f"write memory=N: {_SIZE}"),
)


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
        per_pod, wrong = num_ranks // max(1, self.pods), dict[str, str]()

        def need(holds: object, conflict: str, remedy: str) -> None:
            if not holds:
                wrong[conflict] = remedy

        known = f"kind {self.kind!r} is not known{nearest(self.kind, list(KINDS))}"
        need(self.kind in KINDS, known, f"write one of {', '.join(KINDS)}")
        for name, form, fault, remedy in _FORMS:
            text = getattr(self, name)
            need(re.fullmatch(form, text), f"{name}={text!r} {fault}", remedy)
        runtime = f"runtime={self.runtime!r} with kind {self.kind!r}"
        need(not self.runtime or self.kind == "trainjob", runtime, "leave runtime= out: only a TrainJob has one")
        is_even = 0 < self.pods <= num_ranks and num_ranks % self.pods == 0
        need(is_even, f"{num_ranks} ranks in {self.pods} pods", "write --devices as a multiple of pods")
        gpus = f"{self.gpus} GPUs a pod for {per_pod} ranks: a GPU serves one rank"
        need(self.gpus in (0, per_pod), gpus, f"write gpus={per_pod}, or leave it out for ranks on the CPU")
        need(
            self.pods == 1 or self.claim or not needs_volume,
            f"{self.pods} pods without a volume that all of them see",
            "add claim=NAME, a PersistentVolumeClaim that several pods can mount (ReadWriteMany), or --out s3://...",
        )
        need(1024 <= self.port < 65536, f"port={self.port} is none", "write port=N from 1024 to 65535")
        if wrong:
            raise CommandError(given=given, conflict="\n".join(wrong), remedy="\n".join(wrong.values()))


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
            "volumeMounts": self._volumes()[1],
        }
        return {
            "restartPolicy": "Never",  # a new pod with the same index replaces a failed one, maybe elsewhere
            "terminationGracePeriodSeconds": at.grace,
            "containers": [container],
            "volumes": self._volumes()[0],
        }

    def _resources(self) -> Object:
        at = self.settings
        wanted = {"cpu": at.cpu, "memory": at.memory, at.gpu: str(at.gpus) if at.gpus else ""}
        requests = {name: text for name, text in wanted.items() if text}
        return {"requests": requests, "limits": {n: t for n, t in requests.items() if n != "cpu"}} if requests else {}

    def _volumes(self) -> tuple[list[Object], list[Object]]:
        """Return the pod's volumes and where its container mounts them."""
        volumes: list[Object] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]  # the default: 64 MiB
        mounts: list[Object] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108  (of the pod)
        if self.settings.claim:
            volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": self.settings.claim}})
            mounts.append({"name": "runs", "mountPath": self.settings.mount})
        return volumes, mounts

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
            volumes, mounts = self._volumes()
            pod = {
                "terminationGracePeriodSeconds": at.grace,
                "volumes": volumes,
                "containers": [{"name": _CONTAINER, "volumeMounts": mounts}],
            }
            replicated = {"name": _CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
            template = {"template": {"spec": {"replicatedJobs": [replicated]}}}
            patch = {"manager": _MANAGER, "trainingRuntimeSpec": template}
            spec |= {"runtimeRef": {"name": at.runtime}, "runtimePatches": [patch]}
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
        job_set = {"replicatedJobs": [replicated], "failurePolicy": {"maxRestarts": at.restarts, "rules": rules}}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": self._metadata(),
            "spec": {"mlPolicy": {"numNodes": at.pods, "torch": {}}, "template": {"spec": job_set}},
        }

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
