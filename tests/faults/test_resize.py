"""More and fewer processes during a run, by `shoal resize`: an exact run computes the same bits."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.faults.test_preempted import JOB, assert_same, wait_until_handed_on
from tests.launching import Ended, Gate, Run, run, start, start_command
from tests.sharing import Shared
from tests.usual import parametrize

from shoal.cli.run.train import _LOOK_SECONDS
from shoal.runs.directory import RunDirectory, about, newest, read_json

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


def resize(out: Path, devices: int) -> list[str]:
    return [sys.executable, "-m", "shoal", "resize", str(out), str(devices)]


@parametrize("sizes", [(2, 1, 3, 2), (1, 3, 1)], ids=["2-1-3-2", "1-3-1"], usual=["2-1-3-2"])
def test_the_bits_are_those_of_a_run_that_was_left_alone(
    sizes: tuple[int, ...], undisturbed: Ended, tmp_path: Path
) -> None:
    gates = [Gate(tmp_path / f"gate-{step}", step) for step in range(2, 2 + 3 * len(sizes[1:]), 3)]
    all_gates = {"TEST_GATE": ";".join(gate.environment["TEST_GATE"] for gate in gates)}
    out = tmp_path / "run"
    with start(Run(JOB, out, sizes[0], True, environment=all_gates, restarts=5)) as started:
        for gate, before, after in zip(gates, sizes[:-1], sizes[1:], strict=True):
            started.until(lambda gate=gate, before=before: gate.reached(before), f"step {gate.step}")
            if gate is gates[0]:
                assert_refused(out, before)
            with start_command(resize(out, after), tmp_path / "resize") as asked:
                asked.until(lambda: read_json(out / "resize.json"), "the wish")
                asked.until(lambda gate=gate: gate.seconds() > 2 * _LOOK_SECONDS, "rank 0's next look at it")
                gate.open()
                told = asked.wait().expect(0)
            assert f"goes on with {after} process" in told.stdout
            assert about(out, newest(out))["world_size"] == after
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["world_size"] == sizes[-1]
    assert ended.result["restarts"] == 0
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["processes"] for line in lines if line["kind"] == "resized"] == list(sizes[1:])
    assert not (out / "resize.json").exists()
    with start_command(resize(out, 1), tmp_path / "resize") as asked:
        assert "no run trains there now" in asked.wait().fails(2).stderr


@pytest.mark.slow
def test_a_wish_that_came_before_a_loss_is_heeded_after_it(undisturbed: Ended, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 5), tmp_path / "run"
    with start(Run(JOB, out, 2, True, environment=gate.environment, restarts=5)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        with start_command(resize(out, 1), tmp_path / "resize") as asked:
            asked.until(lambda: read_json(out / "resize.json"), "the wish")
            os.kill(started.workers()[1], signal.SIGKILL)
            started.until(lambda: "was lost" in started.output, "the loss")
            gate.open()
            assert "goes on with 1 process" in asked.wait().expect(0).stdout
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert (ended.result["world_size"], ended.result["restarts"]) == (1, 1)


def assert_refused(out: Path, devices: int) -> None:
    """What leaves a run that trains on so many processes as it is."""
    for number, said in ((99, "99 data ranks"), (devices, f"trains on {devices} process")):
        with start_command(resize(out, number), out.parent / "resize") as asked:
            assert said in asked.wait().output


@pytest.mark.slow
def test_a_wish_that_was_left_there_is_of_another_call(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(Run(JOB, out, 2, arguments=("--steps", "2"))).expect(0)
    (out / "resize.json").write_text('{"devices": 1}', encoding="utf-8")
    ended = run(Run(JOB, out, 2, arguments=("--resume", "--steps", "4"))).expect(0)
    assert (ended.result["world_size"], ended.result["steps"]) == (2, 4)


def test_a_request_to_stop_comes_before_a_wish(tmp_path: Path) -> None:
    """Of a run in one process, which trains in the command's own."""
    gate, out = Gate(tmp_path / "gate", 3), tmp_path / "run"
    with start(Run(JOB, out, 1, environment=gate.environment)) as started:
        started.until(lambda: gate.reached(1), "the gate")
        RunDirectory(out).request_resize(2)
        started.send(signal.SIGTERM)
        wait_until_handed_on(started, 1)
        gate.open()
        ended = started.wait().expect(75)
    assert (ended.result["status"], ended.result["steps"]) == ("preempted", 4)
    assert "resume with: " in ended.output
    assert newest(out) == 1, "no other ranks were started"
