"""The collective that the job's own code is in is known by torch's files, not by a folder's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shoal
from shoal.launch.supervise.heartbeat import own_call

TORCH, SHOAL = Path(torch.__file__).parent, Path(shoal.__file__).parent


def stack(caller: str) -> str:
    """faulthandler's text of a thread in an all-reduce that this file calls."""
    frames = (
        (TORCH / "distributed" / "distributed_c10d.py", 2800, "all_reduce"),
        (TORCH / "distributed" / "c10d_logger.py", 80, "wrapper"),
        (caller, 7, "loss"),
    )
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join(["Current thread 0x1 (most recent call first):", *lines])


@pytest.mark.parametrize("file", ["/jobs/job.py", "/jobs/torch/job.py", f"{SHOAL}_jobs/job.py"])
def test_the_callers_folder_may_have_any_name(file: str) -> None:
    assert own_call(stack(file)) == f"all_reduce at {file}:7 in loss"


def test_a_call_of_the_packages_is_none_of_the_jobs() -> None:
    assert own_call(stack(str(SHOAL / "distributed" / "mesh.py"))) is None
