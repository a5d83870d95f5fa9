"""Streams: the same samples in the same grains on any number of processes, from any place on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launching import JOBS, Run, run, run_all
from tests.usual import parametrize

pytestmark = pytest.mark.ranks

KINDS = ("job", "sharded")


@parametrize("kind", KINDS, usual=["sharded"])
def test_one_process_or_three_and_a_resume_in_the_middle(kind: str, tmp_path: Path) -> None:
    job = f"{JOBS / 'streams.py'}:{kind}"
    one, three, cut = (
        e.expect(0)
        for e in run_all(
            [
                Run(job, tmp_path / "one", 1, exact=True),
                Run(job, tmp_path / "three", 3, exact=True),
                Run(job, tmp_path / "cut", 2, exact=True, arguments=("--steps", "3")),
            ]
        )
    )
    assert cut.result["steps"] == 3
    resumed = run(Run(job, tmp_path / "cut", 3, arguments=("--resume", "--steps", "8"))).expect(0)
    assert resumed.result["resumed_from"] == 3
    for ended in (three, resumed):
        for key in ("weights_sha256", "sample_digest", "metrics", "steps", "samples"):
            assert ended.result[key] == one.result[key], key
    assert one.result["samples"] == 96
    assert one.result["ended_early"] is cut.result["ended_early"] is None


@pytest.mark.parametrize("devices", [1, 3])
def test_a_stream_that_ends_before_the_steps_do(devices: int, tmp_path: Path) -> None:
    """100 samples by 12: eight full steps and one of 4, in which some rank has none."""
    ids = tmp_path / "ids"
    ids.mkdir()
    wanted = Run(f"{JOBS / 'streams.py'}:endless", tmp_path / "run", devices, environment={"TEST_IDS": str(ids)})
    ended = run(wanted).expect(0)
    assert (ended.result["steps"], ended.result["samples"]) == (9, 100)
    assert ended.result["ended_early"] == {"steps": 9, "wanted_steps": 50, "samples": 100, "wanted_samples": 600}
    assert "completed after step 9 of 50" in ended.output
    assert "train_data ended after 100 of 600 samples" in ended.output
    assert ended.records[-1]["num_samples"] == 4
    told = [int(i) for path in ids.glob("train-*.txt") for i in path.read_text(encoding="utf-8").split()]
    assert sorted(told) == list(range(100))


def test_a_stream_that_divides_itself_by_rank_is_refused(tmp_path: Path) -> None:
    ended = run(Run(f"{JOBS / 'streams.py'}:by_rank", tmp_path / "run", 2)).expect(2)
    assert "a stream that gives rank 1 other samples than rank 0" in ended.output
    assert "give the whole stream" in ended.output
    assert not (ended.out / "records.jsonl").exists()
