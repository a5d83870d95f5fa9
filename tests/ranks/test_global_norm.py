"""BatchNorm over the global batch: plain torch's numbers with the whole batch in one process, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.usual import needs_zero23, parametrize
from torch import Tensor, nn

import shoal
from shoal.errors import JobError, PlanError, ShoalError
from shoal.plans.resolve import CompletePlan, judge
from shoal.training.microbatch.global_norm import GlobalNorm
from shoal.training.observe.trace.traces import StepTrace, read
from shoal.training.setup.job_model import seeded_model
from shoal.training.setup.preflight import facts_of_job
from shoal.verification.forked import trace_forked
from shoal.verification.judge import judge_traces

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.wide, self.second = nn.Linear(64, 6), nn.BatchNorm1d(6, affine=False, momentum=None)
        self.out = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.first(self.conv(images)))
        hidden = F.dropout(F.relu(self.second(self.wide(hidden.flatten(1)))), 0.2, self.training)
        result: Tensor = self.out(hidden)
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = F.relu(self.norm(self.conv(images)))
        return result


def repeated() -> nn.Module:
    """Blocks that can be recomputed, which calls their norms again in the backward."""
    return nn.Sequential(*(Block() for _ in range(3)), Net())


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def job_of(model: Callable[[], nn.Module] = Net, **settings: Any) -> shoal.Job:
    """A second step has 4 samples in 2 grains, so that a third rank has none."""
    draw = torch.Generator().manual_seed(1)
    data = 2.0 + torch.randn(20, 3, 4, 4, generator=draw), torch.randint(0, 3, (20,), generator=draw)
    usual: dict[str, Any] = {"train_data": data, "global_batch": 16, "grains": 8, "shuffle": False, "loss": loss}
    return shoal.Job(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **(usual | {"batch_norm": "batch"} | settings),
    )


def plan(job: shoal.Job, layout: dict[str, int], **sections: dict[str, Any]) -> CompletePlan:
    return judge(shoal.Plan().with_sections(layout=layout, **sections), facts_of_job(job)).plan


def traced(job: shoal.Job, ranks: int, folder: Path) -> StepTrace:
    """The first step of the ranks."""
    trace_forked(lambda: job, plan(job, {"data": ranks}), folder, 1)
    return read(folder / "parallel", 0, ranks)


@parametrize("ranks", [1, 2, 3, 4], usual=["3"])
@parametrize("kind", ["BatchNorm", "SyncBatchNorm"], usual=["SyncBatchNorm"])
def test_plain_torch_on_the_whole_batch(kind: str, ranks: int, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Net()
        model.second.momentum = 0.3
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if kind == "SyncBatchNorm" else model

    def no_dropout(model: nn.Module, batch: Any) -> tuple[Tensor, int]:  # whose masks plain torch does not draw
        hidden = F.relu(model.first(model.conv(batch[0])))
        scores = model.out(model.second(model.wide(hidden.flatten(1))))
        return F.cross_entropy(scores, batch[1], reduction="sum"), len(batch[1])

    job = job_of(build, loss=no_dropout)
    trace, model = traced(job, ranks, tmp_path), seeded_model(job)
    model.train()
    total, weight = no_dropout(model, tuple(tensor[:16] for tensor in job.train_data))
    (total / weight).backward()
    assert trace.loss == pytest.approx(float(total.detach()) / weight, rel=1e-6)
    gradients, buffers = trace.phase("reduction"), trace.phase("buffers")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-6, atol=1e-6, msg=name)


def test_the_published_value_of_one_norm(tmp_path: Path) -> None:
    """Column 1 has the variance 0.377417; the mean of the halves' variances is 0.367809."""
    k = torch.arange(1, 33, dtype=torch.float64)
    rows = (k * k).sin().view(8, 4).float()
    job = job_of(
        lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 3)),
        train_data=(rows, torch.arange(8) % 3),
        global_batch=8,
        grains=8,  # of one sample, which has no variance of its own
    )
    for ranks in (2, 4):
        variance = traced(job, ranks, tmp_path / str(ranks)).phase("buffers")["0.running_var"][0]
        assert float(variance) * 7 / 8 == pytest.approx(0.377417, abs=1e-6)


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "three ranks, one without samples": ({"data": 3}, {}),
    "shares": ({"data": 2, "shares": [3, 1]}, {}),
    "ZeRO-1": ({"shard": 2}, {"shard": {"level": "optimizer"}}),
    "ZeRO-3": ({"shard": 3}, {"shard": {"level": "parameters"}}),
    "bfloat16": ({"data": 2}, {"precision": {"compute": "bfloat16"}}),
    "float16": ({"data": 2}, {"precision": {"compute": "float16", "loss_scale": "dynamic"}}),
    "recomputed": ({"data": 2}, {"memory": {"recompute": "full"}}),
    "one copy": ({"data": 2}, {"collectives": {"all_reduce": "shared_memory"}, "memory": {"shared": True}}),
}
SLOW = ("shares", "ZeRO-1", "float16", "recomputed", "one copy")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_zero23() if n == "ZeRO-3" else pytest.mark.slow if n in SLOW else ()) for n in PLANS],
)
def test_verified_on_each_layout(name: str) -> None:
    layout, sections = PLANS[name]
    verdict = shoal.verify(
        job_of(repeated if name == "recomputed" else Net),
        shoal.Plan().with_sections(layout=layout, **sections),
        steps=2,
    )
    assert verdict.verified, verdict.render()


