"""The tests mean the same wherever they are started: in a script's background, from a clone called shoal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launching import ROOT

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]

LEAVING, SESSION = "tests/unit/training/session/test_session_leaving.py", "tests/ranks/test_session.py"
CTRL_C = (
    f"{LEAVING}::test_ctrl_c_and_a_break_in_the_same_step",
    f"{LEAVING}::test_ctrl_c_in_a_step_that_evaluates",
    f"{SESSION}::test_asked_to_stop[2]",
    f"{SESSION}::test_one_rank_that_is_asked_to_stop_in_the_last_step[break]",
    "tests/python/test_run.py::test_a_second_interrupt_ends_at_once",
    "tests/faults/test_preempted.py::test_asked_twice_it_stops_at_once[2]",
    "tests/faults/test_output.py::test_an_interrupt_at_a_terminal",
)
WHOLE = "test_ranks_with_the_whole_model_read_late_what_they_would_have_read_at_once"
PARTS = "test_ranks_with_parts_of_a_model_read_late_what_they_would_have_read_at_once"
LATE_READS = (
    "tests/unit/training/loop/test_late_reads.py::test_no_read_in_a_steady_step[batch statistics, dropout, AdamW]",
    f"tests/ranks/test_late_reads.py::{WHOLE}[{{'shard': 2}}]",
    f"tests/ranks/test_late_reads.py::{PARTS}[tensor]",
)


def test_ctrl_c_and_late_reads_where_sigint_is_ignored_and_the_environment_lies_in_shoal(tmp_path: Path) -> None:
    environment = tmp_path / "shoal" / ".venv"
    environment.parent.mkdir()
    environment.symlink_to(sys.prefix)
    ignoring = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    pytest_ = (str(environment / "bin" / "python"), "-m", "pytest", "-q", f"--basetemp={tmp_path / 'inner'}")
    done = subprocess.run(
        [*ignoring, *pytest_, "-p", "no:cacheprovider", *LATE_READS, *CTRL_C],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
