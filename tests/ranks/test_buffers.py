"""Buffers have the values of one process that computes whole batches, on any number of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.jobs.buffered import Kinds, plain
from tests.launching import JOBS, Run, run, run_all, start_command

from shoal.checkpoint.weights import load

pytestmark = pytest.mark.ranks
JOB = JOBS / "buffered.py"


def test_every_rule_gives_the_value_of_whole_batches(tmp_path: Path) -> None:
    """Of two epochs whose last batches are short; one buffer begins to change in the third step."""
    wanted = plain(Kinds(), epochs=2)
    ways = [(2, False), (1, True), (2, True)]
    ends = run_all([Run(JOB, tmp_path / f"{devices}-{exact}", devices, exact=exact) for devices, exact in ways])
    for ended in ends:
        found = load(ended.expect(0).out)
        for name, value in wanted.items():
            own = found[name]
            if name in ("mean", "turn"):  # sums over samples in another order: some units of float32's last place
                torch.testing.assert_close(own, value, rtol=1e-5, atol=1e-6, msg=name)
            else:
                assert torch.equal(own, value), (name, own, value)
        said = (
            "max of flag, largest, longest; min of smallest; same of calls; sum of load, samples; total of batch_load"
        )
        assert f"buffers: last of coarse, last; {said}\n" in ended.stdout
    assert ends[1].result["weights_sha256"] == ends[2].result["weights_sha256"]
    rules = ends[0].result["computation"]["rules"]
    assert {rules[name] for name in ("last", "coarse")} == {"last"}
    assert (rules["calls"], rules["late"], rules["batch_load"], rules["mean"]) == ("same", "sum", "total", "mean")


def test_what_no_rule_explains_is_refused_before_the_first_step(tmp_path: Path) -> None:
    ended = run(Run(JOB, tmp_path / "run", 2, settings={"kind": "Variance"})).fails(2)
    assert "buffer spread of Variance" in ended.stderr
    assert 'Job(buffers={"spread": "last"})' in ended.stderr
    assert not ended.records


def test_a_wrong_rule_is_found(tmp_path: Path) -> None:
    """The reference computes whole batches: it does not take the rule over."""
    settings = ["--set", "kind=Variance", "--set", "rule=mean", "--steps", "1", "--devices", "2"]
    command = [sys.executable, "-m", "shoal", "verify", f"{JOB}:job", *settings, "--out", str(tmp_path / "verify")]
    with start_command(command, tmp_path / "verify") as started:
        ended = started.wait()
    assert ended.code == 1, ended.output
    assert "its rule gives another value than one forward of the whole batch leaves" in ended.output
