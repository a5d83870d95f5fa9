"""A run in pods from a submission, and the watch over pods by kubectl, of which a script of a test takes the place."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CommandError, LaunchError
from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.kubernetes import Kubectl, PodWatch, pod_run, render, start
from shoal.launch.signals import Signals

OPTIONS = "image=registry.test/a:1,pods=2,claim=runs"


def submission(options: str = OPTIONS, out: str = "/job/runs/My_Digits", processes: int = 4) -> Submission:
    words = ("run", "job.py", "--devices", str(processes), "--out", out)
    return Submission(words, "My_Digits", Path(out), Path("/job"), processes, options)


def test_the_run_directory_is_on_the_volume() -> None:
    assert pod_run(submission()).command[-3:] == ("--out", "/runs/My_Digits", "--resume-if-exists")
    assert "/runs/deep/a" in pod_run(submission(out="/runs/deep/a")).command
    assert pod_run(submission()).settings.name == "my-digits"


def test_resources_are_those_of_the_cluster() -> None:
    run = pod_run(submission("image=a,claim=r,cluster=2x8xH100", processes=16))
    assert (run.settings.pods, run.settings.gpus, run.ranks_per_pod) == (2, 8, 8)
    with pytest.raises(CommandError, match="4 ranks in 3 pods"):
        pod_run(submission("image=a,claim=r,pods=3"))


def test_a_ray_job_starts_shoal_on_ray() -> None:
    (found,) = pod_run(submission(f"rayjob,{OPTIONS}")).objects()
    assert found["spec"]["entrypoint"].endswith("--out /runs/My_Digits --resume-if-exists --on ray")


def test_a_dry_run_is_the_objects() -> None:
    ((name, text),) = render(submission()).items()
    assert name == "my-digits.yaml"
    assert text.count("\nkind: ") == 2


def test_without_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="there is no kubectl here"):
        start(submission(), Signals(impatient=False))


def kubectl(folder: Path, answers: dict[str, Any], code: int = 0, error: str = "") -> str:
    """A script that answers `kubectl get KIND` with JSON, and otherwise notes its words."""
    for name, value in answers.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    script = folder / "kubectl"
    script.write_text(
        f"#!/bin/sh\ncat > /dev/null\n[ {code} = 0 ] || {{ echo '{error}' >&2; exit {code}; }}\n"
        f'echo "$@" >> {folder}/said\n'
        f'case "$1 $2" in\n"get pods") cat {folder}/pods.json ;;\n"get "*) cat {folder}/job.json ;;\nesac\n'
    )
    script.chmod(0o755)
    return str(script)


def pod(**state: Any) -> dict[str, Any]:
    return {"items": [{"metadata": {"name": "my-digits-0"}, "status": {"containerStatuses": [{"state": state}]}}]}


def condition(kind: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": kind, "status": "True"}]}}


def watch(path: str) -> PodWatch:
    return PodWatch(pod_run(submission()), Kubectl(path), pause=lambda seconds: None)


@pytest.mark.parametrize(
    ("job", "pods", "code"),
    [
        (condition("Complete"), pod(terminated={"exitCode": 0}), 0),
        (condition("Failed"), pod(terminated={"exitCode": 65}), 65),
        (condition("Failed"), pod(terminated={"exitCode": 69}), 69),
        (condition("Failed"), {"items": []}, 1),
        ({"status": {"jobStatus": "SUCCEEDED"}}, {"items": []}, 0),
    ],
    ids=["done", "not finite", "lost", "gone", "a RayJob"],
)
def test_the_end_is_the_objects(job: dict[str, Any], pods: dict[str, Any], code: int, tmp_path: Path) -> None:
    assert watch(kubectl(tmp_path, {"job": job, "pods": pods})).follow(Signals(impatient=False)) == code


def test_an_image_that_is_not_there(tmp_path: Path) -> None:
    waiting = pod(waiting={"reason": "ImagePullBackOff", "message": "not found"})
    with pytest.raises(LaunchError, match="ImagePullBackOff: not found") as caught:
        watch(kubectl(tmp_path, {"job": {}, "pods": waiting})).follow(Signals(impatient=False))
    assert "image=registry.test/a:1" in caught.value.given


def test_a_signal_ends_the_job_in_its_own_way(tmp_path: Path) -> None:
    found = watch(kubectl(tmp_path, {"job": {}, "pods": {"items": []}}))
    assert found.follow(Signals(impatient=False, received=[15])) == 75
    assert "delete job/my-digits --wait=true" in (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("error: You must be logged in to the server (Unauthorized)", "its token is expired or wrong"),
        ('error: jobs is forbidden: User "a" cannot create', "the right to create"),
        ('no matches for kind "TrainJob" in version', "install the operator"),
    ],
)
def test_what_the_cluster_refuses(error: str, remedy: str, tmp_path: Path) -> None:
    path = kubectl(tmp_path, {}, 1, error.replace("'", ""))
    with pytest.raises(LaunchError) as caught:
        Kubectl(path).call("apply", "-f", "-", text="")
    assert error in caught.value.conflict
    assert remedy in caught.value.remedy


def test_an_older_object_of_the_same_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = {"metadata": {"creationTimestamp": "2026-01-02T03:04:05Z"}, **condition("Complete")}
    kubectl(tmp_path, {"job": older, "pods": {"items": []}})
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match=r"job/my-digits is there already, since 2026-01-02T03:04:05Z"):
        start(submission(), Signals(impatient=False))
    assert "apply" not in (tmp_path / "said").read_text()


def test_restarts_are_those_of_the_command_unless_the_engine_has_its_own() -> None:
    assert pod_run(replace(submission(), max_restarts=3)).settings.restarts == 3
    assert pod_run(replace(submission(f"{OPTIONS},restarts=7"), max_restarts=3)).settings.restarts == 7


def test_a_run_directory_at_an_address_needs_no_volume() -> None:
    words = ("run", "job.py", "--devices", "4", "--out", "s3://bucket/run")
    run = pod_run(replace(submission("image=a,pods=2"), arguments=words, address="s3://bucket/run"))
    assert run.command[-3:] == ("--out", "s3://bucket/run", "--resume-if-exists")
    with pytest.raises(CommandError, match="without a volume"):
        pod_run(submission("image=a,pods=2"))
