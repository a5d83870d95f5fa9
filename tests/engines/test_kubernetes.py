"""Kubernetes: the objects pass the published models, and their pods train, one by one killed, the undisturbed run."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.engines.pods import PodNetwork, trainer_variables, two_pods, variables, why_no_pods
from tests.launching import JOBS, Ended, Gate, Run, Started, start_command
from tests.sharing import Shared

from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.kubernetes import pod_run

JOB = JOBS / "tiny.py"
KINDS = {
    "job": "job",
    "trainjob": "trainjob",
    "a runtime that is there": "trainjob,runtime=torch-distributed",
    "rayjob": "rayjob",
}
needs_models = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("kubernetes", "kubeflow_trainer_api"))),
    reason="kubernetes and kubeflow-trainer-api are not installed (scripts/engines installs them)",
)


def submission(out: Path, options: str, processes: int = 2, *more: str) -> Submission:
    arguments = ("run", str(JOB), "--devices", str(processes), "--out", str(out), *more)
    return Submission(arguments, "tiny", out, Path.cwd(), processes, options)


def full(kind: str, processes: int = 4) -> list[dict[str, Any]]:
    options = (
        f"{kind},image=registry.test/shoal:1,pods=2,gpus={processes // 2},cpu=8,memory=16Gi,claim=runs,namespace=ml"
    )
    return pod_run(submission(Path("/runs/tiny"), options, processes)).objects()


def kubernetes_model(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The value as the client's model of that name gives it back: what the model does not know is not in it."""
    from kubernetes import client

    api = client.ApiClient()
    value = api._ApiClient__deserialize(found, name)  # type: ignore[attr-defined]
    back: dict[str, Any] = api.sanitize_for_serialization(value)
    return back


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """An object as its published model gives it back. Raises: whatever the model does where a type is wrong."""
    from kubeflow_trainer_api import models

    kind = found["kind"]
    if kind in ("TrainJob", "TrainingRuntime"):
        model = getattr(models, f"TrainerV1alpha1{kind}")
        back: dict[str, Any] = model.from_dict(found).to_dict()
        return back
    if kind == "RayJob":  # KubeRay publishes no models: its pods are Kubernetes'
        cluster = found["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert kubernetes_model(group["template"], "V1PodTemplateSpec") == group["template"]
        return found
    return kubernetes_model(found, f"V1{kind}")


@needs_models
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_objects_pass_the_published_models(kind: str) -> None:
    for found in full(kind):
        assert judged(found) == found


@needs_models
def test_the_models_see_a_wrong_field_and_a_wrong_type() -> None:
    """The check above can fail."""
    service, job = full("job")
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    assert judged(job) != job
    _, train_job = full("trainjob")
    train_job["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        judged(train_job)
    del service["spec"]["ports"][0]["port"]
    with pytest.raises(ValueError, match="port"):
        judged(service)


# ---------------------------------------------------------------------------------------------------- pods that train


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


class PodSet:
    """Pods of a rendered object, started and started again as the operator does."""

    def __init__(self, stack: ExitStack, network: PodNetwork, out: Path) -> None:
        self._stack, self._network, self._out = stack, network, out
        self.pods: list[Started] = []
        self.starts: list[int] = []

    def start(self, index: int, command: list[str], environment: dict[str, str]) -> None:
        words = self._network.command(index, command)
        place = self._out.parent / f"pod-{index}-{len(self.starts)}"
        pod = self._stack.enter_context(start_command(words, place, environment, fresh=True))
        self.pods[index : index + 1] = [pod]
        self.starts.append(index)


def trained_in_pods(
    kind: str, out: Path, ranks: int, victim: int, number: int = signal.SIGKILL
) -> tuple[PodSet, list[str]]:
    """Runs the pods of a kind's objects; `victim` is killed in the midst of it, and what has failed starts again."""
    gate = Gate(out.parent / "gate", 9)
    options = f"{kind},image=registry.test/shoal:1,pods=2,claim=runs,mount={out.parent}"
    run = pod_run(submission(out, options, 2 * ranks, "--exact", "--checkpoint-every", "4"))
    objects = {found["kind"]: found for found in run.objects()}
    said: list[str] = []
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # of the image: shoal is on it

    def environment(index: int) -> dict[str, str]:
        if kind == "job":
            (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
            return path | variables(container, index)
        return path | trainer_variables(objects["TrainJob"], index)

    host = environment(0)["PET_MASTER_ADDR"]
    with ExitStack() as stack:
        pods = PodSet(stack, stack.enter_context(two_pods(host)), out)
        for index in range(2):
            pods.start(index, list(run.command), environment(index) | gate.environment)
        told = 2 * ranks if ranks > 1 else 1  # a pod's only rank has no RANK by which the gate knows it
        pods.pods[0].until(lambda: gate.reached(told), "the gate")
        if number == signal.SIGKILL:
            pods.pods[victim].kill_all()
        else:
            pods.pods[victim].send(number)
        gate.open()
        waiting = {0, 1}
        while waiting:
            for index in [index for index in waiting if pods.pods[index].process.poll() is not None]:
                ended = pods.pods[index].wait()
                said.append(f"pod {index}: {ended.output}")
                assert ended.code in (0, 69, 75, -9), said
                if ended.code == 0:
                    waiting.remove(index)
                else:
                    assert len(pods.starts) < 10, said
                    pods.start(index, list(run.command), environment(index))
            time.sleep(0.02)
    return pods, said


@pytest.mark.skipif(why_no_pods() is not None, reason=str(why_no_pods()))
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "ranks", "victim", "number"),
    [("job", 1, 1, signal.SIGKILL), ("trainjob", 2, 0, signal.SIGKILL), ("job", 2, 1, signal.SIGTERM)],
    ids=["a killed pod", "the first pod of a TrainJob", "a pod that is moved away"],
)
def test_a_pod_is_lost_and_comes_again(
    kind: str, ranks: int, victim: int, number: int, undisturbed: Ended, tmp_path: Path
) -> None:
    out = tmp_path / "runs" / "tiny"
    out.parent.mkdir()
    pods, said = trained_in_pods(kind, out, ranks, victim, number)
    ended = Ended(0, "", "", out)
    for key in ("weights_sha256", "sample_digest", "steps", "samples"):
        assert ended.result[key] == undisturbed.result[key], said
    assert ended.result["resumed_from"] >= 4
    assert len(pods.starts) > 2, said
