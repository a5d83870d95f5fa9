"""What one start of a run's ranks hands to the next."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.options import RunOptions
from shoal.cli.run import start
from shoal.errors import ExitCode
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import rank_lost
from shoal.launch.supervise.ranks import LaunchEnd, LocalRun

JOB = "def job():\n    raise NotImplementedError\n"


class NoServer:
    def __init__(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def test_a_later_start_knows_the_alarms_of_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    options = RunOptions(job=str(tmp_path / "job.py"), out=str(tmp_path / "run"), devices=2)
    known: list[dict[str, float]] = []

    def launched(run: LocalRun, *_: Any) -> LaunchEnd:
        known.append(dict(run.excused))
        run.excused["forward"] = 10.0
        error = rank_lost("rank 1", "it was killed by SIGKILL", host="h", rank=1) if len(known) == 1 else None
        return LaunchEnd(int(ExitCode.RANK_LOST if error else ExitCode.DONE), error, time.monotonic())

    monkeypatch.setattr(start, "launch", launched)
    monkeypatch.setattr(start, "ForkServer", NoServer)
    with start.claimed(start.requested(options)) as (request, lock):
        assert start.trained(request, lock, Signals(impatient=False)).code == ExitCode.DONE
    assert known == [{}, {"forward": 10.0}]
