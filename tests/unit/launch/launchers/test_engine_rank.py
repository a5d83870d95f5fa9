"""Ranks below an engine's workers: their environments from the nodes, their ends, and the verdict of all."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.launchers import engine_rank
from shoal.launch.launchers.engine_rank import EngineRank, RankCommand, RankEnd, RankLook, environments
from shoal.launch.signals import Signals
from shoal.launch.supervise.recovery import verdict


def test_ranks_are_numbered_by_node() -> None:
    found = environments("ray", ["a", "b", "a"], ("a", 5), own_gpu=True)
    assert [(e.rank, e.local_rank, e.local_world_size, e.host, e.num_hosts) for e in found] == [
        (0, 0, 2, 0, 2),
        (1, 0, 1, 1, 2),
        (2, 1, 2, 0, 2),
    ]
    assert {(e.address, e.port, e.world_size, e.own_gpu, e.engine) for e in found} == {("a", 5, 3, True, "ray")}


def report(kind: str | None, code: int) -> dict[str, Any]:
    error = {"kind": kind, "given": "g", "conflict": "c", "remedy": "r", "rank": 1, "host": "h"}
    return {"exit_code": code, "error": error if kind else None}


def end(rank: int, code: int, kind: str | None = None, *, silent: bool = False, **more: Any) -> RankEnd:
    return RankEnd(rank, "h", RankLook("", code, None if silent else report(kind, code), "\nlast line"), **more)


@pytest.mark.parametrize(
    ("ends", "stopped", "code", "says"),
    [
        ([end(0, 0), end(1, 0)], False, 0, None),
        ([end(0, 75), end(1, 75)], True, 75, None),
        ([end(0, 69, "PeerError"), end(1, 65, "NonFiniteError")], False, 65, "c"),
        (
            [end(0, 69, "PeerError"), end(1, -9, silent=True)],
            False,
            69,
            "was killed by SIGKILL without a word\nlast line",
        ),
        ([end(0, -9, silent=True, given_up=True), end(1, 3, silent=True)], False, 69, "ended with code 3"),
        ([RankEnd(0, "h", gone="was lost with its actor")], False, 69, "was lost with its actor"),
        ([end(0, 69, "PeerError")], False, 69, "c"),
        ([end(0, -15, silent=True)], True, 130, None),
    ],
    ids=["done", "stopped", "an error", "killed", "who failed first", "gone", "of others", "before it began"],
)
def test_the_verdict(ends: list[RankEnd], stopped: bool, code: int, says: str | None) -> None:
    found, error = verdict(
        [one.ended() for one in ends], Signals(impatient=False, received=[signal.SIGTERM] if stopped else [])
    )
    assert found == code
    assert (error is None) == (says is None)
    assert says is None or says in str(error)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[EngineRank]:
    """A rank whose `python -m shoal` is a script of the test."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "rank $RANK at $PWD: $4"\n[ "$4" = stay ] && exec sleep 60\nexit 3\n')
    script.chmod(0o755)
    monkeypatch.setattr(engine_rank.sys, "executable", str(script))
    found = EngineRank()
    yield found
    found.close()


def test_a_rank_is_shown_and_its_log_kept(rank: EngineRank, tmp_path: Path) -> None:
    rank.start(RankCommand(("run", "job.py"), str(tmp_path), {"RANK": "1"}, str(tmp_path / "logs")))
    look = rank.look(10)
    while look.code is None:
        look = rank.look(10)
    assert look.code == 3
    assert look.report is None
    assert (tmp_path / "logs" / "rank-1.txt").read_text() == f"rank 1 at {tmp_path}: job.py\n"
    assert look.text == ""
    assert look.last == f"\nrank 1 at {tmp_path}: job.py"


def test_a_signal_reaches_it(rank: EngineRank, tmp_path: Path) -> None:
    rank.start(RankCommand(("run", "stay"), str(tmp_path / "not here"), {"RANK": "0"}))
    text = ""
    while not text:
        text = rank.look(0.05).text
    rank.tell(signal.SIGTERM)
    assert rank.look(10).code == -signal.SIGTERM


def test_of_much_output_the_end_is_kept(monkeypatch: pytest.MonkeyPatch, rank: EngineRank, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_rank, "_KEPT_CHARACTERS", 8)
    rank.start(RankCommand(("run", "job.py"), str(tmp_path), {"RANK": "0"}))
    text, code = "", None
    while code is None:
        look = rank.look(0.01)
        text, code = text + look.text, look.code
    assert text == f"rank 0 at {tmp_path}: job.py\n"  # nothing is dropped before it was shown
    quiet = EngineRank()
    quiet.start(RankCommand(("run", "job.py"), str(tmp_path), {"RANK": "1"}, str(tmp_path / "logs")))
    while quiet.look(1).code is None:
        pass
    quiet.close()
    assert (tmp_path / "logs" / "rank-1.txt").read_text() == "job.py\n".rjust(8)
