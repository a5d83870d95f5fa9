"""Workers of a run with servers that are killed or stopped: the run goes on, and every grain is applied once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.faults.test_preempted import wait_until_handed_on
from tests.launching import JOBS, Ended, Run, Started, run, start
from tests.sharing import Shared
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = JOBS / "served.py"
STEPS, BATCH, GRAINS = 12, 16, 8


def plan(folder: Path, mode: str, workers: int, exact: bool = False) -> tuple[str, ...]:
    path = folder / "plan.toml"
    text = f'[layout]\ndata = {workers}\n[server]\nmode = "{mode}"\n[execution]\nexact = {str(exact).lower()}\n'
    path.write_text(text, encoding="utf-8")
    return "--plan", str(path)


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    """By data parallelism on one process, without servers."""
    return shared.run(Run(JOB, Path(), 1, exact=True))


def holder(started: Started, folder: Path, sample: int) -> int:
    """The process that waits with this sample, once one does."""
    started.until(lambda: any(folder.glob(f"reached-{sample}-*")), f"a worker that computes sample {sample}")
    return int(next(folder.glob(f"reached-{sample}-*")).name.rpartition("-")[2])


def assert_every_grain_once(ended: Ended, undisturbed: Ended, num_parts: int) -> None:
    """Counted by who applied them, and proven by the digest over all sample ids."""
    server = ended.result["server"]
    assert server["applied_steps"] == STEPS
    assert server["applied_pushes"] == STEPS * num_parts
    assert server["applied_grains"] == STEPS * GRAINS
    assert ended.result["samples"] == STEPS * BATCH
    assert ended.result["sample_digest"] == undisturbed.result["sample_digest"]
    assert [record["step"] for record in ended.records] == list(range(1, STEPS + 1))
    assert sorted(record["push"]["step"] for record in ended.records) == list(range(1, STEPS + 1))


def test_killed_in_synchronous_mode_the_weights_are_those_of_one_process(undisturbed: Ended, tmp_path: Path) -> None:
    sample, out = 5 * BATCH + 3, tmp_path / "run"
    arguments = plan(tmp_path, "synchronous", 2, exact=True)
    with start(Run(JOB, out, None, arguments=arguments, environment={"TEST_HOLD": f"{tmp_path}:{sample}"})) as started:
        os.kill(holder(started, tmp_path, sample), signal.SIGKILL)
        (tmp_path / f"open-{sample}").touch()
        ended = started.wait().expect(0)
    assert_every_grain_once(ended, undisturbed, 2)
    assert ended.result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert ended.result["server"]["again"] == 1, "one part was given out again"
    assert ended.result["server"]["staleness"] == {"0": STEPS}
    kinds = [incident["kind"] for incident in ended.result["server"]["incidents"]]
    assert kinds[0] == "lost"
    assert "Traceback" not in ended.output


@pytest.mark.slow
def test_killed_and_stopped_in_asynchronous_mode_the_run_goes_on(undisturbed: Ended, tmp_path: Path) -> None:
    killed, stopped, last, out = 2 * BATCH + 1, 3 * BATCH + 1, 11 * BATCH, tmp_path / "run"
    held = {"TEST_HOLD": f"{tmp_path}:{killed}:{stopped}:{last}"}
    arguments = plan(tmp_path, "asynchronous", 3)
    with start(Run(JOB, out, None, arguments=arguments, environment=held)) as started:
        first, second = holder(started, tmp_path, killed), holder(started, tmp_path, stopped)
        assert first != second
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGSTOP)
        for sample in (killed, stopped):
            (tmp_path / f"open-{sample}").touch()
        started.until(lambda: "has said nothing for" in started.output, "the name of the stopped worker")
        started.until(lambda: started.output.count("has come in its place") == 2, "both replacements")
        (tmp_path / f"open-{last}").touch()
        ended = started.wait().expect(0)
    assert_every_grain_once(ended, undisturbed, 1)
    server = ended.result["server"]
    assert server["again"] == 2
    said = [incident["said"] for incident in server["incidents"]]
    assert any(f"process {first}) is gone; it was computing part 0 of step 2" in text for text in said)
    assert any(f"process {second}) has said nothing for" in text for text in said)
    assert sum(server["staleness"].values()) == STEPS
    assert any(int(staleness) > 0 for staleness in server["staleness"])
    assert "Traceback" not in ended.output


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_which_goes_on_elsewhere(undisturbed: Ended, tmp_path: Path) -> None:
    """Its parameters are gone: the newest checkpoint is one that any plan resumes."""
    sample, out = 6 * BATCH + 3, tmp_path / "run"
    arguments = (*plan(tmp_path, "synchronous", 2, exact=True), "--checkpoint-every", "4")
    with start(Run(JOB, out, None, arguments=arguments, environment={"TEST_HOLD": f"{tmp_path}:{sample}"})) as started:
        holder(started, tmp_path, sample)
        os.kill(started.workers()[1], signal.SIGKILL)
        ended = started.wait().fails(69)
    assert "rank 1" in ended.stderr
    assert "SIGKILL" in ended.stderr
    plain = tmp_path / "plain.toml"
    plain.write_text("[layout]\ndata = 2\n[execution]\nexact = true\n", encoding="utf-8")
    resumed = run(Run(JOB, out, None, arguments=("--resume", "--plan", str(plain)))).expect(0)
    assert resumed.result["resumed_from"] == 4
    assert resumed.result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert resumed.result["sample_digest"] == undisturbed.result["sample_digest"]


@pytest.mark.slow
@parametrize("rank", [0, 1], ids=["conductor", "server"], usual=[])
def test_one_that_stands_still_is_blamed_and_no_worker(rank: int, tmp_path: Path) -> None:
    sample, out = 6 * BATCH + 3, tmp_path / "run"
    arguments = (*plan(tmp_path, "synchronous", 2, exact=True), "--checkpoint-every", "4")
    with start(Run(JOB, out, None, arguments=arguments, environment={"TEST_HOLD": f"{tmp_path}:{sample}"})) as started:
        holder(started, tmp_path, sample)
        os.kill(started.workers()[rank], signal.SIGSTOP)
        (tmp_path / f"open-{sample}").touch()
        ended = started.wait().fails(69)
    assert f"error on rank {rank} (" in ended.stderr
    assert "was stopped (SIGSTOP) for" in ended.stderr
    assert "has come in its place" not in ended.output


def test_asked_to_stop_it_leaves_a_checkpoint_without_a_gap(undisturbed: Ended, tmp_path: Path) -> None:
    """In asynchronous mode what is out is finished first; then one process goes on from there."""
    samples, out = (6 * BATCH + 3, 7 * BATCH + 3), tmp_path / "run"
    held = {"TEST_HOLD": f"{tmp_path}:{samples[0]}:{samples[1]}"}
    with start(Run(JOB, out, None, arguments=plan(tmp_path, "asynchronous", 2), environment=held)) as started:
        for sample in samples:
            holder(started, tmp_path, sample)
        started.send(signal.SIGTERM)
        wait_until_handed_on(started)
        for sample in samples:
            (tmp_path / f"open-{sample}").touch()
        ended = started.wait().expect(75)
    assert (ended.result["status"], ended.result["steps"]) == ("preempted", 8), "what was out, and no more"
    plain = tmp_path / "plain.toml"
    plain.write_text("[layout]\ndata = 1\n", encoding="utf-8")
    resumed = run(Run(JOB, out, None, arguments=("--resume", "--plan", str(plain)))).expect(0)
    assert resumed.result["resumed_from"] == 8
    assert resumed.result["sample_digest"] == undisturbed.result["sample_digest"]
