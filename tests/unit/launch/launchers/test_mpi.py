"""Rank 0's host is the first that mpirun's options name, and each mpirun has its own words."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shoal.errors import CommandError, LaunchError
from shoal.launch.launchers import mpi
from shoal.launch.launchers.base import Submission

SUBMISSION = Submission(("run", "job.py"), "job", Path("/runs/job"), Path("/home"), 4, "no-such-mpirun -x A")


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ([], None),
        (["--host", "a:2,b:2"], "a"),
        (["-H", "a,b"], "a"),
        (["--host=a,b"], "a"),
        (["-hosts", "b,a"], "b"),
        (["-n", "2"], None),
    ],
)
def test_the_first_host(options: list[str], first: str | None) -> None:
    assert mpi._first_host(options) == first


def test_the_first_host_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\n\na:2 slots=2\nb\n", encoding="utf-8")
    assert mpi._first_host(["-f", str(tmp_path / "hosts")]) == "a"
    with pytest.raises(CommandError, match="cannot be read"):
        mpi._first_host(["--hostfile", str(tmp_path / "gone")])


def test_each_has_its_own_words_and_signal() -> None:
    open_mpi, mpich = mpi._Mpirun("/o", True), mpi._Mpirun("/m", False)
    assert open_mpi.words(2, {"A": "1"}, ["-q"])[-3:] == ["-x", "A=1", "-q"]
    assert mpich.words(2, {"A": "1"}, ["-q"])[-4:] == ["-genv", "A", "1", "-q"]
    assert (open_mpi.stop, mpich.stop) == (signal.SIGUSR1, signal.SIGTERM)


def test_an_mpirun_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match="no-such-mpirun is not on this host"):
        mpi.render(SUBMISSION)


@pytest.mark.parametrize(("hosts", "found"), [(("b", "a"), "b"), (("a", "a"), None)])
def test_where_nobody_names_hosts_mpirun_is_asked(hosts: tuple[str, str], found: str | None, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f'#!/bin/sh\necho a greeting\necho "shoal: 1 {hosts[1]}"\necho "shoal: 0 {hosts[0]}"\n')
    mpirun.chmod(0o755)
    assert mpi._host_of_rank_0(mpi._Mpirun(str(mpirun), True), 2, []) == found
