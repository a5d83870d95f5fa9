"""Clusters by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shoal.errors import HardwareError
from shoal.hardware import cluster
from shoal.hardware.values import MEMORY_MARGIN


@pytest.mark.parametrize(
    ("name", "device", "hosts", "per_host"),
    [
        ("H100", "H100-SXM-80", 1, 1),
        ("8xH100", "H100-SXM-80", 1, 8),
        ("64xH100-SXM", "H100-SXM-80", 8, 8),
        ("12xh100", "H100-SXM-80", 2, 6),
        ("4x8xA100-80-SXM", "A100-80-SXM", 4, 8),
        ("2x2xA100-40", "A100-40-SXM", 2, 2),
        ("2xDGX-1", "V100-SXM2-16", 2, 8),
        ("p5", "H100-SXM-80", 1, 8),
        ("3x4xp5.48xlarge", "H100-SXM-80", 3, 4),
        ("2x3090", "RTX-3090", 1, 2),
        ("144xGB200", "GB200", 2, 72),
        ("6xcpu", "cpu", 1, 6),
        ("4xworkstation", "RTX-2080-Ti", 4, 4),
    ],
)
def test_names(name: str, device: str, hosts: int, per_host: int) -> None:
    found = cluster(name)
    assert (found.device.name, found.num_hosts, found.devices_per_host) == (device, hosts, per_host)
    assert found.name == name
    assert found.num_devices == hosts * per_host
    assert per_host == 1 or found.within is not None
    assert hosts == 1 or found.between is not None


def test_the_ports_of_a_host_add_up() -> None:
    found = cluster("2xDGX-A100")
    one = cluster("2xDGX-A100@HDR")
    assert found.between is not None
    assert one.between is not None
    assert math.isclose(found.between.bytes_per_second, 8 * one.between.bytes_per_second)


def test_other_links() -> None:
    bridged = cluster("8xA100@pcie4@2x100GbE")
    assert bridged.within is not None
    assert bridged.between is not None
    assert bridged.within.name == "PCIe4"
    assert bridged.between.name == "2xEthernet-100"
    given = cluster("16xH100@8x400Gb").between
    assert given is not None
    assert math.isclose(given.bytes_per_second, 8 * 50e9 * 0.9)


def test_fewer_processes_get_more_cores() -> None:
    found = cluster("4xcpu")
    assert sorted(found.alternatives) == [1, 2, 3]
    one, four = found.device_for(1), found.device_for(4)
    assert math.isclose(one.flops["float32"], 4 * four.flops["float32"])
    assert math.isclose(found.device_for(2).flops["float32"], 2 * four.flops["float32"])
    assert math.isclose(found.device_for(3).flops["float32"], four.flops["float32"])
    assert math.isclose(3 * found.device_for(3).memory_bytes_per_second, 4 * four.memory_bytes_per_second)
    # Four threads reach on four times the work what one reaches.
    assert math.isclose(one.matmul["float32"].at(4e7), four.matmul["float32"].at(1e7))


@pytest.mark.parametrize(
    ("name", "conflict", "remedy"),
    [
        ("8xH10", "did you mean 'H100'", "8xH100"),
        ("11xH100", "no whole number of hosts", "1x11xH100-SXM-80"),
        ("8xH100@nvlink44", "did you mean 'NVLink4'", "ending in .toml"),
        ("0xH100", "it has no device", "8xH100"),
        ("2x00xH100", "it has no device", "8xH100"),
        ("", "no cluster of that name", "8xH100"),
        ("nowhere.toml", "cannot be read", "8xH100"),
    ],
)
def test_what_is_unknown_is_refused(name: str, conflict: str, remedy: str) -> None:
    with pytest.raises(HardwareError) as caught:
        cluster(name)
    assert conflict in caught.value.conflict
    assert remedy in caught.value.remedy


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('device = "A100"\ndevices_per_host = 4\nwithin = "NVLink3"\n')
    found = cluster(str(path))
    assert (found.name, found.device.name, found.devices_per_host) == ("mine", "A100-80-SXM", 4)


def test_part_of_a_host_has_the_ports_of_its_devices() -> None:
    whole, half = cluster("4x72xGB200").between, cluster("4x36xGB200").between
    assert whole is not None
    assert half is not None
    assert half.bytes_per_second == pytest.approx(whole.bytes_per_second / 2)


def test_trays_of_a_domain_are_joined_by_nvlink() -> None:
    trays = cluster("16xGB200-tray")
    assert (trays.num_devices, trays.devices_per_host) == (64, 4)
    assert trays.within is not None
    assert trays.between is not None
    assert trays.between.bytes_per_second == 4 * trays.within.bytes_per_second


def test_a_memory_margin_is_set_by_name() -> None:
    assert cluster("8xH100@margin=2.5%").memory_margin == pytest.approx(0.025)
    assert cluster("8xH100").memory_margin == MEMORY_MARGIN
    with pytest.raises(HardwareError, match="leaves no memory"):
        cluster("8xH100@margin=100%")


def test_what_is_guessed_of_a_device_is_among_the_notes() -> None:
    assert "B200: a guess: sustained share taken over from H100" in cluster("8xB200").notes
    assert cluster("8xH100").notes == ()
