"""Wrong set-ups on several hosts: each is named in one message, with its host, within the limit of a rendezvous."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engines import namespaces, slurm_cluster, sshd
from tests.engines.choice import needs
from tests.engines.namespaces import Hosts
from tests.engines.sshd import SshHosts
from tests.engines.wrong_table import note
from tests.launching import JOBS, unlaunched

# By then a process has ended by itself, with its message.
LIMIT_SECONDS = 60.0
JOB = str(JOBS / "tiny.py")
HOSTS = needs("hosts", namespaces.unavailable)
SSH = needs("ssh", sshd.unavailable)
SLURM = needs("slurm", slurm_cluster.unavailable)


def marked(marks: list[pytest.MarkDecorator]) -> Any:
    """A decorator with all the marks."""

    def mark(test: Any) -> Any:
        for one in marks:
            test = one(test)
        return test

    return mark


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with namespaces.made("h1", "h2") as found:
        yield found


@pytest.fixture(scope="module")
def ssh_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with sshd.started(tmp_path_factory.mktemp("ssh"), "h1", "h2") as found:
        yield found


def by_hand(
    name: str, hosts: Hosts, out: Path, words: Sequence[Sequence[str]], changes: Sequence[dict[str, str]]
) -> str:
    """A rank on each host, as torchrun would start it, with other words and variables: all that was said."""
    began, processes, paths = time.monotonic(), [], []
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "29517", "PYTHONPATH": str(JOBS)}
    with contextlib.ExitStack() as opened:
        for rank, change in enumerate(changes):
            variables = {**unlaunched(os.environ), **shared, "RANK": str(rank), **change}
            paths.append(out.with_name(f"said-{rank}"))
            file = opened.enter_context(paths[-1].open("wb"))
            command = hosts[rank].command([sys.executable, *words[rank], "--devices", "2", "--out", str(out)])
            processes.append(subprocess.Popen(command, env=variables, stdout=file, stderr=file))
        try:
            codes = [process.wait(max(0.0, began + LIMIT_SECONDS - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    said = "".join(path.read_text(errors="replace") for path in paths)
    assert all(codes), said
    note(name, began, said)
    return said


RUN = ("-m", "shoal", "run", JOB)
# shoal of another version.
OTHER = ("-c", "import shoal.runs.version as v; v.__version__ = '9.9'; from shoal.cli.main import main; exit(main())")

# A clock that is an hour ahead.
AHEAD = "import time; real = time.time; time.time = lambda: real() + 3600.0; "

TWO = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
WRONG: dict[str, tuple[list[dict[str, str]], str]] = {
    "wrong interface": ([{}, {"GLOO_SOCKET_IFNAME": "ib7"}], r"h2 has no network interface ib7"),
    "closed port": ([{}, {"MASTER_PORT": "29518"}], r"h1:29518"),
    "two of one rank": ([{}, {"RANK": "0", "MASTER_ADDR": "h1"}], r"h1|rank 0"),
    "another size": ([{}, {"WORLD_SIZE": "3"}], r"WORLD_SIZE=3"),
    "loopback": (
        [{"MASTER_ADDR": "127.0.1.1", **TWO}, TWO],
        r"on h1, where rank 0 is, that is 127\.0\.1\.1, which no other",
    ),
    "two environments": (
        [{}, {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}],
        r"RANK=1, WORLD_SIZE=2 \(torchrun\) and PMI_RANK=0, PMI_SIZE=2",
    ),
}


@marked(HOSTS)
@pytest.mark.parametrize("name", WRONG)
def test_a_rank_with_wrong_variables(name: str, hosts: Hosts, tmp_path: Path) -> None:
    changes, expected = WRONG[name]
    said = by_hand(name, hosts, tmp_path / "run", [RUN, RUN], changes)
    assert re.search(expected, said), said


@marked(HOSTS)
def test_a_rank_that_is_missing(hosts: Hosts, tmp_path: Path) -> None:
    said = by_hand("missing rank", hosts, tmp_path / "run", [RUN], [{}])
    assert "rank 1 of 2 did not come within 45 s; here are rank 0 (process" in said
    assert "on h1" in said


@marked(HOSTS)
def test_another_version(hosts: Hosts, tmp_path: Path) -> None:
    other = (OTHER[0], OTHER[1], "run", JOB)
    said = by_hand("another version", hosts, tmp_path / "run", [RUN, other], [{}, {}])
    assert re.search(r"rank 1 on h2: .*9\.9", said), said


@marked(HOSTS)
def test_a_skewed_clock_and_another_version(hosts: Hosts, tmp_path: Path) -> None:
    """All that differs is in one message."""
    other = ("-c", AHEAD + OTHER[1], "run", JOB)
    said = by_hand("skewed clock", hosts, tmp_path / "run", [RUN, other], [{}, {}])
    assert "rank 1 on h2: shoal = 9.9" in said
    assert re.search(r"rank 1 on h2: its clock is 3[56]\d\d s ahead of rank 0's", said), said


@marked(HOSTS)
def test_another_job_file(hosts: Hosts, tmp_path: Path) -> None:
    changed = tmp_path / "tiny.py"
    changed.write_text(Path(JOB).read_text(encoding="utf-8").replace("lr=lr, momentum=0.9", "lr=lr, momentum=0.8"))
    other = ("-m", "shoal", "run", str(changed))
    said = by_hand("another job file", hosts, tmp_path / "run", [RUN, other], [{}, {}])
    assert "rank 1 on h2" in said, said


def over_ssh(name: str, hosts: SshHosts, out: Path, on: str = "h1,h2") -> str:
    command = [sys.executable, "-m", "shoal", "run", JOB, "--devices", "2", "--out", str(out)]
    variables = {**unlaunched(os.environ), "PYTHONPATH": str(JOBS)}
    command += ["--on", f"hosts:{on} -F {hosts.config}"]
    began = time.monotonic()
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ended.returncode != 0, ended.stdout
    assert ended.stderr.count("you gave:") == 1, ended.stderr
    note(name, began, ended.stderr)
    return ended.stderr


@marked(SSH)
def test_a_host_that_nobody_knows(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    assert "host nowhere.invalid" in over_ssh("unknown host", ssh_hosts, tmp_path / "run", "h1,nowhere.invalid")


@marked(SSH)
def test_a_port_that_is_closed(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    closed = ssh_hosts.config.with_name("closed")
    text = ssh_hosts.config.read_text(encoding="utf-8").replace("Host h2\n", "Host h2\n    Port 9\n")
    closed.write_text(text, encoding="utf-8")
    said = over_ssh("closed port of ssh", SshHosts(ssh_hosts.hosts, closed), tmp_path / "run")
    assert "host h2" in said
    assert "refused" in said.split("error:")[-1]


@marked(SSH)
def test_a_host_without_the_file_system(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    with sshd.started(tmp_path_factory.mktemp("apart"), "h1", "h2", hides={"h2": tmp_path}) as found:
        said = over_ssh("a host without the file system", found, tmp_path / "run")
    assert f"error on rank 1 (h2): LaunchError: it has no folder {tmp_path / 'run'}" in said, said


@marked(SLURM)
def test_no_munge(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    with slurm_cluster.started(tmp_path_factory.mktemp("slurm"), "n1") as slurm:
        (slurm.folder / "munge.socket").unlink()
        command = [sys.executable, "-m", "shoal", "run", JOB, "--out", str(tmp_path / "run"), "--on", "slurm"]
        began = time.monotonic()
        ended = subprocess.run(command, env=slurm.variables, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ended.returncode == 2
    assert "start munged on this host" in ended.stderr, ended.stderr
    note("no munge", began, ended.stderr)
