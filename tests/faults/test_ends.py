"""Ranks that end at any place and in any way, and hosts that have too little: named, and gone on from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.test_preempted import assert_same
from tests.faults.test_recovery import events
from tests.launching import JOBS, Ended, Run, run, start_command
from tests.sharing import Shared
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = JOBS / "ending.py"
CHECKPOINTS = ("--checkpoint-every", "4")
PLACES = ("import", "model", "forward", "backward", "optimizer", "evaluation", "save", "load")


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


def ending(tmp_path: Path, places: str, how: str = "SIGKILL", times: int = 1, restarts: int = 9) -> Run:
    asked = {"TEST_END": f"{tmp_path}:{places}:1:{how}:{times}"}
    return Run(JOB, tmp_path / "run", 2, True, CHECKPOINTS, environment=asked, restarts=restarts)


@parametrize("places", ["evaluation", ",".join(PLACES)], ids=["evaluation", "all places"], usual=["evaluation"])
def test_killed_wherever_it_is(places: str, undisturbed: Ended, tmp_path: Path) -> None:
    """At one place after the other, in one run."""
    ended = run(ending(tmp_path, places)).expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == len(places.split(",")) == len(list(tmp_path.glob("*-0")))


SAID = {
    "SIGSEGV": "it was killed by SIGSEGV",
    "SIGABRT": "it was killed by SIGABRT",
    "gone with 1": "it ended with code 1 without a word",
    "exit 0": "sys.exit()",
}


@parametrize("how", SAID, usual=["SIGSEGV"])
def test_how_it_ended(how: str, tmp_path: Path) -> None:
    """The second time in the same way it is the job's own doing, and no third is tried."""
    ended = run(ending(tmp_path, "optimizer", how, times=3)).fails(2 if how == "exit 0" else 69)
    assert "rank 1" in ended.stderr
    assert SAID[how] in ended.stderr
    assert "Traceback" not in ended.output
    if how != "exit 0":
        assert "lost twice in the same way" in ended.stderr
        assert [event["kind"] for event in events(ended)].count("lost") == 2


@parametrize("how", ["gone with 0", "SIGKILL"], usual=["gone with 0"])
def test_one_process_that_ends_without_a_word(how: str, undisturbed: Ended, tmp_path: Path) -> None:
    """`os._exit(0)` in mid-run is no success, and what the job's code has started ends too."""
    wanted = ending(tmp_path, "optimizer", how)
    wanted.devices, wanted.environment["TEST_CHILD"] = 1, "1"
    wanted.environment["TEST_END"] = wanted.environment["TEST_END"].replace(":1:", ":0:")
    ended = run(wanted).fails(69)
    cause = "was killed by SIGKILL" if how == "SIGKILL" else "ended with code 0"
    assert ended.message.conflict == f"it {cause} without a word"
    assert [event["what"] for event in events(ended)] == [ended.message.conflict]
    assert not (ended.out / "result.json").exists()
    resumed = run(Run(JOB, ended.out, 1, arguments=("--resume", *CHECKPOINTS))).expect(0)
    assert_same(resumed, undisturbed)


def test_a_rank_of_no_launcher_that_ends_without_a_word(undisturbed: Ended, tmp_path: Path) -> None:
    """Nobody sees the end of such a process; the next command knows of it by the result."""
    wanted = ending(tmp_path, "optimizer", "gone with 0")
    wanted.devices = None
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    wanted.environment |= alone | {"TEST_END": wanted.environment["TEST_END"].replace(":1:", ":0:")}
    ended = run(wanted).expect(0)
    assert ended.result["status"] == "running"
    command = [sys.executable, "-m", "shoal", "runs", "list", str(ended.out), "--json"]
    with start_command(command, tmp_path / "shown") as started:
        assert json.loads(started.wait().expect(0).stdout)[0]["state"] == "killed"
    with start_command([sys.executable, "-m", "shoal", "report", str(ended.out)], tmp_path / "reported") as started:
        assert "killed" in started.wait().expect(0).stdout
    resumed = run(Run(JOB, ended.out, 1, arguments=("--resume", *CHECKPOINTS))).expect(0)
    assert "the last process of this run was killed: it left no result" in resumed.stderr
    assert_same(resumed, undisturbed)


@parametrize("how", ["gone with 1", "SIGKILL"], usual=["SIGKILL"])
def test_child_processes_of_a_job_end_with_their_rank(how: str, tmp_path: Path) -> None:
    wanted = ending(tmp_path, "optimizer", how, restarts=0)
    wanted.environment["TEST_CHILD"] = "1"
    run(wanted).fails(69)  # also asserts that no process is left


@pytest.mark.slow
def test_killed_again_before_its_first_step(undisturbed: Ended, tmp_path: Path) -> None:
    """Three times: each start waits longer, and the run is the undisturbed one."""
    ended = run(ending(tmp_path, "model", times=3)).expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == 3
    assert "all ranks start again in 1 s" in ended.stderr
    assert "all ranks start again in 2 s" in ended.stderr


IN_LITTLE = 'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'


@pytest.mark.slow
def test_too_little_shared_memory(tmp_path: Path) -> None:
    """Of loader workers, which hand batches over in /dev/shm."""
    if shutil.which("unshare") is None or _refused():
        pytest.skip("a mount namespace of one's own needs root and util-linux")
    wanted = Run(f"{JOB}:wide", tmp_path / "run", 1, arguments=("--workers", "1"))
    command = ["unshare", "--mount", "sh", "-c", IN_LITTLE.format(size="64k"), "sh", *wanted.command]
    with start_command(command, wanted.out, fresh=True) as started:
        ended = started.wait().fails(2)
    assert "/dev/shm" in ended.stderr
    assert "--shm-size" in ended.stderr
    assert "Traceback" not in ended.output


def _refused() -> bool:
    tried = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm"]
    return subprocess.run(tried, capture_output=True).returncode != 0


@pytest.mark.slow
def test_too_few_descriptors(tmp_path: Path) -> None:
    wanted = Run(JOB, tmp_path / "run", 3)
    command = ["sh", "-c", 'ulimit -n 24 && exec "$@"', "sh", *wanted.command]
    with start_command(command, wanted.out, fresh=True) as started:
        ended = started.wait()
    assert ended.code not in (0, 1)
    assert "3 processes that may open 24 files each" in ended.stderr
    assert "ulimit -n" in ended.stderr
    assert "Traceback" not in ended.output
