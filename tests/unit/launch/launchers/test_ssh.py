"""Hosts are named in a list or a file, and the ranks are divided among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import CommandError
from shoal.launch.launchers import ssh
from shoal.launch.launchers.base import Submission

SUBMISSION = Submission(("run", "job.py"), "job", Path("/runs/job"), Path("/home"), 4)


def counts(options: str, devices: int = 4) -> list[int]:
    submission = replace(SUBMISSION, options=options, num_processes=devices)
    return ssh._counts(ssh._given(submission)[0], submission)


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [("a,b", 4, [2, 2]), ("a,b", 3, [2, 1]), ("a:3,b", 4, [3, 1]), ("a:1,b:3", 4, [1, 3]), ("a", 4, [4])],
)
def test_ranks_of_each_host(options: str, devices: int, expected: list[int]) -> None:
    assert counts(options, devices) == expected


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\nb:1 # slow\n\nc\n", encoding="utf-8")
    assert counts(str(path)) == [2, 1, 1]


@pytest.mark.parametrize(
    ("options", "devices", "said"),
    [
        ("", 2, "names no hosts"),
        ("-F x", 2, "names no hosts"),
        ("a,a", 2, "a is named twice"),
        ("a:x", 2, "is no host"),
        ("a,b", 1, "each host has at least one"),
        ("a:1,b:1", 4, "the hosts have 2 places"),
        ("a:4,b:4", 4, "the hosts have 8 places"),
    ],
)
def test_what_is_refused(options: str, devices: int, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        counts(options, devices)


def test_a_name_is_never_taken_for_an_option() -> None:
    words = ssh._ssh("gpu1", ["-p", "2222"])
    assert words[words.index("--") + 1] == "gpu1"
    with pytest.raises(CommandError, match="is no host"):
        counts("a,-oProxyCommand=x")


def test_a_dry_run_shows_ranks_and_hosts() -> None:
    lines = ssh.render(replace(SUBMISSION, options="a,b -p 2222"))["hosts"].splitlines()
    assert [line.rpartition("# ")[2] for line in lines] == ["ranks 0 to 1", "ranks 2 to 3"]
    assert all("-p 2222" in line for line in lines)
