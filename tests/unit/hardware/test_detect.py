"""This machine: its own file if there is one, else a guess that says that it is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.hardware import cluster, detect, dump
from shoal.hardware.detect import (
    cores,
    cpu_quota,
    detected,
    killed_for_memory,
    kind_of,
    measured_file,
    memory_bytes,
    network_gigabits,
    within_quota,
)


def test_what_was_measured_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = measured_file()
    assert path.is_relative_to(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(dump(cluster("3xcpu")), encoding="utf-8")
    assert cluster("here") == cluster("3xcpu")


def test_a_guess_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(detect, "gpus", list)
    found = cluster("here")
    assert (found.num_hosts, found.devices_per_host, found.device.kind) == (1, cores(), "cpu")
    assert found.device.memory_bytes * cores() <= memory_bytes()
    assert "not measured" in found.notes[0]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080-Ti"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 120GB", "GH200-96"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-PG509-200", None),
        ("Voodoo 2", None),
    ],
)
def test_models_of_the_driver(model: str, kind: str | None) -> None:
    assert kind_of(model) == kind


def test_gpus_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "gpus", lambda: ["NVIDIA H200"] * 4)
    found = detected()
    assert (found.device.name, found.devices_per_host) == ("H200", 4)
    monkeypatch.setattr(detect, "gpus", lambda: ["NVIDIA H200", "Voodoo 2"])
    assert any("Voodoo 2" in note for note in detected().notes)


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n1:memory:/\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_the_quota_of_a_cgroup(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert cpu_quota(plant(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "cores"), [("max", 4), ("250000", 2.5), ("50000", 0.5), ("900000", 4)])
def test_cores_whose_time_a_process_gets(quota: str, cores: float, tmp_path: Path) -> None:
    allowed = cpu_quota(plant(tmp_path, {"sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}))
    assert within_quota(4, allowed) == cores


def test_the_speed_of_the_network(tmp_path: Path) -> None:
    """InfiniBand ports add up and come first; of network cards the fastest counts, and virtual ones have no device."""
    assert network_gigabits(tmp_path) is None
    for name, speed, real in (("eth0", "10000", True), ("eth1", "1000", True), ("eth2", "-1", True), ("v", "9", False)):
        folder = tmp_path / "sys/class/net" / name
        (folder / "device" if real else folder).mkdir(parents=True)
        (folder / "speed").write_text(f"{speed}\n")
    assert network_gigabits(tmp_path) == 10.0
    for port in ("1", "2"):
        folder = tmp_path / "sys/class/infiniband/mlx5_0/ports" / port
        folder.mkdir(parents=True)
        (folder / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert network_gigabits(tmp_path) == 400.0


def test_the_kernel_counts_what_it_killed_for_memory(tmp_path: Path) -> None:
    assert killed_for_memory(tmp_path) == 0
    assert killed_for_memory(plant(tmp_path, {"proc/vmstat": "pgfault 9\noom_kill 3\nunevictable 0\n"})) == 3
