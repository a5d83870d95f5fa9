"""Launcher on Kubernetes: renders an Indexed Job, TrainJob or RayJob, applies it with kubectl and follows it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from shoal.errors import ExitCode, LaunchError
from shoal.launch.launchers.argument import parsed
from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.kubernetes_objects import LONGEST_NAME, NOBODY_SAID, KubernetesSettings, PodRun
from shoal.launch.launchers.yaml_text import documents
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import Child

# Reasons that do not go away by waiting, with the remedy.
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_SETTINGS = ("CreateContainerConfigError", "CreateContainerError")
_HOPELESS = {
    **dict.fromkeys(_IMAGE, "check that image={0} is there and that its nodes may pull it"),
    **dict.fromkeys(_SETTINGS, "check its volumes and what it refers to: kubectl describe pod"),
    "RunContainerError": "check that shoal is installed in the image",
}
_LOOK_SECONDS = 2.0
_MOST_UNANSWERED = 60


def render(submission: Submission) -> Mapping[str, str]:
    """Return the objects as one YAML file."""
    run = pod_run(submission)
    return {f"{run.settings.name}.yaml": documents(run.objects())}


def start(submission: Submission, signals: Signals) -> int:
    """Apply the objects with kubectl, show rank 0's output, and return when the run has ended."""
    run, kubectl = pod_run(submission), shutil.which("kubectl")
    if kubectl is None:
        raise LaunchError(
            given=f"--on kubernetes:{submission.options}",
            conflict="there is no kubectl here to apply the objects with",
            remedy="install kubectl; or add --dry-run > run.yaml, and apply that file where there is one",
        )
    watch = PodWatch(run, Kubectl(kubectl, run.settings.namespace))
    older = watch.kubectl.json(run.watched[0])
    if older:  # its end would be followed instead
        began = older.get("metadata", {}).get("creationTimestamp", "")
        raise LaunchError(
            given=f"name={run.settings.name}",
            conflict=f"{run.watched[0]} is there already, since {began}; its run may still train or have ended",
            remedy=f"write another name=, or kubectl delete {run.watched[0]}; a new one goes on where its run "
            "directory is",
        )
    watch.kubectl.call("apply", "-f", "-", text=documents(run.objects()))
    return watch.follow(signals)


