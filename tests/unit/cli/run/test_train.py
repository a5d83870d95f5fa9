"""What a rank does before there is anything of the job in it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from shoal.cli.run import train
from shoal.errors import ExitCode
from shoal.jobs.job_file import JobRequest
from shoal.launch.signals import Signals
from shoal.plans import Plan
from shoal.runs.options import Course
from shoal.runs.request import RunRequest, What, Where


def test_a_request_to_stop_while_jobs_are_compared_is_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an error of the job's, as a sys.exit() of its would be."""

    def stopped(work: object) -> NoReturn:
        raise SystemExit(ExitCode.INTERRUPTED)

    monkeypatch.setattr(train, "in_child", stopped)
    (tmp_path / "job.json").write_text(json.dumps({"given": {"epochs": "2"}}))
    what = What(JobRequest(tmp_path / "own.py"), Plan())
    request = RunRequest(what, Where(tmp_path), Course(resume=True), 0.0)
    signals = Signals(impatient=False)
    with signals.handled():
        assert train._compared(request) is None
    assert signals.received == [signal.SIGTERM]
