"""A number of devices between two limits becomes what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cli.options import RunOptions
from shoal.cli.run import start
from shoal.cli.run.start import with_number
from shoal.errors import CommandError, LaunchError
from shoal.launch.environment import Environment
from shoal.launch.launchers import slurm
from shoal.launch.launchers.base import Submission


def options(devices: Any, **more: Any) -> RunOptions:
    return RunOptions(job="job.py", devices=devices, **more)


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        ("4:2", {}, "the first is the least number"),
        ("0:2", {}, "the first is the least number"),
        ("2:", {}, "a whole number of at least 1"),
        ("2:4", {"plan": "plan.toml"}, "a plan is for one number of devices"),
        ("2:4", {"on": "mpi"}, "mpi is asked for one number"),
    ],
)
def test_what_is_refused(given: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        with_number(options(given, **more), None)


def test_a_number_stays_one() -> None:
    assert [with_number(options(given), None).devices for given in ("3", 3, None)] == [3, 3, None]


def test_an_engine_has_its_own_choice() -> None:
    started = Environment(world_size=3, engine="slurm")
    assert with_number(options("2:4"), started).devices == 3
    with pytest.raises(LaunchError, match="3 processes by slurm"):
        with_number(options("4:8"), started)


def test_too_few_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "visible_gpus", lambda: 0)
    monkeypatch.setattr(start, "cores", lambda: 2)
    with pytest.raises(LaunchError, match="this host has 2 cores"):
        with_number(options("4:8"), None)
    assert with_number(options("1:8", resume=True), None).devices == 2


def test_an_engine_with_less_room_starts_fewer() -> None:
    asked = Submission(("run", "job.py"), "job", Path("/runs/job"), Path("/home"), 8, least_processes=4)
    assert [asked.with_what_is_there(n).num_processes for n in (1, 6, 100)] == [4, 6, 8]
    assert Submission(("run",), "job", Path("/r"), Path("/h"), 8).with_what_is_there(2).num_processes == 8


def test_slurm_is_asked_for_a_range_of_nodes() -> None:
    words = ("run", "job.py", "--out", "/runs/job")
    asked = Submission(words, "job", Path("/runs/job"), Path("/home"), 8, "--ntasks-per-node=3", least_processes=4)
    script = slurm.render(asked)[slurm.SCRIPT]
    assert "#SBATCH --nodes=2-2\n" in script
    assert "--ntasks=" not in script
    for wrong in ("", "--ntasks-per-node=16"):
        with pytest.raises(CommandError, match=r"whole nodes|nothing says how many ranks"):
            slurm.render(Submission(words, "job", Path("/runs/job"), Path("/home"), 8, wrong, least_processes=4))
