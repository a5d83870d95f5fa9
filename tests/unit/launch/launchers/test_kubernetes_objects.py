"""Settings that no cluster would take, or no run could use, are refused before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.errors import CommandError
from shoal.launch.launchers.kubernetes_objects import KubernetesSettings, PodRun

GOOD = KubernetesSettings(image="registry.test/a/b:1", name="digits", pods=2, claim="runs")


@pytest.mark.parametrize(
    ("changes", "conflict", "remedy"),
    [
        ({"kind": "trainjb"}, "did you mean 'trainjob'?", "write one of job"),
        ({"image": ""}, "names no image", "image=REGISTRY/NAME:TAG"),
        ({"image": "a b"}, "image='a b'", "image=REGISTRY/NAME:TAG"),
        ({"name": "Digits"}, "name='Digits'", "a small letter"),
        ({"name": "d" * 46}, "is no name of an object", "45 at most"),
        ({"namespace": "a_b"}, "namespace='a_b'", "namespace=NAME"),
        ({"pods": 3}, "4 ranks in 3 pods", "a multiple of pods"),
        ({"gpus": 1}, "1 GPUs a pod for 2 ranks", "write gpus=2"),
        ({"cpu": "two"}, "cpu='two'", "500m"),
        ({"memory": "16GB"}, "memory='16GB'", "16Gi"),
        ({"claim": ""}, "without a volume", "add claim=NAME"),
        ({"claim": "a/b"}, "claim='a/b'", "claim=NAME"),
        ({"mount": "runs"}, "no absolute path", "mount=/PATH"),
        ({"port": 80}, "port=80", "1024"),
        ({"runtime": "torch-distributed"}, "runtime=", "only a TrainJob has one"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_wrong_settings(changes: dict[str, Any], conflict: str, remedy: str) -> None:
    GOOD.check("--on kubernetes", 4)
    with pytest.raises(CommandError) as caught:
        replace(GOOD, **changes).check("--on kubernetes", 4)
    assert conflict in caught.value.conflict
    assert remedy in caught.value.remedy


def test_all_mistakes_are_in_one_message() -> None:
    with pytest.raises(CommandError) as caught:
        KubernetesSettings(name="a", pods=2).check("--on kubernetes", 2)
    assert len(caught.value.conflict.splitlines()) == len(caught.value.remedy.splitlines()) == 2


def test_an_end_that_would_come_again_is_not_started_again() -> None:
    _, job = PodRun(GOOD, 2, ("shoal",)).objects()
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [2, 65, 73, 74]


def test_a_pod_has_time_to_save_and_memory_to_share() -> None:
    _, job = PodRun(replace(GOOD, grace=300), 2, ("shoal",)).objects()
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    assert {"mountPath": "/dev/shm", "name": "shared-memory"} in pod["containers"][0]["volumeMounts"]
    assert pod["containers"][0]["command"] == ["shoal"]  # no shell, which would keep SIGTERM to itself
