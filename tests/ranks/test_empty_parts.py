"""Parts of a batch that add nothing, on one rank and not on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching import JOBS, Run, run, run_all
from tests.ranks.test_relayout import plan
from tests.usual import parametrize

import shoal

pytestmark = pytest.mark.ranks

FILE = JOBS / "empty_parts.py"
JOB = f"{FILE}:job"
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"layout": {"data": 2}},
    "ZeRO-1": {"layout": {"shard": 2}, "shard": {"level": "optimizer"}},
    "ZeRO-3": {"layout": {"shard": 2}, "shard": {"level": "parameters"}},
    "grain by grain": {"layout": {"shard": 2}, "shard": {"level": "parameters"}, "batch": {"grains_per_microbatch": 1}},
}


@pytest.fixture(autouse=True)
def _jobs_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOBS))


@parametrize("holes", [False, True], usual=["True"])
@parametrize("layout", list(LAYOUTS), usual=["data", "grain by grain"])
def test_ranks_without_a_gradient_stay_in_step(tmp_path: Path, layout: str, holes: bool) -> None:
    """The weights are those of a loop over whole batches, of which no part is empty."""
    import empty_parts

    arguments = plan(tmp_path / "plan.toml", LAYOUTS[layout])
    ended = run(Run(JOB, tmp_path / "run", None, arguments=arguments, settings={"holes": holes})).expect(0)
    weights = shoal.load(ended.out)
    for name, value in empty_parts.plain(holes).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


@parametrize("holes", [False, True], usual=["True"])
def test_exact_mode_gives_one_hash(tmp_path: Path, holes: bool) -> None:
    runs = [Run(JOB, tmp_path / str(n), n, exact=True, settings={"holes": holes}) for n in (1, 2)]
    one, two = (ended.expect(0).result["weights_sha256"] for ended in run_all(runs))
    assert one == two


def test_a_part_of_some_weight_without_a_gradient_adds_none(tmp_path: Path) -> None:
    import empty_parts

    runs = [Run(JOB, tmp_path / str(n), n, exact=True, settings={"loss": "constant"}) for n in (1, 2)]
    one, two = (ended.expect(0) for ended in run_all(runs))
    assert one.result["weights_sha256"] == two.result["weights_sha256"]
    weights = shoal.load(two.out)
    for name, value in empty_parts.plain(False, "constant").items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


@parametrize("devices", [1, 2], usual=["2"])
def test_a_batch_of_some_weight_without_a_gradient_is_an_error(tmp_path: Path, devices: int) -> None:
    message = run(Run(JOB, tmp_path / "run", devices, settings={"loss": "nothing"})).fails(2).message
    assert message.given == "a loss of weight 8 whose total depends on no trainable parameter"
    assert "return the weight 0" in message.remedy


@pytest.mark.parametrize(("loss", "layout"), [("summing", {"data": 2}), ("waiting", {"tensor": 2})])
def test_a_collective_of_the_job_is_named_before_the_first_step(
    tmp_path: Path, loss: str, layout: dict[str, int]
) -> None:
    """Also where one rank runs the loss, to see how the model can be divided, and the others do not."""
    arguments = plan(tmp_path / "plan.toml", {"layout": layout})
    ended = run(Run(JOB, tmp_path / "run", None, arguments=arguments, settings={"loss": loss})).fails(2)
    called = {"summing": "all_reduce", "waiting": "barrier"}[loss]
    assert ended.message.given.startswith(f"torch.distributed.{called} within the ")
    assert f" at {FILE}:" in ended.message.given
    assert "step 1/" not in ended.output
