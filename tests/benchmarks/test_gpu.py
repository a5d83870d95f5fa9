"""The command for GPUs: each part leaves a record whatever becomes of it, and runs in tiny without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import END_SECONDS, RESULTS, following, main, page, records, run
from benchmarks.gpu_parts import LONGEST_SECONDS, PARTS
from benchmarks.gpu_step import PEERS, bert, flops, gpt2, llama, vit
from tests.usual import SLOW

BY_NAME = {part.name: part for part in PARTS}
ABOUT = {"commit": "abc", "device": "no GPU", "versions": {"torch": "2"}, "dry": True}


def test_every_question_has_parts_of_two_minutes_at_most() -> None:
    limits = list(accumulate(part.seconds + END_SECONDS for part in PARTS))
    assert limits[6] <= 600
    assert limits[9] <= 900
    assert [part.row for part in PARTS[10:]] == sorted(part.row for part in PARTS[10:])
    assert {part.row for part in PARTS} == set(range(1, 12))
    assert all(part.seconds <= LONGEST_SECONDS for part in PARTS)
    assert len({part.file for part in PARTS}) == len(PARTS)


def test_next_is_the_most_wanted_part_without_a_record_at_this_commit_that_fits() -> None:
    first, second, *_ = PARTS
    found: dict[str, Any] = {first.name: {"commit": "abc"}, second.name: {"commit": "other"}}
    assert following({}, "abc", 1000) is first
    assert following(found, "abc", 1000) is second
    assert following(found, "abc+", 1000) is first  # files differ from the commit
    assert following(found, "abc", 50) is BY_NAME["nccl group of one"]
    assert following(found, "abc", 3) is None


def test_a_part_that_is_late_or_fails_leaves_a_record_that_says_so(tmp_path: Path) -> None:
    late = run(replace(BY_NAME["lenet"], seconds=0), tmp_path, ABOUT)
    assert late["status"] == "ended at its time limit of 0 s"
    failed = run(replace(BY_NAME["tests"], name="none such"), tmp_path, ABOUT)
    assert failed["status"] == "failed with code 2"
    assert "invalid choice: 'none such'" in failed["output"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lenet.json", "none-such.json"]
    assert json.loads((tmp_path / "lenet.json").read_text()) == late
    assert "| ended at its time limit of 0 s; abc, no GPU, torch 2 |" in page(records(tmp_path))


def test_the_page_is_made_of_the_records() -> None:
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == page(records(RESULTS))


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "none such"])


def test_the_models_have_their_sizes() -> None:
    wanted = {gpt2: 124e6, llama: 1236e6, bert: 110e6, vit: 22e6}
    for make, size in wanted.items():
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in make(False).model().parameters())
        assert count == pytest.approx(size, rel=0.02), make
    counted = sum(p.numel() for p in gpt2(True).model().parameters()) - 16 * 32
    assert flops(gpt2(True)) == 16 * (6 * counted + 12 * 2 * 16 * 32)
    assert flops(vit(True)) is None


@SLOW
@pytest.mark.timeout(600)
def test_a_loop_beside_its_peers_in_tiny_and_the_kernels_of_the_worst(tmp_path: Path) -> None:
    names = ["lenet, by hand", "lenet", "kernels of the worst", "ranks over nccl"]
    assert main(["--dry", "--commit", "abc", "--out", str(tmp_path), "--parts", *names]) == 0
    found = records(tmp_path)
    peers, own = found["lenet, by hand"]["numbers"], found["lenet"]["numbers"]
    assert set(peers) == {*PEERS} - {"reduce-overhead"}
    assert all(number["milliseconds"] > 0 for name, number in peers.items() if name != "fabric")
    assert set(own) == {"predicted", "shares of the peak by hand", "shoal", "of the best by hand"}
    assert "prediction_error" in own["shoal"]
    assert set(found["lenet"]["satisfied"].values()) == {None}
    assert list(found["kernels of the worst"]["numbers"])[1].startswith("lenet, ")


@SLOW
@pytest.mark.timeout(2400)
def test_every_part_runs_in_tiny(tmp_path: Path) -> None:
    assert main(["--dry", "--commit", "abc", "--out", str(tmp_path)]) == 0
    for name, record in records(tmp_path).items():
        failed = [number for number in record["numbers"].values() if isinstance(number, dict) and "failed" in number]
        assert record["status"] == "done", name
        assert not failed, name
