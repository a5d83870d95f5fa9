"""Stopped or killed at any step, resumed on another number of devices: the run is the undisturbed one to the bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.launching import GONE_WITHIN_SECONDS, JOBS, Ended, Gate, Run, Started, run, start, start_command
from tests.sharing import Shared
from tests.usual import parametrize

from shoal.launch.signals import BURST_SECONDS

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:gpt"  # the one with the most state: AdamW, dropout, schedule, clipping
STEPS, EVERY = 16, 4
CHECKPOINTS = ("--checkpoint-every", str(EVERY))


def random_step(name: str) -> int:
    """A step (from 0) with a checkpoint behind it and steps before it, drawn with the test's name as the seed."""
    return random.Random(name).randrange(EVERY + 1, STEPS - 1)


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


def at_the_gate(out: Path, gate: Gate, devices: int) -> Run:
    return Run(JOB, out, devices, True, CHECKPOINTS, environment=gate.environment)


def resume(out: Path, devices: int) -> Ended:
    return run(Run(JOB, out, devices, arguments=("--resume", *CHECKPOINTS))).expect(0)


def assert_same(resumed: Ended, undisturbed: Ended) -> None:
    """The same weights, the same samples, and one record a step as if nothing had happened."""
    assert resumed.result["status"] == "completed"
    for key in ("weights_sha256", "sample_digest", "steps", "samples", "metrics", "train_loss"):
        assert resumed.result[key] == undisturbed.result[key], key
    mine, theirs = ([(r["step"], r["loss"], r["digest"]) for r in ended.records] for ended in (resumed, undisturbed))
    assert mine == theirs


@parametrize(
    ("number", "devices", "then"),
    [(signal.SIGTERM, 2, 3), (signal.SIGTERM, 1, 2), (signal.SIGINT, 3, 1), (signal.SIGINT, 1, 2)],
    ids=["SIGTERM-2-3", "SIGTERM-1-2", "SIGINT-3-1", "SIGINT-1-2"],
    usual=["SIGTERM-2-3"],
)
def test_asked_to_stop(number: int, devices: int, then: int, undisturbed: Ended, tmp_path: Path) -> None:
    step = random_step(f"stop {number} {devices}")
    gate, out = Gate(tmp_path / "gate", step), tmp_path / "run"
    with start(at_the_gate(out, gate, devices)) as started:
        started.until(lambda: gate.reached(devices), "the gate")
        started.send(number)
        wait_until_handed_on(started, 6 if devices > 1 else 1)
        gate.open()
        ended = started.wait().expect(75)
    # The step in hand is finished, and none is begun after it.
    assert (ended.result["status"], ended.result["steps"]) == ("preempted", step + 1)
    assert "Traceback" not in ended.output
    resumed = resume(out, then)
    assert resumed.result["resumed_from"] == step + 1
    assert resumed.result["world_size"] == then
    assert_same(resumed, undisturbed)


def wait_until_handed_on(started: Started, polls: int = 6) -> None:
    """Returns once the launcher has polled, and so has handed on the signal that it was sent.

    /proc has no other trace of that; each poll is a sleep, and each sleep a context switch. The parent of one process
    that trains polls once a second.
    """
    switches = context_switches(started.pid)
    started.until(lambda: context_switches(started.pid) >= switches + polls, "a few polls of the launcher")


