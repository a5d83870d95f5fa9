"""Bad samples, data workers that die or hang, flipped bits and stragglers: named, mended, and the run goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_preempted import assert_same
from tests.faults.test_recovery import events
from tests.launching import JOBS, Ended, Gate, Run, run, run_all, start
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = JOBS / "incidents.py"
BAD = "7,30"


def of_kind(ended: Ended, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(ended) if event["kind"] == kind]


def with_bad(out: Path, devices: int, most: int, *arguments: str) -> Run:
    more = ("--bad-samples", str(most), *arguments)
    return Run(f"{JOB}:rows", out, devices, True, more, environment={"TEST_BAD": BAD})


@parametrize("how", ["workers", "fast"], usual=[])
def test_bad_samples_with_workers_and_fused(how: str, tmp_path: Path) -> None:
    """The same samples are read whoever reads them."""
    wanted = [with_bad(tmp_path / "one", 1, 2), with_bad(tmp_path / "other", 3, 2)]
    if how == "workers":
        wanted[1].arguments += ("--workers", "2")
    else:
        wanted[1].exact = False
    ends = [ended.expect(0) for ended in run_all(wanted)]
    assert ends[0].result["sample_digest"] == ends[1].result["sample_digest"]
    assert (ends[0].result["weights_sha256"] == ends[1].result["weights_sha256"]) == (how == "workers")


def test_bad_samples_are_left_out_alike_on_any_number_of_devices(tmp_path: Path) -> None:
    cut = run(with_bad(tmp_path / "cut", 1, 2, "--steps", "3")).expect(0)
    wanted = [with_bad(tmp_path / "two", 2, 2), Run(f"{JOB}:rows", cut.out, 1, False, ("--resume", "--steps", "6"))]
    two, resumed = (ended.expect(0) for ended in run_all(wanted))  # the second has none of the samples bad, but knows
    assert two.result["weights_sha256"] == resumed.result["weights_sha256"]
    assert two.result["sample_digest"] == resumed.result["sample_digest"]
    told = of_kind(two, "samples")
    assert sorted(i for event in told for i in event["samples"]) == [7, 30]
    assert "cannot read sample" in told[0]["what"]
    assert {event["rank"] for event in told} <= {0, 1}


def test_more_bad_samples_than_are_allowed(tmp_path: Path) -> None:
    ended = run(with_bad(tmp_path / "run", 2, 1)).fails(2)
    assert "2 samples cannot be read: [7, 30]" in ended.stderr
    assert "Traceback" not in ended.output


@parametrize("bad", ["7", "30"], usual=["30"])
def test_an_evaluation_leaves_nothing_out(bad: str, tmp_path: Path) -> None:
    """Its number would be another one, in silence."""
    wanted = Run(f"{JOB}:evaluated", tmp_path / "run", 2, arguments=("--bad-samples", "9"))
    wanted.environment = {"TEST_BAD": bad}
    ended = run(wanted).fails(2)
    assert f"sample {bad} of eval_data" in ended.stderr
    assert f"cannot read sample {bad}" in ended.stderr
    assert "Traceback" not in ended.output


@parametrize("how", ["SIGKILL", "SIGSTOP"], usual=["SIGKILL"])
def test_a_data_worker_that_dies_or_hangs(how: str, tmp_path: Path) -> None:
    """It is replaced at its exact place, and the rank goes on as it is."""
    gate, pids = Gate(tmp_path / "gate", 2), tmp_path / "pids"
    pids.mkdir()
    wanted = Run(f"{JOB}:rows", tmp_path / "run", 1, True, ("--workers", "1"))
    wanted.environment = {**gate.environment, "TEST_PIDS": str(pids)}
    with start(wanted) as started:
        started.until(lambda: gate.reached(1), "the gate")
        os.kill(int(next(pids.iterdir()).name.split("-")[1]), getattr(signal, how))
        time.sleep(0.1)  # the rank is in the midst of its step when it could learn of the death
        gate.open()
        ended = started.wait().expect(0)
    (told,) = of_kind(ended, "workers")
    assert ("SIGKILL" if how == "SIGKILL" else "gave no sample") in told["what"]
    assert_same(ended, run(Run(f"{JOB}:rows", tmp_path / "undisturbed", 1, True)).expect(0))


@pytest.mark.slow
def test_a_data_worker_that_is_stopped_before_its_first_sample(tmp_path: Path) -> None:
    """Its dataset may take minutes to load, but not while it is stopped."""
    variables = {"TEST_STOP": str(tmp_path / "stopped")}
    ended = run(Run(f"{JOB}:rows", tmp_path / "run", 1, True, ("--workers", "1"), environment=variables)).expect(0)
    (told,) = of_kind(ended, "workers")
    assert told["what"].startswith("a worker process was stopped (SIGSTOP), and gave no sample for")
    assert_same(ended, run(Run(f"{JOB}:rows", tmp_path / "undisturbed", 1, True)).expect(0))


@parametrize(("devices", "victim"), [(2, 1), (3, 0)], usual=["2-1"])
def test_a_flipped_bit_is_found_and_taken_back(devices: int, victim: int, tmp_path: Path) -> None:
    arguments = ("--check-replicas", "4", "--checkpoint-every", "3")
    variables = {"TEST_FLIP": f"{tmp_path}:6:{victim}"}  # after the checkpoint of step 6, in the step after it
    wanted = Run(f"{JOB}:flipped", tmp_path / "run", devices, True, arguments, environment=variables)
    whole = Run(f"{JOB}:flipped", tmp_path / "whole", 1, True, environment={"TEST_FLIP": f"{tmp_path}:6:9"})
    ended, undisturbed = (ended.expect(0) for ended in run_all([wanted, whole]))
    assert_same(ended, undisturbed)
    found, named = of_kind(ended, "replicas")
    assert (found["step"], found["done"]) == (8, "rolled back to step 6")
    assert ("one of ranks 0, 1" if devices == 2 else f"of rank {victim} ") in found["what"]
    assert (named["step"], named["rank"]) == (8, victim), "known once the steps have been trained again"


@parametrize("arguments", [(), ("--check-replicas", "4")], ids=["default", "asked"], usual=["default"])
def test_an_update_that_differs_by_rank_ends_the_run_after_the_first_step(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where the run could go back: it goes back three times at most."""
    ended = run(Run(f"{JOB}:drifting", tmp_path / "run", 2, arguments=arguments)).fails(74)
    assert ended.message.given.startswith("step 1: the parameters or the optimizer's state of one of ranks 0, 1")
    assert "the gradients are the same on all ranks: the update of the optimizer" in ended.message.conflict


@pytest.mark.slow
def test_a_straggler_is_named_and_nobody_else(tmp_path: Path) -> None:
    wanted = [Run(f"{JOB}:slow", tmp_path / name, 2, environment={"TEST_SLOW": name}) for name in ("1", "none")]
    slow, even = (run(one).expect(0) for one in wanted)
    (told,) = of_kind(slow, "straggler")
    assert (told["rank"], told["cause"]) == (1, "the forward")
    assert told["step"] <= 25
    assert told["ratio"] > 2.0
    assert not (even.out / "events.jsonl").exists()
