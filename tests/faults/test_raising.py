"""An exception on one rank only: every rank ends, the one that raised is named, nobody waits."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from tests.launching import JOBS, Run, run
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = JOBS / "faulty.py"
# Rank 1's of two, in the first step and in the fourth: the first is probed, later ones are not.
SAMPLES = {"first": 10, "later": 3 * 16 + 10}


@parametrize(
    ("place", "when"), product(["data", "forward", "backward"], SAMPLES), usual=["data-later", "backward-later"]
)
def test_one_rank_raises(place: str, when: str, tmp_path: Path) -> None:
    variables = {"TEST_RAISE": f"{place}:{SAMPLES[when]}"}
    ended = run(Run(JOB, tmp_path / "run", 2, environment=variables)).fails(2)
    assert ended.stderr.count("error on rank 1 ") == ended.stderr.count("write instead") == 1
    assert "rank 1" in ended.stderr
    assert "rank 0" not in ended.stderr, "rank 0 is well"
    assert "PeerError" not in ended.stderr
    assert "Traceback" not in ended.output
    expected = {"data": "cannot read sample", "forward": "a sample that the model", "backward": "no derivative here"}
    assert expected[place] in ended.stderr
    assert ("step 3 is saved: --resume goes on from there" in ended.stderr) == (when == "later")
    if place == "data":
        assert f"sample {SAMPLES[when]}" in ended.stderr


@parametrize("place", ["data", "backward"], usual=[])
def test_exact_mode_on_three_ranks(place: str, tmp_path: Path) -> None:
    """Grains 5 to 7 are rank 2's of three."""
    variables = {"TEST_RAISE": f"{place}:{2 * 16 + 12}"}
    ended = run(Run(JOB, tmp_path / "run", 3, exact=True, environment=variables)).fails(2)
    assert "rank 2" in ended.stderr
    assert "rank 0" not in ended.stderr
    assert "rank 1" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", ["data", "forward", "backward"])
def test_where_the_others_wait_in_the_same_forward(place: str, tmp_path: Path) -> None:
    """Sharded parameters: rank 1 ends at once, and rank 0 with it."""
    plan = tmp_path / "plan.toml"
    plan.write_text("schema = 1\n[layout]\nshard = 2\n")
    variables = {"TEST_RAISE": f"{place}:{SAMPLES['later']}"}
    ended = run(Run(JOB, tmp_path / "run", None, arguments=("--plan", str(plan)), environment=variables)).fails(2)
    assert "rank 1" in ended.stderr
    assert "PeerError" not in ended.stderr
    # Before a step all ranks agree; in the midst of one the others wait for this one.
    said = "step 3 is saved" if place == "data" else "step 3 could not be saved: the other ranks may wait"
    assert said in ended.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_cannot_read_a_later_microbatch_does_not_let_the_others_wait(rank: int, tmp_path: Path) -> None:
    """All stages read all samples: one alone fails, of the second microbatch of the fourth step."""
    plan = tmp_path / "plan.toml"
    sections = ("[layout]\npipeline = 2", "[batch]\ngrains_per_microbatch = 1", '[pipeline]\nsplit = ["2"]')
    plan.write_text("\n".join(("schema = 1", *sections, "")))
    variables = {"TEST_RAISE": f"data:{3 * 16 + 2}", "TEST_RAISING_RANK": str(rank)}
    wanted = Run(f"{JOB}:dropout", tmp_path / "run", None, arguments=("--plan", str(plan)), environment=variables)
    ended = run(wanted).fails(2)
    assert f"rank {rank}" in ended.stderr
    assert "sample 50" in ended.stderr
    assert "PeerError" not in ended.stderr
    assert "step 3 could not be saved: the other ranks may wait" in ended.stderr


@pytest.mark.slow
def test_the_run_goes_on_once_it_is_mended(tmp_path: Path) -> None:
    out = tmp_path / "run"
    variables = {"TEST_RAISE": "data:58"}
    ended = run(Run(JOB, out, 2, True, ("--checkpoint-every", "100"), environment=variables)).fails(2)
    assert ended.result["steps"] == 3
    resumed = run(Run(JOB, out, 1, arguments=("--resume",))).expect(0)
    whole = run(Run(JOB, tmp_path / "whole", 1, True)).expect(0)
    assert resumed.result["resumed_from"] == 3
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]


@pytest.mark.slow
def test_a_data_worker_that_raises(tmp_path: Path) -> None:
    variables = {"TEST_RAISE": "data:58"}
    ended = run(Run(JOB, tmp_path / "run", 2, arguments=("--workers", "1"), environment=variables)).fails(2)
    assert "rank 1" in ended.stderr
    assert "sample 58" in ended.stderr
    assert "Traceback" not in ended.output