def pod_run(submission: Submission) -> PodRun:
    """Return the run in pods. Settings that the user has not given follow from the cluster, if one is named.

    Raises: CommandError for invalid settings.
    """
    settings = parsed(KubernetesSettings, "kubernetes", submission.options, "kind")
    pods, gpus, size = settings.pods, settings.gpus, submission.num_processes
    cluster_name = settings.cluster or submission.cluster
    if cluster_name:
        from shoal.hardware import cluster

        hosts = cluster(cluster_name)
        pods = pods or -(-size // min(hosts.devices_per_host, size))
        gpus = gpus or (size // pods if hosts.device.kind == "gpu" else 0)
    own = re.sub(r"[^a-z0-9]+", "-", submission.name.lower()).strip("-")
    if len(own) > LONGEST_NAME:  # the name of a module in packages
        own = own[-LONGEST_NAME:].lstrip("-0123456789")
    restarts = submission.max_restarts if settings.restarts == NOBODY_SAID else settings.restarts
    name = settings.name or own or "shoal"
    settings = replace(settings, pods=pods or 1, gpus=gpus, name=name, restarts=restarts)
    settings.check(f"--on kubernetes:{submission.options}", size, needs_volume=submission.address is None)
    words = list(submission.arguments)
    if submission.address is None:  # the run directory is on the pods' volume
        out = PurePosixPath(submission.out)
        if not out.is_relative_to(settings.mount):
            out = PurePosixPath(settings.mount) / out.name
        words[words.index("--out") + 1] = str(out)
    on = ("--on", "ray") if settings.kind == "rayjob" else ()
    return PodRun(settings, size // settings.pods, ("shoal", *words, "--resume-if-exists", *on))


@dataclass(frozen=True)
class Kubectl:
    """The kubectl command with the namespace of a run."""

    path: str
    namespace: str = ""

    def call(self, *words: str, text: str | None = None) -> str:
        """Run kubectl and return its output. Raises: LaunchError with kubectl's message."""
        ended = subprocess.run(self.command(*words), input=text, capture_output=True, text=True, check=False)
        if not ended.returncode:
            return ended.stdout
        said = (ended.stderr or ended.stdout).strip()
        if re.search(r"Unauthorized|must be logged in|expired", said):
            remedy = "log in to the cluster again: its token is expired or wrong (kubectl auth can-i create jobs)"
        elif "Forbidden" in said or "forbidden" in said:
            remedy = "ask for the right to create these objects in this namespace, or write namespace=NAME"
        elif "no matches for kind" in said or "doesn't have a resource type" in said:
            remedy = "install the operator of that kind (Kubeflow Trainer v2, KubeRay), or write --on kubernetes:job"
        else:
            remedy = "check kubectl cluster-info, and the objects with --dry-run"
        raise LaunchError(
            given=f"kubectl {' '.join(words[:2])}",
            conflict=said[-1000:] or f"it ended with code {ended.returncode}",
            remedy=remedy,
        )

    def json(self, *words: str) -> dict[str, Any]:
        """Return an object or a list of objects; empty if the server does not answer now."""
        with contextlib.suppress(LaunchError, ValueError):
            document: dict[str, Any] = json.loads(self.call("get", *words, "-o", "json"))
            return document
        return {}

    def command(self, *words: str) -> list[str]:
        """Return the words of a call."""
        return [self.path, *(("--namespace", self.namespace) if self.namespace else ()), *words]


@dataclass
class PodWatch:
    """Watch over the pods of a run, which shows rank 0's output until the run has ended."""

    run: PodRun
    kubectl: Kubectl
    pause: Callable[[float], None] = time.sleep
    _shown: set[str] = field(default_factory=set)
    _unanswered: int = 0  # consecutive requests that the server did not answer
    _logs: Child | None = None

    def follow(self, signals: Signals) -> int:
        """Wait until the run has ended and return its exit code. Raises: LaunchError if the pods cannot start."""
        try:
            while True:
                selected = self.kubectl.json("pods", "--selector", self.run.watched[1])
                pods: list[dict[str, Any]] = selected.get("items", [])
                if self._logs is None or self._logs.is_over():
                    self._show_logs(pods)
                for pod in pods:
                    for state in _states(pod, "waiting"):
                        image, mend = self.run.settings.image, _HOPELESS.get(state.get("reason", ""))
                        if mend is not None:
                            raise LaunchError(
                                given=f"image={image}, pod {pod['metadata']['name']}",
                                conflict=f"{state['reason']}: {state.get('message', 'it cannot start')}"[:600],
                                remedy=f"{mend.format(image)}; remove the waiting run with "
                                f"kubectl delete {self.run.watched[0]}",
                            )
                code = self._ended(pods)
                if code is not None:
                    return code
                if signals.received:
                    self.kubectl.call("delete", self.run.watched[0], "--wait=true")
                    return int(ExitCode.PREEMPTED)
                self.pause(_LOOK_SECONDS)
        finally:
            if self._logs is not None:
                self._logs.finish(_LOOK_SECONDS)

    def _ended(self, pods: list[dict[str, Any]]) -> int | None:
        """Return the exit code once the object is complete or has failed, else None."""
        try:
            status = json.loads(self.kubectl.call("get", self.run.watched[0], "-o", "json")).get("status", {})
            self._unanswered = 0
        except LaunchError as error:
            self._unanswered += 1
            if "NotFound" in error.conflict or self._unanswered >= _MOST_UNANSWERED:
                raise  # deleted by somebody else, or the token has expired: no later request can succeed
            return None
        true = {c["type"] for c in status.get("conditions", []) if c.get("status") == "True"}
        if "Complete" in true or status.get("jobStatus") == "SUCCEEDED":
            return int(ExitCode.DONE)
        if "Failed" not in true and status.get("jobStatus") not in ("FAILED", "STOPPED"):
            return None
        codes = [state["exitCode"] for pod in pods for state in _states(pod, "terminated") if state.get("exitCode")]
        roots = [code for code in codes if code != ExitCode.RANK_LOST]
        return int((roots or codes or [ExitCode.FAILED])[0])

    def _show_logs(self, pods: list[dict[str, Any]]) -> None:
        """Show the output of the pod with rank 0 from its beginning, and of a new pod that replaces it."""
        for pod in pods:
            name, labels = pod["metadata"]["name"], pod["metadata"].get("labels", {})
            first = labels.get("batch.kubernetes.io/job-completion-index", "0") == "0"
            begun = pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")
            if first and begun and name not in self._shown:
                self._shown.add(name)
                self._logs = Child(self.kubectl.command("logs", "--follow", name, "--tail=-1"))
                return


def _states(pod: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    for status in pod.get("status", {}).get("containerStatuses", []):
        state = status.get("state", {}).get(kind)
        if state:
            yield state
