"""What `shoal bench` decides before and after it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.planner.measure.test_assemble import DEVICE_ROWS, measured, row

from shoal.cli import bench
from shoal.cli.bench import Busy, assembled, counts, summary, undisturbed
from shoal.cli.main import main
from shoal.errors import ExitCode


@pytest.mark.parametrize(("ranks", "wanted"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_counts(ranks: int, wanted: list[int]) -> None:
    assert counts(ranks) == wanted


def test_one_and_two_processes_make_a_cluster() -> None:
    exchange = [row("exchange.all_reduce", 1e3, 1e-3), row("exchange.all_reduce", 1e6, 2e-3)]
    one = measured(*DEVICE_ROWS, row("storage", 1e6, 1e-2))
    found = assembled([one, measured(*DEVICE_ROWS, *exchange, ranks=2)], [])
    assert (found.devices_per_host, sorted(found.alternatives)) == (2, [1])
    assert found.device_for(1).memory_bytes == pytest.approx(2 * found.device_for(2).memory_bytes, abs=2)
    assert found.within is not None
    assert found.storage_bytes_per_second == pytest.approx(1e8)
    assert "2 processes" in found.device.sources["flops"]
    assert "1 process " in found.device_for(1).sources["flops"]
    assert "2 processes" in summary(found)


def test_others_at_work_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"busy": 0.0, "time": 0.0}
    monkeypatch.setattr(bench, "busy_seconds", lambda: now["busy"])
    monkeypatch.setattr(bench, "_own_seconds", lambda: 0.0)
    monkeypatch.setattr(bench, "cores", lambda: 2)
    monkeypatch.setattr(bench.time, "monotonic", lambda: now["time"])
    busy = Busy()
    now.update(busy=10.0, time=10.0)
    assert busy.share() == pytest.approx(0.5)


def test_what_others_spoilt_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cores", lambda: 2)
    found = assembled([measured(*DEVICE_ROWS), measured(*DEVICE_ROWS, ranks=2)], [])
    assert undisturbed(found, 0.05) == found
    mentioned = undisturbed(found, 0.2)
    assert "20%" in mentioned.notes[0]
    assert mentioned.alternatives == found.alternatives
    estimated = undisturbed(found, 0.8)
    one, two = estimated.device_for(1), estimated.device_for(2)
    assert two == found.device_for(2)
    assert one.flops["float32"] == pytest.approx(2 * two.flops["float32"])
    assert one.memory_bytes == found.device_for(1).memory_bytes
    assert one.sources["flops"].startswith("not measured")
    assert "estimated" in estimated.notes[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--ranks", "0"], "--ranks 0"), (["--ranks", "two"], "--ranks two"), (["-o", "nowhere/x.toml"], "no directory")],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert main(["bench", *arguments]) == ExitCode.USER
    assert told in capsys.readouterr().err


def test_nothing_is_measured_for_help(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert "--quick" in out
    assert "--into" not in out
