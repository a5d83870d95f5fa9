"""What `shoal bench collectives` decides and shows."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shoal.cli.main import main
from shoal.errors import CommandError, ExitCode
from shoal.hardware.detect import fastest
from shoal.planner.measure.collectives import Compared, bus_bandwidth, calibration, parse_sizes, picture, table

COMPARED = Compared(
    2,
    {
        "native": {1024: [2e-3, 1e-3, 3e-3], 1 << 22: [1e-2]},
        "shared_memory": {1024: [1e-5], 1 << 22: [1e-4]},
        "Open MPI v4": {1024: [1e-6]},
    },
)


def test_sizes() -> None:
    assert parse_sizes(None)[0] == 1 << 10
    assert parse_sizes(None)[-1] == 1 << 28
    assert parse_sizes("64K,1m 256MB,17") == [64 << 10, 1 << 20, 256 << 20, 17]
    for wrong in ("64X", "K", "0", "1.5M"):
        with pytest.raises(CommandError, match="no number of bytes"):
            parse_sizes(wrong)


def test_the_table_marks_the_fastest_of_our_own() -> None:
    lines = table(COMPARED).splitlines()
    assert [line.strip() for line in lines if not line.startswith("  ")][1:] == ["1 KB", "4 MB"]
    marked = [line for line in lines if line.endswith("*")]
    assert len(marked) == 2
    assert all("shared_memory" in line for line in marked)
    assert "2,000.0" in next(line for line in lines if "native" in line)


def test_bus_bandwidth_is_a_rings() -> None:
    assert bus_bandwidth(4, 1000, 1.0) == 1500.0


def test_what_is_kept_can_be_chosen_from() -> None:
    assert fastest(calibration(COMPARED), 1 << 20) == "shared_memory"


def test_the_plot_is_a_picture() -> None:
    root = ElementTree.fromstring(picture(COMPARED))
    texts = ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"native", "shared_memory", "Open MPI v4", "bus bandwidth, GB/s"} <= set(texts)


def test_one_process_has_nobody_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--ranks", "1"]) == ExitCode.USER
    assert "needs at least two processes" in capsys.readouterr().err
