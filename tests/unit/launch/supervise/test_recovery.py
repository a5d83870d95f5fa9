"""Whether lost ranks are started again: by what was lost, and by whether new steps came."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.run_folders import RECORD

from shoal.errors import PeerError, RankLostError, ShoalError, UserCodeError
from shoal.launch.signals import Signals
from shoal.launch.supervise.recovery import Recovery, last_step
from shoal.runs.directory import RunDirectory


def lost(rank: int = 1, how: str = "it was killed by SIGKILL") -> RankLostError:
    error = RankLostError(given=f"rank {rank}", conflict=f"{how}\nlast words", remedy="--resume")
    error.rank, error.host = rank, "here"
    return error


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def reach(directory: RunDirectory, step: int) -> None:
    whole = "".join(f"{replace(RECORD, step=number).to_line()}\n" for number in (1, step))
    directory.records.write_text(f'{whole}{{"step": {step + 1}, cut', encoding="utf-8")


def test_the_last_whole_record_counts(directory: RunDirectory) -> None:
    assert last_step(directory.records) == 0
    reach(directory, 41)
    assert last_step(directory.records) == 41


def test_what_is_not_lost_is_not_tried_again(directory: RunDirectory) -> None:
    raised = UserCodeError(given="a", conflict="b", remedy="c")
    assert Recovery(5, directory).pause(raised, 0.0) is None
    assert Recovery(5, directory).pause(None, 0.0) is None
    assert Recovery(0, directory).pause(lost(), 0.0) is None
    assert not directory.events.exists()


@pytest.mark.parametrize("error", [lost(), PeerError(given="a", conflict="b", remedy="c")], ids=["lost", "connection"])
def test_a_loss_is_at_once_tried_again(error: ShoalError, directory: RunDirectory) -> None:
    reach(directory, 9)
    directory.saved.write_text('{"step": 8}')
    assert Recovery(5, directory).pause(error, 0.0) == 0.0
    event = json.loads(directory.events.read_text())
    assert (event["kind"], event["after_step"], event["done"]) == ("lost", 9, "all ranks start again from step 8")
    assert event["noticed"] == ("the end of its process" if error.rank == 1 else "an error of the ranks' collectives")


def test_pauses_grow_until_a_new_step_comes(directory: RunDirectory) -> None:
    recovery = Recovery(9, directory)
    reach(directory, 3)
    assert [recovery.pause(lost(number), 0.0) for number in range(4)] == [0.0, 1.0, 2.0, 4.0]
    reach(directory, 4)
    assert recovery.pause(lost(7), 0.0) == 0.0
    assert recovery.count == 5


def test_the_budget_is_of_starts_in_vain(directory: RunDirectory) -> None:
    recovery = Recovery(2, directory)
    reach(directory, 3)
    assert [recovery.pause(lost(number), 0.0) for number in range(2)] == [0.0, 1.0]
    error = lost(2)
    assert recovery.pause(error, 0.0) is None
    assert "; 2 starts in a row got no further than step 3" in error.conflict


def test_the_same_loss_twice_ends_the_run(directory: RunDirectory) -> None:
    recovery = Recovery(9, directory)
    reach(directory, 3)
    assert recovery.pause(lost(1, "it has been in forward for 5.2 s"), 0.0) == 0.0
    error = lost(1, "it has been in forward for 6.0 s")
    assert recovery.pause(error, 0.0) is None
    assert "; it was lost twice in the same way, both times after step" in error.conflict.partition("\n")[0]
    assert "the run ended" in directory.events.read_text().splitlines()[-1]


def test_two_hosts_that_are_lost_at_one_step_are_two_losses(directory: RunDirectory) -> None:
    recovery = Recovery(9, directory)
    reach(directory, 3)
    for host in ("h1", "h2"):
        error = RankLostError(given=f"host {host}", conflict="it was lost: closed by remote host", remedy="--resume")
        error.host = host
        assert recovery.pause(error, 0.0) is not None
    assert recovery.described(error, 0.0).startswith("host h2 was lost: ")
    error.conflict = "it did nothing for 5 s, and was killed\nIt was in\n  File job.py"
    line, *stack = recovery.described(error, 0.0).splitlines()
    assert line.endswith("it did nothing for 5 s, and was killed; all ranks start again, from step 0")
    assert stack == ["It was in", "  File job.py"]


def test_kills_from_outside_may_come_twice(directory: RunDirectory) -> None:
    recovery = Recovery(9, directory)
    assert [recovery.pause(lost(0), 0.0) for _ in range(3)] == [0.0, 1.0, 2.0]


def test_unsaved_is_what_this_start_has_trained(directory: RunDirectory) -> None:
    """A hang is waited for as long as a new start would cost: what came before this start is lost already."""
    now, unsaved = [1000.0], []
    recovery = Recovery(5, directory, clock=lambda: now[0])

    def once(count: int, noticed_at: float) -> tuple[int, ShoalError | None, float]:
        now[0] += 300.0
        unsaved.append(recovery.unsaved_seconds())
        return (69, lost(), 0.0) if count == 0 else (0, None, 0.0)

    recovery.until_done(Signals(impatient=False), once)
    assert unsaved == [300.0, 300.0]
