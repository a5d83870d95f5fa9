"""Buffers have the values of one process that computes whole batches, on any number of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.conformance.cases import job as small
from tests.jobs.buffered import Kinds, Recomputed, plain
from tests.launching import JOBS, Run, run, run_all, start_command
from tests.usual import parametrize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.checkpoint.weights import load
from shoal.errors import JobError

pytestmark = pytest.mark.ranks
JOB = JOBS / "buffered.py"


@parametrize("kind", [Kinds, Recomputed], ids=["rules", "recomputed"], usual=["rules"])
def test_every_rule_gives_the_value_of_whole_batches(kind: type[Kinds], tmp_path: Path) -> None:
    """Of two epochs whose last batches are short; one buffer begins to change in a later step."""
    wanted = plain(kind(), epochs=2)
    ways = [(2, False), (1, True), (2, True)]
    settings = {"kind": kind.__name__}
    ends = run_all(
        [Run(JOB, tmp_path / f"{devices}-{exact}", devices, exact=exact, settings=settings) for devices, exact in ways]
    )
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
    assert not (ended.out / "records.jsonl").exists()


def test_what_the_job_recomputes_is_verified(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "verify", f"{JOB}:job", "--set", "kind=Recomputed", "--devices", "2"]
    with start_command([*command, "--out", str(tmp_path / "verify")], tmp_path / "verify") as started:
        assert "verdict            verified" in started.wait().expect(0).stdout


class Counted(nn.Module):
    """Blocks that count their forwards, each recomputed by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Counting() for _ in range(3)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + torch.tanh(self.inner(x))


def test_stages_refuse_what_the_job_recomputes() -> None:
    plan = shoal.Plan().with_sections(layout={"pipeline": 2})
    with pytest.raises(JobError, match=r"a backward that writes buffer blocks\.\d\.calls, in pipeline stages"):
        shoal.verify(small(model=Counted), plan, steps=1)


def test_a_wrong_rule_is_found(tmp_path: Path) -> None:
    """The reference computes whole batches: it does not take the rule over."""
    settings = ["--set", "kind=Variance", "--set", "rule=mean", "--steps", "1", "--devices", "2"]
    command = [sys.executable, "-m", "shoal", "verify", f"{JOB}:job", *settings, "--out", str(tmp_path / "verify")]
    with start_command(command, tmp_path / "verify") as started:
        ended = started.wait()
    assert ended.code == 1, ended.output
    assert "its rule gives another value than one forward of the whole batch leaves" in ended.output
