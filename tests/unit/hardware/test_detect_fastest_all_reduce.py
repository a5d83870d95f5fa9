"""Which all-reduce is chosen where nobody says."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.hardware import detect, dump
from shoal.hardware.detect import ALGORITHMS, all_reduce_here, comparison_file, fastest, measured_file, why_not_shared
from shoal.hardware.values import Cluster, Device, Link
from shoal.plans.plan import CollectivesSection


def test_the_names_are_the_plans() -> None:
    for name in ALGORITHMS:
        assert CollectivesSection(all_reduce=name).all_reduce == name  # type: ignore[arg-type]


def measured(**seconds: dict[str, float]) -> dict[str, object]:
    return {"all_reduce_seconds": seconds}


def test_the_fastest_at_a_size_between_those_measured() -> None:
    found = measured(native={"1000": 1.0, "100000": 1.0}, ring={"1000": 10.0, "100000": 0.01})
    assert fastest(found, 10) == "native"
    assert fastest(found, 1000) == "native"
    assert fastest(found, 90_000) == "ring"
    assert fastest(found, 10**9) == "ring"
    # The line of logarithms from 10 at 1e3 to 0.01 at 1e5 is at 1 where x = 1e3 * 100 ** (1 / 3).
    assert fastest(found, 4500) == "native"
    assert fastest(found, 5500) == "ring"


def test_noise_does_not_choose_and_others_are_not_chosen() -> None:
    assert fastest(measured(native={"10": 1.0}, tree={"10": 0.97}), 10) == "native"
    assert fastest(measured(native={"10": 1.0}, **{"Open MPI": {"10": 0.1}}), 10) == "native"


def test_by_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(detect, "gpus", list)
    monkeypatch.setattr(detect, "why_not_shared", lambda: None)
    assert all_reduce_here(2) == "shared_memory"
    assert all_reduce_here(1) == "native"
    comparison_file(2).parent.mkdir(parents=True)
    for text, wanted in (
        (json.dumps(measured(native={"10": 1.0}, ring={"10": 0.1})), "ring"),
        (json.dumps(measured(native={"10": 1.0}, shared_memory={"10": 1.1})), "native"),
        ("not json", "shared_memory"),
        ("{}", "shared_memory"),
        ('{"all_reduce_seconds": {}}', "shared_memory"),
    ):
        comparison_file(2).write_text(text)
        assert all_reduce_here(2) == wanted
    assert all_reduce_here(3) == "shared_memory"
    monkeypatch.setattr(detect, "gpus", lambda: ["a GPU"])
    assert all_reduce_here(3) == "native"
    monkeypatch.setattr(detect, "gpus", list)
    monkeypatch.setattr(detect, "why_not_shared", lambda: "it cannot")
    assert all_reduce_here(3) == "native"


def test_what_keeps_processes_from_sharing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(detect.platform, "machine", lambda: "aarch64")
        assert "aarch64" in str(why_not_shared())
    with monkeypatch.context() as patch:
        patch.setattr(detect.sys, "platform", "darwin")
        assert "darwin" in str(why_not_shared())
    if sys.platform == "linux" and platform.machine() == "x86_64":
        descriptors = os.listdir("/proc/self/fd")
        assert why_not_shared() is None
        monkeypatch.setattr(detect.os, "open", refused)
        assert "through /proc: [Errno 13]" in str(why_not_shared())
        assert os.listdir("/proc/self/fd") == descriptors


def test_by_what_the_cluster_says_where_no_comparison_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = Link("Gloo", bytes_per_second=1e9, latency_seconds=1e-4)
    fast = Link("memory", bytes_per_second=4e9, latency_seconds=0.0, call_seconds=1e-5)
    core = Device("core", "cpu", 10**9, 1e10, {"float32": 1e10})
    found = Cluster("here", core, 2, within=slow, algorithms={"shared_memory": fast})
    assert detect.fastest_on(found, 2) == "shared_memory"
    assert detect.fastest_on(found, 1) == detect.fastest_on(found, 4) == "native"
    assert detect.fastest_on(replace(found, algorithms={"shared_memory": slow}), 2) == "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(detect, "gpus", list)
    monkeypatch.setattr(detect, "why_not_shared", lambda: None)
    measured_file().parent.mkdir(parents=True)
    measured_file().write_text(dump(found))
    assert all_reduce_here(2) == "shared_memory"
    measured_file().write_text(dump(replace(found, algorithms={"shared_memory": slow})))
    assert all_reduce_here(2) == "native"
    assert all_reduce_here(4) == "shared_memory"  # of so many ranks nothing is known
    measured_file().write_text("no cluster")
    assert all_reduce_here(2) == "shared_memory"
