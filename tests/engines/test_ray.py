"""shoal run --on ray, on real Ray with its token: the run is the undisturbed one to the bit, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.engines import ray_cluster
from tests.engines.choice import needs
from tests.engines.ray_cluster import QUIET, RayCluster
from tests.engines.same_run import assert_same
from tests.engines.wrong_table import note
from tests.launching import JOBS, Ended, Gate, Run, Started, start, start_command

pytestmark = [*needs("ray", ray_cluster.unavailable), pytest.mark.timeout(300)]

JOB = JOBS / "tiny.py"
LIMIT_SECONDS = 150.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster.started(tmp_path_factory.mktemp("ray")) as found:
        yield found


def on_ray(out: Path, on: str = "ray", *arguments: str, restarts: int = 5, **environment: str) -> Run:
    words = ("--on", on, "--checkpoint-every", "3", *arguments)
    return Run(JOB, out, 2, True, words, environment={**QUIET, **environment}, fresh=True, restarts=restarts)


def kill(started: Started, which: str) -> None:
    """Kills rank 1, or the actor above it."""
    pid = started.workers()[1]
    if which == "actor":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("which", ["rank", "actor"])
def test_a_lost_rank_on_a_cluster_made_for_the_run(which: str, undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 7)
    with start(on_ray(tmp_path / "run", **gate.environment)) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        kill(started, which)
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert_same(ended.out, undisturbed)
    assert "was lost" in ended.stderr
    assert ended.result["restarts"] == 1
    assert ended.result["resumed_from"] >= 3


def test_nothing_is_left_of_a_killed_driver(undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 7)
    with start(on_ray(tmp_path / "run", **gate.environment)) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        started.send(signal.SIGKILL)
        started.process.wait()
        # An agent of Ray's asks for a head that is gone for 60 s (gcs_rpc_server_reconnect_timeout_s), and ends.
        deadline = time.monotonic() + 120
        while started.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in started.processes()] == []
    with start(Run(JOB, tmp_path / "run", 2, True, ("--resume",))) as started:  # on one machine, from what there is
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(tmp_path / "run", undisturbed)


def test_a_signal_saves_and_ends(undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 7)
    with start(on_ray(tmp_path / "run", **gate.environment)) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        started.send(signal.SIGTERM)
        time.sleep(1.0)  # the ranks are told over Ray
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(75)
    assert json.loads((ended.out / "saved.json").read_text())["step"] >= 7


def test_two_runs_beside_each_other_on_a_cluster(cluster: RayCluster, undisturbed: Ended, tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = [
            stack.enter_context(start(on_ray(tmp_path / name, f"ray:address={cluster.address}", **cluster.variables)))
            for name in ("one", "two")
        ]
        for found in runs:
            assert_same(found.wait(LIMIT_SECONDS).expect(0).out, undisturbed)


@pytest.mark.parametrize(("devices", "cpus", "world_size"), [("1:2", 1, 2), ("1:2", 3, 1)])
def test_a_range_takes_what_there_is(
    devices: str, cpus: int, world_size: int, cluster: RayCluster, undisturbed: Ended, tmp_path: Path
) -> None:
    """Of a cluster of four CPUs."""
    words = ("--devices", devices, "--on", f"ray:address={cluster.address},cpus={cpus}")
    run = Run(JOB, tmp_path / "run", None, True, words, environment={**QUIET, **cluster.variables}, fresh=True)
    with start(run) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert_same(ended.out, undisturbed)
    assert ended.result["world_size"] == world_size


def test_more_than_the_cluster_has(cluster: RayCluster, tmp_path: Path) -> None:
    wanted = on_ray(tmp_path / "run", "ray:cpus=9", **cluster.variables, RAY_ADDRESS=cluster.address)
    with start(wanted) as started:
        said = started.wait(LIMIT_SECONDS).expect(2).stderr
    assert "2 ranks with 9 CPU each" in said
    assert "the Ray cluster has 4 CPU in all" in said


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [({"RAY_AUTH_TOKEN": "0" * 64}, "RAY_AUTH_TOKEN"), ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE=token")],
    ids=["an expired token", "no token"],
)
def test_a_token_that_the_cluster_does_not_know(
    variables: dict[str, str], wanted: str, cluster: RayCluster, tmp_path: Path
) -> None:
    run = on_ray(tmp_path / "run", f"ray:address={cluster.address}", **{**cluster.variables, **variables})
    began = time.monotonic()
    with start(run) as started:
        said = started.wait(60).expect(2).stderr  # promised to whoever waits for the message
    note("an expired token", began, said)
    assert f"the Ray cluster at {cluster.address}" in said
    assert wanted in said.split("write instead:")[1]


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    with start(on_ray(tmp_path / "run", "ray:address=127.0.0.1:1")) as started:
        said = started.wait(LIMIT_SECONDS).expect(2).stderr
    assert "the Ray cluster at 127.0.0.1:1" in said
    assert "ray start --head" in said


def test_from_python_in_a_session_of_the_users_own(undisturbed: Ended, tmp_path: Path) -> None:
    program = tmp_path / "session.py"
    program.write_text(
        "import ray, shoal\n"
        "ray.init(address='local', num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)\n"
        f"run = shoal.run({str(JOB)!r}, devices=2, exact=True, out={str(tmp_path / 'run')!r}, on='ray')\n"
        "print('still there', ray.is_initialized(), run.result['steps'])\n"
    )
    with start_command([sys.executable, str(program)], tmp_path / "run", QUIET, fresh=True) as started:
        assert "still there True 16" in started.wait(LIMIT_SECONDS).expect(0).stdout
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.skipif(
    find_spec("aiohttp_cors") is None, reason="ray job submit needs ray[default], which is not installed"
)
def test_inside_of_ray_job_submit(undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ray_cluster.started(tmp_path, dashboard=True) as cluster:
        command = [sys.executable, "-m", "shoal", *Run(JOB, out, 2, True, ("--on", "ray")).command[3:]]
        submit = cluster.program("job", "submit", f"--address={cluster.dashboard}", "--", *command)
        deadline = time.monotonic() + 60
        while True:  # the agent that starts jobs comes up some seconds after the cluster
            done = subprocess.run(submit, env={**os.environ, **cluster.variables}, capture_output=True, text=True)
            if "No available agent" not in done.stderr or time.monotonic() > deadline:
                break
            time.sleep(1)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same(out, undisturbed)


@pytest.mark.skipif(find_spec("tensorboardX") is None, reason="Ray Train needs ray[train], which is not installed")
def test_inside_of_a_worker_of_ray_train(undisturbed: Ended, tmp_path: Path) -> None:
    """shoal.run in the function that a TorchTrainer calls on each worker, whose process group is there already."""
    program = tmp_path / "trainer.py"
    program.write_text(
        "import ray\n"
        "from ray.train import RunConfig, ScalingConfig\n"
        "from ray.train.torch import TorchTrainer\n"
        "def train(config):\n"
        "    import shoal, torch.distributed as dist\n"
        f"    run = shoal.run({str(JOB)!r}, exact=True, out={str(tmp_path / 'run')!r})\n"
        "    assert dist.is_initialized() and run.result['status'] == 'completed'\n"
        "ray.init(address='local', num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)\n"
        f"to = RunConfig(storage_path={str(tmp_path / 'ray')!r})\n"
        "TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=to).fit()\n"
        "print('fitted')\n"
    )
    with start_command([sys.executable, str(program)], tmp_path / "run", QUIET, fresh=True) as started:
        assert "fitted" in started.wait(LIMIT_SECONDS).expect(0).stdout
    assert_same(tmp_path / "run", undisturbed)
