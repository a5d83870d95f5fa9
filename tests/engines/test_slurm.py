"""shoal run --on slurm, on a real slurmctld with two slurmd: the run is the undisturbed one to the bit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines import slurm_cluster
from tests.engines.choice import needs
from tests.engines.same_run import assert_same, result
from tests.engines.slurm_cluster import Slurm
from tests.launching import JOBS, Ended, Gate, Run, Started, start_command
from tests.sharing import Shared

pytestmark = needs("slurm", slurm_cluster.unavailable)

JOB = str(JOBS / "tiny.py")
TWO_NODES = "--nodes=2 --ntasks-per-node=1"
LIMIT_SECONDS = 120.0
STEPS, STEP = 16, 6


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster.started(tmp_path_factory.mktemp("slurm"), "n1", "n2") as cluster:
        yield cluster


class Submitted:
    """A command that follows its job."""

    def __init__(self, started: Started, slurm: Slurm) -> None:
        self.started, self.slurm = started, slurm

    @property
    def number(self) -> str:
        """The job's, once it is submitted."""
        said = self.started.until(lambda: "slurm job " in self.started.output, "a job's number", LIMIT_SECONDS)
        assert said
        return self.started.output.split("slurm job ")[1].split(":")[0]

    def reaches(self, gate: Gate, ranks: int = 2) -> None:
        """Waits until all ranks are at the gate."""
        self.started.until(lambda: gate.reached(ranks), "the gate", LIMIT_SECONDS)

    def becomes(self, *state: str) -> dict[str, str]:
        """The job, once it is in one of these states."""
        number = self.number

        def found() -> dict[str, str]:
            job = self.slurm.job(number)
            return job if job["JobState"] in state else {}

        return self.started.until(found, f"state {' or '.join(state)}", LIMIT_SECONDS)

    def is_told(self) -> None:
        """Waits until Slurm has told the ranks to end, which its own line in their output says."""
        self.started.until(lambda: " CANCELLED AT " in self.started.output, "Slurm's word", LIMIT_SECONDS)

    def begin_now(self) -> None:
        """Takes the two minutes away that Slurm lets a job wait before it starts it again."""
        job = self.becomes("PENDING")
        assert job["Restarts"] == "1"
        self.slurm.command("scontrol", "update", f"JobId={self.number}", "StartTime=now")


def run(
    slurm: Slurm,
    out: Path,
    *words: str,
    gate: Gate | None = None,
    on: str = TWO_NODES,
    devices: str = "2",
    job: str = JOB,
    cwd: Path | None = None,
) -> Any:
    """A context with the command on its way, as a `Started`."""
    shared = ("--exact", "--devices", devices, "--out", str(out), "--on", f"slurm:{on}")
    variables = {**slurm.variables, "PYTHONPATH": str(JOBS), **(gate.environment if gate else {})}
    return start_command([sys.executable, "-m", "shoal", "run", job, *shared, *words], out, variables, cwd=cwd)


def test_two_nodes(slurm: Slurm, undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with run(slurm, out) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)
    assert "running on n[1-2]" in ended.stderr
    assert "completed after step 16" in ended.stdout
    assert (out / "slurm.sh").read_text(encoding="utf-8").startswith("#!/bin/bash\n#SBATCH ")


def test_preempted_and_requeued(slurm: Slurm, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(slurm, out, gate=gate) as started:
        job = Submitted(started, slurm)
        job.reaches(gate)
        urgent = slurm.command("sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", *_SLEEP)
        job.is_told()
        gate.open()
        job.becomes("PENDING")
        assert result(out)["status"] == "preempted"
        assert result(out)["steps"] == STEP + 1
        slurm.command("scancel", urgent.strip())
        job.begin_now()
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)
    assert result(out)["resumed_from"] == STEP + 1


_SLEEP = ("--wrap", "sleep 300")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_requeued_with_another_number_of_nodes(
    before: int, after: int, slurm: Slurm, undisturbed: Ended, tmp_path: Path
) -> None:
    """Another layout of the same run: Slurm gives as many nodes as are free, between the limits."""
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)

    def take(node: str) -> str:
        words = ("-p", "high", "-w", node, "--exclusive", "-o", "/dev/null", *_SLEEP)
        return slurm.command("sbatch", "--parsable", *words).strip()

    urgent = {"n2": take("n2")} if before == 1 else {}
    try:
        with run(slurm, out, gate=gate, on="--ntasks-per-node=1", devices="1:2") as started:
            job = Submitted(started, slurm)
            job.reaches(gate, before)
            taken = "n1" if before == 1 else "n2"
            urgent[taken] = take(taken)
            job.is_told()
            gate.open()
            job.becomes("PENDING")
            assert (result(out)["status"], result(out)["world_size"]) == ("preempted", before)
            if after == 2:
                while urgent:
                    slurm.command("scancel", urgent.popitem()[1])
                started.until(slurm.idle, "two free nodes", LIMIT_SECONDS)
            job.begin_now()
            started.wait(LIMIT_SECONDS).expect(0)
    finally:
        for number in urgent.values():
            slurm.command("scancel", number)
    assert_same(out, undisturbed)
    assert (result(out)["world_size"], result(out)["resumed_from"]) == (after, STEP + 1)


