"""Limits of a process and files that are none: the first line of the error says which."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from tests.launching import JOBS, Run, run, start, start_command

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:mlp"
WITH_LIMIT = (
    "import resource, runpy, sys; resource.setrlimit(resource.{0}, ({1}, {1})); "
    "sys.argv[0] = 'shoal'; runpy.run_module('shoal', run_name='__main__')"
)


def test_too_few_descriptors(tmp_path: Path) -> None:
    launcher = ("-c", WITH_LIMIT.format("RLIMIT_NOFILE", 28))
    ended = run(Run(JOB, tmp_path / "run", 2, launcher=launcher, fresh=True)).fails(2)
    assert ended.message.given == "2 processes that may open 28 files each"
    assert not (tmp_path / "run").exists()


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    launcher = ("-c", WITH_LIMIT.format("RLIMIT_FSIZE", 512))
    ended = run(Run(JOB, tmp_path / "run", 1, launcher=launcher, fresh=True))
    assert ended.fails(73).message.conflict.startswith("it is larger than this process may write")


def test_a_pipe_as_job_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.py")
    ended = run(Run(tmp_path / "job.py", tmp_path / "run", 1)).fails(2)
    assert ended.message.conflict == "it is no regular file"


def test_a_plan_from_a_process_substitution(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[layout]\ndata = 2\n")
    (tmp_path / "wrong.toml").write_text("[layout]\ndata = 0\n")
    for name, code in (("plan", 0), ("wrong", 2)):
        wanted = Run(JOB, tmp_path / name, None)
        command = ["bash", "-c", f'"$@" --plan <(cat {tmp_path / name}.toml)', "bash", *wanted.command]
        with start_command(command, wanted.out, fresh=True) as started:
            ended = started.wait().expect(code)
    assert "/dev/fd/" in ended.stderr
    assert "pipe:[" not in ended.stderr


@pytest.mark.slow
def test_nobody_at_the_address(tmp_path: Path) -> None:
    """Only lines of shoal are printed while a rank waits; torch's own attempts print 40 lines each."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed.getsockname()[1])}
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        with start(Run(JOB, tmp_path / "run", None, environment={**address, **ranks})) as started:
            started.until(lambda: "10 s of 45 s" in started.output, "its second line")
            lines = started.output.splitlines()
            started.send(signal.SIGKILL)
    assert all(line.startswith(("waiting for rank 0's store at", "shoal ", "  ")) for line in lines), lines
