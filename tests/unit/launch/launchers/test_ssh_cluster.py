"""Hosts describe themselves over ssh: the planner's cluster has the least of what all of them have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import HardwareError, LaunchError
from shoal.hardware import cluster
from shoal.hardware.values import Cluster, to_table
from shoal.launch.launchers.ssh_cluster import ask_hosts
from shoal.runs.version import __version__

FAKE = """#!/bin/sh
for word; do [ "$before" = -- ] && host=$word; before=$word; done
echo Welcome
[ -f {folder}/$host ] && exec cat {folder}/$host
echo "ssh: Could not resolve hostname $host" >&2; exit 255
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the answer of each host."""
    (tmp_path / "ssh").write_text(FAKE.format(folder=tmp_path), encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def add(folder: Path, host: str, one: Cluster, gigabits: float | None, version: str = __version__) -> None:
    (folder / host).write_text(json.dumps([version, to_table(one), gigabits]) + "\n", encoding="utf-8")


def test_the_least_of_all_hosts(folder: Path) -> None:
    large, small = cluster("1x8xH100"), cluster("1x4xH100")
    small = replace(small, device=replace(small.device, memory_bytes=70 << 30))
    add(folder, "a", large, 100.0)
    add(folder, "b", small, 25.0)
    found = ask_hosts("a,b:2 -p 22")
    assert found.hosts == ("a", "b")
    both = found.cluster
    assert (both.num_hosts, both.devices_per_host, both.device.memory_bytes) == (2, 2, 70 << 30)
    assert both.within == large.within
    assert both.between is not None
    assert both.between.name == "25 Gbit/s"
    assert found.for_devices(4) == "hosts:a:2,b:2 -p 22"
    assert found.for_devices(1) == "hosts:a:1 -p 22"


def test_a_network_of_unknown_speed_is_the_catalogues(folder: Path) -> None:
    for host in "ab":
        add(folder, host, cluster("2xcpu"), None)
    both = ask_hosts("a,b").cluster
    assert both.between == cluster("2xcpu").between
    assert any("does not say how fast its network is" in note for note in both.notes)
    assert both.device_for(1) == cluster("2xcpu").device_for(1)


def test_hosts_that_cannot_be_planned_for(folder: Path) -> None:
    add(folder, "a", cluster("8xH100"), None)
    add(folder, "other", cluster("2xcpu"), None)
    add(folder, "old", cluster("8xH100"), None, version="0.0")
    (folder / "older").write_text('["0.0", {"written": "otherwise"}, null]\n', encoding="utf-8")
    with pytest.raises(LaunchError, match=r"it has shoal 0\.0"):
        ask_hosts("a,older")
    with pytest.raises(HardwareError, match="other: 2 cpu"):
        ask_hosts("a,other")
    with pytest.raises(LaunchError, match=r"it has shoal 0\.0"):
        ask_hosts("a,old")
    with pytest.raises(LaunchError, match="Could not resolve hostname gone") as caught:
        ask_hosts("a,gone,old,lost")
    assert all(host in caught.value.conflict for host in ("gone", "old", "lost"))