@pytest.mark.parametrize("devices", ["1:1", "1:2", "2:8"])
def test_a_range_takes_what_there_is(devices: str, slurm: Slurm, undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with run(slurm, out, on="--ntasks-per-node=1", devices=devices) as started:
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)
    assert result(out)["world_size"] == (1 if devices == "1:1" else 2)


def test_scancel_saves_and_a_resume_goes_on(slurm: Slurm, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(slurm, out, gate=gate) as started:
        job = Submitted(started, slurm)
        job.reaches(gate)
        slurm.command("scancel", job.number)
        job.is_told()
        gate.open()
        started.wait(LIMIT_SECONDS).expect(75)
    assert (result(out)["status"], result(out)["steps"]) == ("preempted", STEP + 1)
    with run(slurm, out, "--resume", on="--nodes=1 --ntasks=2") as started:
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)


def test_an_interrupt_of_the_command_cancels_the_job(slurm: Slurm, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(slurm, out, gate=gate) as started:
        job = Submitted(started, slurm)
        job.reaches(gate)
        started.send(signal.SIGINT)
        job.is_told()
        gate.open()
        started.wait(LIMIT_SECONDS).expect(75)
    assert result(out)["status"] == "preempted"


def test_a_lost_rank_starts_again_in_the_allocation(slurm: Slurm, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(slurm, out, "--checkpoint-every", "2", gate=gate) as started:
        Submitted(started, slurm).reaches(gate)
        (victim,) = [pid for pid, v in started.processes().items() if v.get("SLURM_PROCID") == "1" and _is_rank(pid)]
        os.kill(victim, signal.SIGKILL)
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert "all ranks start again (1 of 5)" in ended.stdout
    assert_same(out, undisturbed)


def test_a_package_with_a_configuration(slurm: Slurm, project: Path, project_alone: Ended) -> None:
    """By path, by name, and a resume with another value."""
    config, by_path, by_name = ("--config", "configs/small.yaml"), project / "by-path", project / "by-name"
    for job, out in (("src/flowers/train.py", by_path), ("flowers.train:job", by_name)):
        with run(slurm, out, *config, job=job, cwd=project) as started:
            started.wait(LIMIT_SECONDS).expect(0)
        assert_same(out, project_alone)
    (project / "configs" / "small.yaml").write_text("lr: 0.3\nepochs: 2\n", encoding="utf-8")
    with run(slurm, by_name, *config, "--resume", job="flowers.train:job", cwd=project) as started:
        ended = started.wait(LIMIT_SECONDS).expect(2)
    assert "lr: 0.1 -> 0.3, from configs/small.yaml" in ended.stdout
    assert_same(by_name, project_alone)


def test_a_drained_node_is_named_and_waited_for(slurm: Slurm, undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    slurm.command("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=memory")
    try:
        with run(slurm, out) as started:
            job = Submitted(started, slurm)
            job.becomes("PENDING")
            started.until(lambda: "pending (" in started.output, "a reason", LIMIT_SECONDS)
            slurm.command("scontrol", "update", "NodeName=n2", "State=RESUME")
            started.wait(LIMIT_SECONDS).expect(0)
    finally:
        if "drain" in slurm.command("sinfo", "-h", "-n", "n2", "-o", "%T"):
            slurm.command("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert_same(out, undisturbed)


def test_a_node_drained_under_a_run_does_not_end_it(slurm: Slurm, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(slurm, out, gate=gate) as started:
        job = Submitted(started, slurm)
        job.reaches(gate)
        slurm.command("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=memory")
        try:
            gate.open()
            started.wait(LIMIT_SECONDS).expect(0)
        finally:
            slurm.command("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert_same(out, undisturbed)


def test_an_array_of_settings(slurm: Slurm, shared: Shared, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    with run(slurm, out, "--set", "lr=0.%a", on=f"{TWO_NODES} --array=1-2") as started:
        started.wait(2 * LIMIT_SECONDS).expect(0)
    for number in (1, 2):
        alone = shared.run(Run(JOB, Path(), 1, exact=True, settings={"lr": f"0.{number}"}))
        assert_same(out / str(number), alone)


def _is_rank(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"shoal" in words
