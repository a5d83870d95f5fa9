"""Sizes that divide by nothing: every sample once, metrics over all of them, ranks that get nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Run, run, run_all
from tests.ranks.test_fast import FAST_TOLERANCE, furthest

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'tiny.py'}:one_epoch"


def logged(folder: Path, kind: str) -> list[int]:
    """The ids that all ranks told of."""
    return [int(line) for path in folder.glob(f"{kind}-*.txt") for line in path.read_text(encoding="utf-8").split()]


def watched(out: Path, devices: int, exact: bool = False, **settings: int) -> tuple[Run, Path]:
    """A run that logs its samples' ids, and where to."""
    ids = out.with_name(out.name + "-ids")
    ids.mkdir(parents=True)
    return Run(JOB, out, devices, exact, settings=settings, environment={"TEST_IDS": str(ids)}), ids


def test_1003_samples_by_64_on_three_processes(tmp_path: Path) -> None:
    three, ids = watched(tmp_path / "three", 3)
    one, _ = watched(tmp_path / "one", 1)
    ended, alone = (e.expect(0) for e in run_all([three, one]))
    assert sorted(logged(ids, "train")) == list(range(1003))
    # Each rank's first chunk is also tried before the first step, and here no rank has another.
    assert sorted(logged(ids, "eval")) == sorted([*range(101)] * 2)
    assert {path.name for path in ids.glob("*")} == {
        f"{k}-{r}.txt" for k in ("train", "eval") for r in range(3 if k == "train" else 2)
    }
    result = ended.result
    assert (result["steps"], result["samples"], result["eval_samples"]) == (16, 1003, 101)
    assert [r["num_samples"] for r in ended.records] == [64] * 15 + [43]
    assert result["sample_digest"] == alone.result["sample_digest"]
    assert furthest(alone, ended) <= FAST_TOLERANCE
    for name, value in alone.result["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=FAST_TOLERANCE)


def test_metrics_are_those_of_one_process_to_the_bit(tmp_path: Path) -> None:
    ends = [e.expect(0).result for e in run_all([watched(tmp_path / str(n), n, exact=True)[0] for n in (1, 3)])]
    assert ends[0]["metrics"] == ends[1]["metrics"]
    assert set(ends[0]["metrics"]) == {"loss", "accuracy"}
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "batch"),
    [(21, 2), (17, 16), (3, 16)],
    ids=["batches of 2 on 3 ranks", "a last batch of 1 sample", "3 samples in all"],
)
def test_a_rank_that_gets_nothing(samples: int, batch: int, tmp_path: Path) -> None:
    wanted = [watched(tmp_path / str(n), n, samples=samples, batch=batch) for n in (1, 3)]
    alone, three = (e.expect(0) for e in run_all([w for w, _ in wanted]))
    assert sorted(logged(wanted[1][1], "train")) == list(range(samples))
    assert three.result["samples"] == samples
    assert three.result["sample_digest"] == alone.result["sample_digest"]
    assert furthest(alone, three) <= FAST_TOLERANCE


def test_a_rank_that_gets_nothing_in_exact_mode(tmp_path: Path) -> None:
    ends: list[Ended] = run_all([watched(tmp_path / str(n), n, True, samples=21, batch=2)[0] for n in (1, 3)])
    assert ends[0].expect(0).result["weights_sha256"] == ends[1].expect(0).result["weights_sha256"]


def test_a_short_last_step_weighs_by_its_samples(tmp_path: Path) -> None:
    """The mean loss is over all samples of a step: records of another division would differ."""
    wanted, _ = watched(tmp_path / "run", 2, samples=17, batch=16)
    records = run(wanted).expect(0).records
    assert [r["weight"] for r in records] == [16.0, 1.0]
