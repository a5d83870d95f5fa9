"""The command for GPUs: parts leave their results whatever becomes of others, and its dry half runs without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import PARTS, Part, main, run_all
from benchmarks.gpu_layouts import layouts
from benchmarks.gpu_step import GPT2, JOBS, flops
from tests.usual import SLOW


def part(name: str, program: str, seconds: float = 30.0) -> Part:
    command = (sys.executable, "-c", program, "OUT")
    return Part(name, seconds, command, command)


def test_a_part_that_fails_or_hangs_takes_no_other_along(tmp_path: Path) -> None:
    leaves = "import sys; open(sys.argv[1] + '.json', 'w').write('{}'); print('left')"
    waits = "import time; print('waits', flush=True); time.sleep(60)"
    parts = [part("fails", "raise SystemExit('no')"), part("hangs", waits, 0.5), part("last one", leaves)]
    found = run_all(parts, tmp_path, dry=False, about="made up")
    assert [one["status"] for one in found] == ["failed", "late", "done"]
    assert json.loads((tmp_path / "hangs.part.json").read_text())["code"] is None
    assert (tmp_path / "last_one.json").read_text() == "{}"
    text = (tmp_path / "README.md").read_text()
    assert "| hangs | late |" in text
    assert "left" in text


def test_the_limits_are_ten_minutes_together() -> None:
    assert sum(part.seconds for part in PARTS) <= 600


def test_layouts_are_those_that_so_many_devices_allow() -> None:
    """One device has one; of several each uses all, and each is a plan of its own that nothing refuses."""
    assert [name for name, _ in layouts(1)] == ["one"]
    for count in (2, 4, 8):
        found = list(layouts(count))
        assert len({name for name, _ in found}) == len(found)
        assert {plan.degrees.world_size for _, plan in found} == {1, count}
    assert [len(list(layouts(count))) for count in (2, 3, 4)] == [8, 8, 26]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "none such"])


def test_the_gpt_is_gpt_2s() -> None:
    with torch.device("meta"):
        made = JOBS["gpt"](False).model()
    assert isinstance(made, GPT2)
    count = sum(p.numel() for p in made.parameters())
    assert 124_000_000 < count < 125_000_000
    assert flops(JOBS["lenet"](True)) is None
    tiny = JOBS["gpt"](True)
    counted = sum(p.numel() for p in tiny.model().parameters()) - 16 * 32
    assert flops(tiny) == 16 * (6 * counted + 12 * 2 * 16 * 32)


@SLOW
@pytest.mark.timeout(600)  # three models are compiled
def test_the_dry_half_runs(tmp_path: Path) -> None:
    assert main(["--dry", "--out", str(tmp_path)]) == 0
    for job in JOBS:
        found = json.loads((tmp_path / f"step_of_{job}.json").read_text())
        assert set(found["default"]["ratio"]) == {"shoal / eager"}
        assert "a CUDA device" in found["captured"]["refused"]
        assert set(found["compiled"]["ratio"]) == {"shoal / eager", "shoal / compiled"}
    found = json.loads((tmp_path / "captured_step.json").read_text())
    for job in ("lenet", "lenet with dropout"):
        assert "a CUDA device" in found[job]["refused"] or found[job]["ratio"]