def context_switches(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")))


@parametrize(
    ("number", "arguments"),
    [(signal.SIGTERM, ()), (signal.SIGHUP, ()), (signal.SIGTERM, ("--workers", "1"))],
    ids=["SIGTERM", "SIGHUP", "data workers"],
    usual=["data workers"],
)
def test_the_whole_group_is_asked_to_stop(
    number: int, arguments: tuple[str, ...], undisturbed: Ended, tmp_path: Path
) -> None:
    """As systemd, containers and Slurm steps do: every process gets it, and the launcher hands its own on."""
    step = random_step(f"group {number}")
    gate, out = Gate(tmp_path / "gate", step), tmp_path / "run"
    wanted = Run(JOB, out, 2, True, (*CHECKPOINTS, *arguments), environment=gate.environment)
    with start(wanted) as started:
        started.until(lambda: gate.reached(2), "the gate")
        for _ in range(2):
            for pid in started.processes():
                os.kill(pid, number)
            time.sleep(0.1)
        gate.open()
        ended = started.wait().expect(75)
    assert (ended.result["status"], ended.result["steps"]) == ("preempted", step + 1)
    assert "Traceback" not in ended.output
    assert_same(resume(out, 1), undisturbed)


@pytest.mark.slow
def test_a_hangup_is_nothing_under_nohup(undisturbed: Ended, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 3), tmp_path / "run"
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *at_the_gate(out, gate, 2).command]
    with start_command(command, out, gate.environment, fresh=True) as started:
        started.until(lambda: gate.reached(2), "the gate")
        for pid in started.processes():
            os.kill(pid, signal.SIGHUP)
        gate.open()
        assert_same(started.wait().expect(0), undisturbed)


