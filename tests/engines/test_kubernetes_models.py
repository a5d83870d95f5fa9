"""Kubernetes: the objects pass the published models of their kinds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.kubernetes import pod_run

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


def full(kind: str, processes: int = 4) -> list[dict[str, Any]]:
    options = (
        f"{kind},image=registry.test/shoal:1,pods=2,gpus={processes // 2},cpu=8,memory=16Gi,claim=runs,namespace=ml"
    )
    words, out = ("run", "tiny.py", "--devices", str(processes), "--out", "/runs/tiny"), Path("/runs/tiny")
    return pod_run(Submission(words, "tiny", out, Path.cwd(), processes, options)).objects()


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
