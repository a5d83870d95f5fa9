"""Clusters of several kinds of devices, by name and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import HardwareError
from shoal.hardware import cluster, dump, load


def test_kinds_by_name_have_hosts_of_their_own_and_the_slowest_network(tmp_path: Path) -> None:
    found = cluster("4xA100-80@200Gb+2x8xV100-32@50Gb")
    assert [kind.num_devices for kind in found.kinds] == [4, 16]
    assert (found.num_devices, found.num_hosts) == (20, 3)
    assert found.between is not None
    assert found.between.name == "50 Gbit/s"
    (tmp_path / "both.toml").write_text(dump(found))
    assert load(tmp_path / "both.toml") == found


def test_a_file_may_put_kinds_into_one_host(tmp_path: Path) -> None:
    file = tmp_path / "desk.toml"
    file.write_text('[within]\nlike = "PCIe4"\n[[kinds]]\ndevice = "RTX-4090"\n[[kinds]]\ndevice = "RTX-3090"\n')
    found = cluster(str(file))
    assert (found.num_hosts, found.devices_per_host, found.between) == (1, 2, None)
    assert found.within is not None
    (tmp_path / "again.toml").write_text(dump(found))
    assert load(tmp_path / "again.toml").within == found.within


@pytest.mark.parametrize(
    ("text", "conflict"),
    [
        ("4xA100-80+", "a kind of devices is missing"),
        ("4xA100-80+2xcpu", "GPUs and others cores of CPUs"),
        ("4xA100-80+2xFOO", "no device of that name"),
        ("4xA100-80+0xV100", "it has no device"),
    ],
)
def test_what_is_no_cluster_is_refused(text: str, conflict: str) -> None:
    with pytest.raises(HardwareError, match=conflict):
        cluster(text)


@pytest.mark.parametrize(
    ("text", "conflict"),
    [
        ('[[kinds]]\ndevice = "T4"\n', "two or more tables"),
        ('num_hosts = 2\n[[kinds]]\ndevice = "T4"\n[[kinds]]\ndevice = "A100-80-SXM"\n', "two or more tables"),
        ('[[kinds]]\ndevice = "T4"\n[[kinds]]\ndevice = "A100-80-SXM"\n', "network of the hosts with T4 is unknown"),
        ('[[kinds]]\ndevice = "T4"\nhosts = 2\n[[kinds]]\ndevice = "T4"\n', "hosts is unknown"),
    ],
)
def test_a_file_of_kinds_is_checked(text: str, conflict: str, tmp_path: Path) -> None:
    file = tmp_path / "kinds.toml"
    file.write_text(text)
    with pytest.raises(HardwareError, match=conflict):
        load(file)