def test_ctrl_z_stops_and_continues_all(undisturbed: Ended, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", random_step("pause")), tmp_path / "run"
    with start(at_the_gate(out, gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        everyone = [started.pid, *started.workers().values()]
        assert len(everyone) == 3
        started.send(signal.SIGTSTP)
        started.until(lambda: all(state(pid) == "T" for pid in everyone), "all stopped")
        started.send(signal.SIGCONT)
        started.until(lambda: not any(state(pid) == "T" for pid in everyone), "all continued")
        gate.open()
        assert_same(started.wait().expect(0), undisturbed)


def state(pid: int) -> str:
    """R, S, D, T (stopped) or Z."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


@parametrize(("devices", "then"), [(3, 2), (1, 3)], usual=[])
def test_killed_altogether(devices: int, then: int, undisturbed: Ended, tmp_path: Path) -> None:
    step = random_step(f"kill {devices}")
    gate, out = Gate(tmp_path / "gate", step), tmp_path / "run"
    with start(at_the_gate(out, gate, devices)) as started:
        started.until(lambda: gate.reached(devices), "the gate")
        started.kill_group_and_workers()
        ended = started.wait()
    assert ended.code == -signal.SIGKILL
    assert not (out / "result.json").exists()
    resumed = resume(out, then)
    # The newest checkpoint may not have been on disk yet; the one before it was.
    newest = step // EVERY * EVERY
    assert resumed.result["resumed_from"] in (newest, newest - EVERY)
    assert_same(resumed, undisturbed)


@parametrize("victim", [0, 1], usual=[])
def test_one_worker_killed(victim: int, undisturbed: Ended, tmp_path: Path) -> None:
    """The others wait for it in a collective: its death is the root, not their lost connection."""
    step = random_step(f"worker {victim}")
    gate, out = Gate(tmp_path / "gate", step, str(victim)), tmp_path / "run"
    with start(at_the_gate(out, gate, 3)) as started:
        started.until(lambda: gate.reached(1), "the gate")
        os.kill(started.workers()[victim], signal.SIGKILL)
        ended = started.wait().fails(69)
    assert f"rank {victim}" in ended.stderr
    assert "SIGKILL" in ended.stderr
    assert "Traceback" not in ended.output
    assert_same(resume(out, 2), undisturbed)


def test_the_launcher_killed(undisturbed: Ended, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", random_step("launcher")), tmp_path / "run"
    with start(at_the_gate(out, gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        assert len(started.workers()) == 2
        started.send(signal.SIGKILL)
        started.process.wait(GONE_WITHIN_SECONDS)
        started.wait_until_gone()
    assert_same(resume(out, 1), undisturbed)


@pytest.mark.slow
@parametrize("number", [signal.SIGTERM, signal.SIGINT], usual=["2"])
def test_asked_twice_it_stops_at_once(number: int, undisturbed: Ended, tmp_path: Path) -> None:
    """The gate stays shut: the step in hand never ends, and a second signal does not wait for it."""
    gate, out = Gate(tmp_path / "gate", random_step(f"twice {number}")), tmp_path / "run"
    with start(at_the_gate(out, gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        started.send(number)
        wait_until_handed_on(started)
        assert started.process.poll() is None
        time.sleep(BURST_SECONDS)
        started.send(number)
        ended = started.wait().expect(130)
    assert "Traceback" not in ended.output
    assert_same(resume(out, 3), undisturbed)


def test_one_process_asked_twice_stops_at_once(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 3)
    with start(at_the_gate(tmp_path / "run", gate, 1)) as started:
        started.until(lambda: gate.reached(1), "the gate")
        started.send(signal.SIGTERM)
        started.send(signal.SIGINT)  # one of each is a scheduler's habit, not impatience
        time.sleep(BURST_SECONDS + 0.2)  # the process sleeps at the gate and is to go on doing so
        assert started.process.poll() is None
        started.send(signal.SIGTERM)
        ended = started.wait().expect(130)
    assert "Traceback" not in ended.output


@pytest.mark.slow
@pytest.mark.parametrize(("number", "devices"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_asked_to_stop_before_it_has_begun(number: int, devices: int, undisturbed: Ended, tmp_path: Path) -> None:
    """While torch is being imported, the longest part of a start: the first step is then not begun."""
    out = tmp_path / "run"
    with start(Run(JOB, out, devices, True, fresh=True)) as started:
        started.until(lambda: importing_torch(started) == 1, "the import of torch")  # ranks are copies of that process
        started.send(number)
        ended = started.wait().expect(75)
    assert "Traceback" not in ended.output
    assert (ended.result["status"], ended.result["steps"]) == ("preempted", 0)
    assert_same(resume(out, 2), undisturbed)


def importing_torch(started: Started) -> int:
    """How many of the command's processes have mapped torch's libraries."""
    found = 0
    for pid in started.processes():
        with contextlib.suppress(OSError):
            found += "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    return found


EVALUATED = f"{JOBS / 'evaluated.py'}:job"
EVALUATION, NUM_EVALUATED = 1000, 101  # as in jobs/evaluated.py
OFTEN = ("--evaluate-every", "4")


@parametrize(
    ("devices", "layout", "step"),
    [(1, "", 7), (2, "", 7), (2, "data=2", 7), (2, "shard=2", 7), (2, "pipeline=2", 7), (1, "", 15)],
    ids=["one", "two", "fast", "sharded", "stages", "after the last step"],
    usual=["fast"],
)
def test_asked_to_stop_in_an_evaluation(devices: int, layout: str, step: int, tmp_path: Path) -> None:
    """The evaluation is left before the next chunk, and a resume has it again; one rank alone may get the signal."""
    arguments = (*OFTEN, *(("--layout", layout) if layout else ()))
    exact = not layout  # of these layouts, no bits are fixed: the same ranks repeat them
    undisturbed = run(Run(EVALUATED, tmp_path / "undisturbed", devices, exact, arguments)).expect(0)
    gate, out, sizes = Gate(tmp_path / "gate", EVALUATION + step), tmp_path / "run", tmp_path / "sizes"
    environment = {**gate.environment, "TEST_EVALUATED": str(sizes)}
    with start(Run(EVALUATED, out, devices, exact, arguments, environment=environment)) as started:
        num_computing = 1 if "pipeline" in layout else devices
        started.until(lambda: gate.reached(num_computing), "the gate")
        before = num_evaluated(sizes)
        os.kill(started.workers()[1] if devices > 1 else started.pid, signal.SIGTERM)
        if devices == 1:
            wait_until_handed_on(started, 1)
        gate.open()
        ended = started.wait().expect(75)
    assert (ended.result["status"], ended.result["steps"]) == ("preempted", step + 1)
    assert num_evaluated(sizes) - before < NUM_EVALUATED - 16 * num_computing
    assert ended.records[-1]["metrics"] is None
    resumed = run(Run(EVALUATED, out, devices, arguments=("--resume", *OFTEN))).expect(0)
    assert_same(resumed, undisturbed)
    mine, theirs = ([(r["step"], r["metrics"]) for r in one.records] for one in (resumed, undisturbed))
    assert mine == theirs


def num_evaluated(sizes: Path) -> int:
    return sum(map(int, sizes.read_text(encoding="ascii").split()))
