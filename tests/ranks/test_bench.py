"""`shoal bench` on this machine: real processes, one file that the loaders read."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from tests.launching import start_command

from shoal.hardware import load
from shoal.hardware.values import DIVIDED

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LIMIT_SECONDS = 110.0


def test_bench_measures_one_and_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "here.toml"
    command = [sys.executable, "-m", "shoal", "bench", "--quick", "--ranks", "2", "-o", str(out)]
    with start_command(command, tmp_path / "bench", {"XDG_CACHE_HOME": str(tmp_path / "cache")}) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert str(out) in ended.stdout
    (kept,) = (tmp_path / "cache" / "shoal" / "hardware").iterdir()
    found = load(out)
    assert load(kept) == found
    assert (found.devices_per_host, sorted(found.alternatives)) == (2, [1])
    for device in (found.device, found.alternatives[1]):
        assert {"float32", "bfloat16", "float16"} <= set(device.flops)
        assert all(value > 0 for value in device.flops.values())
        assert device.memory_bytes_per_second > 0
        assert device.dispatch_seconds > 0
        assert device.reserved_bytes > 50e6  # torch alone is more
    assert set(found.device.divided) == set(DIVIDED)
    for own in found.device.divided.values():
        assert own["reserved_bytes"] > 50e6
    assert found.device.divided["shard"]["tensor_seconds"] > 0  # fully_shard's Python, many times an operator's
    assert found.within is not None
    assert {"all_gather", "reduce_scatter", "send"} <= set(found.within.collectives)
    assert found.storage_bytes_per_second
    spreads = tomllib.loads(out.read_text(encoding="utf-8"))["measurements"]
    rows = [row for rows in spreads.values() for row in rows.values()]
    assert rows
    assert all(row[0] <= row[1] <= row[2] and row[4] >= 1 for row in rows)
