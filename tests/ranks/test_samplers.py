"""Drawn samples: the same run on any number of ranks, and when it goes on with another number."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launching import JOBS, Run, run, run_all

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'sampled.py'}:job"
OTHERS = ("without replacement", "balanced", "by length", "curriculum", "mixture")
QUICK = ("weighted", "token budget")


@pytest.mark.parametrize("sampler", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_one_run_on_any_number_of_ranks(sampler: str, tmp_path: Path) -> None:
    """Two ranks to the middle of an epoch, then three: the weights and the account are those of one rank."""
    wanted = [Run(JOB, tmp_path / str(n), n, True, settings={"sampler": sampler}) for n in (1, 3)]
    half = Run(JOB, tmp_path / "half", 2, True, ("--steps", "3"), settings={"sampler": sampler})
    alone, three, _ = (ended.expect(0) for ended in run_all([*wanted, half]))
    rest = run(
        Run(JOB, tmp_path / "half", 3, True, ("--resume", "--steps", "10"), settings={"sampler": sampler})
    ).expect(0)
    sizes = [r["num_samples"] for r in alone.records]
    assert sizes == [16, 16, 16, 16, 11] * 2 if sampler != "token budget" else min(sizes) < max(sizes)
    assert sum(sizes) == 150
    for other in (three, rest):
        for key in ("weights_sha256", "sample_digest", "samples"):
            assert other.result[key] == alone.result[key], key


def test_a_resume_with_other_weights_is_refused(tmp_path: Path) -> None:
    run(Run(JOB, tmp_path / "run", 1, arguments=("--steps", "2"))).expect(0)
    changed = Run(JOB, tmp_path / "run", 1, arguments=("--resume",), settings={"sampler": "balanced"})
    assert "sampler" in run(changed).fails(2).message.given
