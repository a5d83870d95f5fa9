"""This machine: its own file if there is one, else a guess that says that it is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.hardware import cluster, detect, dump
from shoal.hardware.detect import cores, detected, kind_of, measured_file, memory_bytes


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
