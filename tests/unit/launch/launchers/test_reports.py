"""By the reports of its ranks a launcher knows how a run ended, and starts it again where one was lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.distributed.process_setup import as_rank
from shoal.errors import ExitCode, RankLostError, ShoalError, StorageError
from shoal.launch.environment import REPORT_FILE, Environment
from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.reports import RankStart, until_done
from shoal.launch.signals import Signals
from shoal.launch.supervise.recovery import verdict as verdict_of

ERROR = {"given": "a", "conflict": "b", "remedy": "c", "rank": 1, "host": "h", "traceback": None}


def submission(out: Path, most: int = 2) -> Submission:
    return Submission(("run", "job.py"), "job", out, out, 2, max_restarts=most)


def verdict(folder: Path, *ends: dict[str, Any] | None) -> tuple[int, ShoalError | None]:
    for rank, end in enumerate(ends):
        if end is not None:
            (folder / f"rank-{rank}.json").write_text(json.dumps(end), encoding="utf-8")
    return verdict_of(RankStart(submission(folder), 0, str(folder)).ends("h0"), Signals(impatient=False))


def ended(code: int, kind: str | None = None) -> dict[str, Any]:
    return {"exit_code": code, "error": {**ERROR, "kind": kind} if kind else None}


@pytest.mark.parametrize(
    ("ends", "code", "kind"),
    [
        ((ended(0), ended(0)), 0, None),
        ((ended(75), ended(75)), 75, None),
        ((ended(69, "PeerError"), ended(2, "JobError")), 2, "JobError"),
        ((ended(69, "PeerError"), None), 69, "RankLostError"),
        ((None, None), 69, "RankLostError"),
    ],
)
def test_how_a_run_ended(ends: tuple[dict[str, Any] | None, ...], code: int, kind: str | None, tmp_path: Path) -> None:
    found, error = verdict(tmp_path, *ends)
    assert found == code
    assert (type(error).__name__ if error else None) == kind


def test_every_rank_is_told_where_to_report_and_how_often_it_was_started(tmp_path: Path) -> None:
    first, second = (RankStart(submission(tmp_path), number, str(tmp_path)).variables() for number in (0, 1))
    assert first == {"SHOAL_REPORT_FILE": f"{tmp_path}/rank-%r.json"}
    assert second["SHOAL_RESTARTS"] == "1"


def test_lost_ranks_start_again_until_nothing_new_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempts = []

    def lost(attempt: RankStart) -> tuple[int, ShoalError | None]:
        attempts.append(attempt.number)
        error = RankLostError(given="rank 1", conflict="it was killed by SIGKILL", remedy="x")
        error.rank, error.host = 1, "h"
        return 69, error

    assert until_done(submission(tmp_path, most=1), Signals(impatient=False), lost) == 69
    assert attempts == [0, 1]
    assert "rank 1 on h was lost" in capsys.readouterr().err
    assert not list(tmp_path.glob(".reports-*"))


def test_a_run_that_was_told_to_stop_is_not_started_again(tmp_path: Path) -> None:
    signals = Signals(impatient=False, received=[15])
    error = RankLostError(given="rank 1", conflict="gone", remedy="x")
    assert until_done(submission(tmp_path), signals, lambda attempt: (69, error)) == 69


def test_ranks_report_to_the_address_that_the_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no folder here is of use to them."""
    there = tmp_path / "there"

    def once(attempt: RankStart) -> tuple[int, ShoalError | None]:
        monkeypatch.setenv(REPORT_FILE, attempt.variables()[REPORT_FILE])
        for rank in range(2):
            as_rank(Environment(rank=rank, world_size=2), lambda: ExitCode.PREEMPTED)
        assert len(list(there.glob(".reports-*/rank-[01].json"))) == 2
        assert not list(tmp_path.glob("here/.reports-*"))
        return verdict_of(attempt.ends("h0"), Signals(impatient=False))

    wanted = replace(submission(tmp_path / "here"), address=f"file://{there}")
    assert until_done(wanted, Signals(impatient=False), once) == 75
    assert not list(there.glob(".reports-*/*"))


def test_an_address_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [
        OSError("reset"),
        OSError("reset"),
        ended(0),
        OSError("gone"),
        OSError("gone"),
        OSError("gone"),
    ]

    def read_json(self: object, name: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("shoal.launch.launchers.reports.RunAddress.read_json", read_json)
    monkeypatch.setattr("shoal.launch.launchers.reports._PAUSE_SECONDS", 0.0)
    with pytest.raises(StorageError, match="gone"):
        RankStart(submission(tmp_path), 0, "memory://reports").ends("h0")
    assert not answers