def test_with_a_loss_over_the_global_batch() -> None:
    def spread(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return (outputs - outputs.mean(0)).square().sum() + F.cross_entropy(outputs, batch[1]) * 8, len(outputs)

    job = job_of(outputs=lambda model, batch: model(batch[0]), loss=spread)
    verdict = shoal.verify(job, shoal.Plan().with_sections(layout={"data": 3}), steps=2)
    assert verdict.verified, verdict.render()


def test_verify_catches_the_mean_of_the_ranks_variances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = GlobalNorm.exchange

    def planted(self: GlobalNorm, row: Tensor) -> list[Tensor]:
        rows = exchange(self, row)
        if len(row) % 2:  # of a forward: count, means, variances
            means = slice(1, 1 + len(row) // 2)
            common = torch.stack(rows)[:, means].mean(0)
            rows = [torch.cat([one[:1], common, one[means.stop :]]) for one in rows]
        return rows

    job = job_of()
    whole = plan(job, {"data": 2})
    monkeypatch.setattr(GlobalNorm, "exchange", planted)
    trace_forked(lambda: job, whole, tmp_path, 1)
    monkeypatch.undo()
    verdict = judge_traces(job, whole, tmp_path)
    assert verdict.failed[0].phase == "forward", verdict.render()


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"layout": {"pipeline": 2}}, r"layout.pipeline = 2"),
        ({"execution": {"exact": True}}, r"execution.exact = true"),
        ({"execution": {"compile": "default"}}, r"execution.compile"),
        ({"batch": {"grains_per_microbatch": 2}}, r"batch.grains_per_microbatch = 2 of the 8 grains of a rank"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_plans_that_cannot_have_it_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        shoal.verify(job_of(), shoal.Plan().with_sections(**sections), steps=1)


def test_a_loss_that_mixes_samples_is_refused_and_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    def mixed(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        scores = model(batch[0])
        return (scores - scores.mean(0)).square().sum(), len(scores)

    with pytest.raises(JobError, match=r"with 4 microbatches a rank.*write Job\(outputs="):
        traced(job_of(loss=mixed), 2, tmp_path / "mixed")

    def odd(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        if bool((batch[1] == 99).any()):
            raise ValueError("an odd sample")
        return loss(model, batch)

    job = job_of(loss=odd)
    labels = job.train_data[1].clone()
    labels[15] = 99  # in the last grain of the first step
    with pytest.raises(ShoalError, match="an odd sample"):
        traced(replace(job, train_data=(job.train_data[0], labels)), 2, tmp_path / "odd")


def test_sync_batch_norm_is_told_what_to_write() -> None:
    job = job_of(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Net()), batch_norm="grain")
    with pytest.raises(JobError, match=r'write Job\(batch_norm="batch"\)'):
        seeded_model(job)
