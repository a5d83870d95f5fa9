"""Hosts are named in a list or a file, and the ranks are divided among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import CommandError, LaunchError, RankLostError
from shoal.launch.environment import Environment
from shoal.launch.launchers import ssh
from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.ssh import HostList

SUBMISSION = Submission(("run", "job.py"), "job", Path("/runs/job"), Path("/home"), 4)


def counts(options: str, devices: int = 4) -> list[int]:
    submission = replace(SUBMISSION, options=options, num_processes=devices)
    return list(HostList.of(submission).hosts.values())


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
        ("a:x", 2, "is not a host"),
        ("a,b", 1, "each host has at least one"),
        ("a:1,b:1", 4, "the hosts take 2 processes"),
        ("a:4,b:4", 4, "the hosts take 8 processes"),
    ],
)
def test_what_is_refused(options: str, devices: int, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        counts(options, devices)


def test_a_name_is_never_taken_for_an_option() -> None:
    words = HostList({}, ["-p", "2222"]).words("gpu1")
    assert words[words.index("--") + 1] == "gpu1"
    with pytest.raises(CommandError, match="is not a host"):
        counts("a,-oProxyCommand=x")


def test_a_dry_run_shows_ranks_and_hosts() -> None:
    lines = ssh.render(replace(SUBMISSION, options="a,b -p 2222"))["hosts"].splitlines()
    assert [line.rpartition("# ")[2] for line in lines] == ["ranks 0 to 1", "ranks 2 to 3"]
    assert all("-p 2222" in line for line in lines)


def test_what_several_hosts_lack_is_one_message() -> None:
    errors = [
        LaunchError(given=f"host h{n}", conflict=f"it has no folder /{n}", remedy="give all the same") for n in (1, 2)
    ]
    said = str(ssh.together(errors))
    assert "host h1: it has no folder /1\nhost h2: it has no folder /2" in said
    assert said.count("give all the same") == 1


def test_what_is_of_this_host_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING", "AWS_PROFILE"):
        monkeypatch.setenv(name, "1")
    handed_on = ssh._message(SUBMISSION, Environment())["variables"]
    assert {n for n in handed_on if n.startswith(("CUDA", "GLOO", "AWS"))} == {"CUDA_LAUNCH_BLOCKING"}
    at_address = replace(SUBMISSION, address="s3://bucket/run")
    assert "AWS_PROFILE" in ssh._message(at_address, Environment())["variables"]


# As ssh ends: where nobody is there, where a key is refused, and where nothing comes at all.
FAKE = """#!/bin/sh
case "$*" in
*" gone true") echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255;;
*" shut true") echo "me@shut: Permission denied (publickey)." >&2; exit 255;;
*" mute true") exec sleep 60;;
esac
"""


def test_who_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(FAKE, encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("shoal.launch.launchers.ssh._ASK_SECONDS", 1.0)
    found = HostList({}, []).silent_among(["there", "gone", "shut", "mute"])
    assert found == {"gone": "ssh: connect to host gone port 22: No route to host", "mute": "no answer within 1 s"}


def test_hosts_that_do_not_answer_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"a", "b", "c"}
    monkeypatch.setattr(HostList, "silent_among", lambda self, names: dict.fromkeys(set(names) - there, "no route"))
    listed = HostList(dict.fromkeys("abc", 2), [], least=4)

    def names() -> str:
        return "".join(listed.for_a_start())

    assert names() == "abc"
    listed.silent = {"b": "no route"}
    assert names() == "ac", "it is not asked again at once"
    assert names() == "abc", "it is back"
    there.remove("a")
    assert names() == "bc"
    there.remove("c")
    assert names() == "abc", "fewer than will do: all are tried"
    assert set(listed.lost) == {"a", "c"}
    of_all = HostList(listed.hosts, [], None)
    assert of_all.for_a_start() == listed.hosts


def test_a_host_that_is_gone_at_a_later_start_is_waited_for(tmp_path: Path) -> None:
    words = ["sh", "-c", "echo 'ssh: connect to host h: No route to host' >&2; exit 255"]
    for again, kind in ((False, LaunchError), (True, RankLostError)):
        process = ssh.HostProcess(words, "h", {}, again=again)
        process.ssh.finish(5.0)
        assert type(process.error()) is kind
