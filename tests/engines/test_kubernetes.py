"""Pods of a rendered Job and TrainJob in network namespaces; one is lost, and the bits are the undisturbed run's."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines import namespaces
from tests.engines.choice import needs
from tests.engines.namespaces import Hosts
from tests.engines.pods import trainer_variables, two_pods, variables
from tests.launching import JOBS, Ended, Gate, Started, start_command

from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.kubernetes import pod_run

pytestmark = [*needs("kubernetes", namespaces.unavailable), pytest.mark.faults, pytest.mark.timeout(300)]

JOB = JOBS / "tiny.py"


def submission(out: Path, options: str, processes: int = 2, *more: str) -> Submission:
    arguments = ("run", str(JOB), "--devices", str(processes), "--out", str(out), *more)
    return Submission(arguments, "tiny", out, Path.cwd(), processes, options)


class PodSet:
    """Pods of a rendered object, started and started again as the operator does."""

    def __init__(self, stack: ExitStack, hosts: Hosts, out: Path) -> None:
        self._stack, self._hosts, self._out = stack, hosts, out
        self.pods: list[Started] = []
        self.starts: list[int] = []

    def start(self, index: int, command: list[str], environment: dict[str, str]) -> None:
        words = self._hosts[index].command(command)
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
        pods.pods[0].until(lambda: gate.reached(2 * ranks), "the gate")
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
