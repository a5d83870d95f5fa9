"""Optimizers that compute the loss several times in a step: LBFGS and SAM, on one process and on data ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching import EXAMPLES, Run, run, run_all
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.errors import ShoalError
from shoal.numerics.checksum import bits_checksum
from shoal.plans.resolve import complete
from shoal.training.microbatch.step import StepRunner
from shoal.training.observe.trace.traces import StepTrace, read
from shoal.training.setup.job_model import seeded_model
from shoal.verification.forked import trace_forked

sys.path.append(str(EXAMPLES))
import poisson

pytestmark = pytest.mark.ranks

FILE = EXAMPLES / "poisson.py"


def traced(job: shoal.Job, folder: Path, steps: int = 3, ranks: int = 1, **sections: dict[str, Any]) -> list[StepTrace]:
    plan = shoal.Plan().with_sections(layout={"data": ranks}, **sections)
    whole = complete(plan, job.num_grains, job.grain_size)
    trace_forked(lambda: job, whole, folder, steps)
    return [read(folder / "parallel", step, ranks) for step in range(steps)]


def plain(job: shoal.Job, steps: int) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Losses, numbers of evaluations, and weights of plain torch, whose closure computes the whole batch."""
    model = seeded_model(job)
    optimizer: Any = job.optimizer(list(model.parameters()))
    losses, counts = [], []
    for _ in range(steps):
        evaluated: list[float] = []

        def closure(evaluated: list[float] = evaluated) -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                total, weight = job.loss(model, tuple(tensor.clone() for tensor in job.train_data))
                (total / weight).backward()
            evaluated.append(float(total.detach() / weight))
            return (total / weight).detach()

        optimizer.step(closure)
        losses.append(evaluated[0])
        counts.append(len(evaluated))
    return losses, counts, {name: parameter.detach() for name, parameter in model.named_parameters()}


def wide(job: shoal.Job) -> shoal.Job:
    """The job in float64, where the order of a sum moves no line search within a few steps."""
    where, inside = job.train_data
    return replace(job, model=lambda: poisson.network().double(), train_data=(where.double(), inside))


@parametrize("line_search", ["strong_wolfe", ""], usual=["strong_wolfe"])
def test_lbfgs_trains_as_in_plain_torch(line_search: str, tmp_path: Path) -> None:
    job = wide(poisson.job(line_search=line_search))
    losses, counts, weights = plain(job, 3)
    assert line_search == "" or len(set(counts)) > 1
    for ranks in (1, 2):
        steps = traced(job, tmp_path / str(ranks), 3, ranks)
        assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(steps[-1].parameters[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_exact_mode_has_one_hash_on_one_to_four_ranks(tmp_path: Path) -> None:
    job = poisson.job(max_iter=5)
    ends = [traced(job, tmp_path / str(ranks), 2, ranks, execution={"exact": True})[-1] for ranks in (1, 2, 3, 4)]
    assert len({bits_checksum([end.parameters[name] for name in sorted(end.parameters)]) for end in ends}) == 1


def net(*, drops: bool = True) -> nn.Sequential:
    """A network with dropout and running statistics."""
    last = [nn.Dropout(0.5)] if drops else []
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), *last, nn.Linear(8, 1))


def job_of(optimizer: Callable[[Any], Any], *, drops: bool = True, **changes: Any) -> shoal.Job:
    drawn = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    job = shoal.Job(
        model=lambda: net(drops=drops),
        loss=lambda model, batch: ((model(batch[0]).squeeze(1) - batch[1]).square().sum(), len(batch[0])),
        optimizer=optimizer,
        train_data=(drawn, drawn.sum(1)),
        global_batch=24,
        grains=4,
        shuffle=False,
        length=shoal.Steps(3),
    )
    return replace(job, **changes)


class Repeats(torch.optim.SGD):
    """Computes the loss again where it is, without the gradients that the step has computed, and compares."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        first = [p.grad for p in parameters]
        known = closure()
        assert all(p.grad is gradient for p, gradient in zip(parameters, first, strict=True))
        self.zero_grad()
        assert torch.equal(closure(), known)
        for p, gradient in zip(parameters, first, strict=True):
            assert p.grad is not gradient
            assert torch.equal(p.grad, gradient)
        for p in parameters:
            p.data.mul_(0.5)  # of which torch counts nothing
        assert not torch.equal(closure(), known)
        for p, gradient in zip(parameters, first, strict=True):
            p.data.mul_(2.0)
            p.grad = gradient
        super().step()


@parametrize(
    "sections",
    [{"execution": {"exact": True}}, {"batch": {"grains_per_microbatch": 1}}],
    ids=["exact", "fast"],
    usual=["fast"],
)
def test_each_evaluation_has_the_same_draws_and_buffers_move_once(sections: dict[str, Any], tmp_path: Path) -> None:
    drawn = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    changes = {"train_data": (drawn, drawn.sum(1))}  # the second step has one grain, on one rank
    kinds = {"repeats": Repeats, "once": torch.optim.SGD}
    for ranks in (1, 2):
        ends = {
            name: traced(
                job_of(lambda p, kind=kind: kind(p, lr=0.1), **changes),
                tmp_path / f"{name}{ranks}",
                3,
                ranks,
                **sections,
            )
            for name, kind in kinds.items()
        }
        for one, other in zip(*ends.values(), strict=True):
            assert one.loss == other.loss
            for phase in ("update", "buffers"):
                assert {n: bits_checksum([t]) for n, t in one.phase(phase).items()} == {
                    n: bits_checksum([t]) for n, t in other.phase(phase).items()
                }


def test_sam_trains_as_in_plain_torch(tmp_path: Path) -> None:
    """Its group is the global batch on any number of ranks; batch statistics are those of one grain here."""
    job = job_of(lambda p: poisson.SAM(p, lr=0.1, rho=0.5), drops=False, grains=2)
    job = replace(job, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    losses, counts, weights = plain(job, 3)
    assert counts == [2, 2, 2]
    for ranks in (1, 2):
        steps = traced(job, tmp_path / str(ranks), 3, ranks)
        assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(steps[-1].parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_sam_in_groups_of_samples(tmp_path: Path) -> None:
    """Each group of 6 of 24 samples has its own point, on any number of ranks; buffers move once."""
    made = job_of(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), drops=False, grains=4, fuse=False)
    made = replace(made, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    job = replace(made, loss=poisson.sharp(made.loss, 0.5))
    model = seeded_model(job)
    optimizer = job.optimizer(list(model.parameters()))
    losses = []
    for _ in range(3):
        sums, mean = [torch.zeros_like(p) for p in model.parameters()], 0.0
        for start in range(0, 24, 6):
            group = tuple(tensor[start : start + 6] for tensor in job.train_data)
            before = [p.detach().clone() for p in model.parameters()]
            total, weight = made.loss(model, group)
            slopes = torch.autograd.grad(total / weight, list(model.parameters()))
            norm = torch.sqrt(sum((slope.square().sum() for slope in slopes), torch.zeros(())))
            with torch.no_grad():
                for p, slope in zip(model.parameters(), slopes, strict=True):
                    p += 0.5 * slope / norm
            total, _ = made.loss(model, group)
            mean += float(total.detach()) / 24
            for one, slope in zip(sums, torch.autograd.grad(total / 24, list(model.parameters())), strict=True):
                one += slope
            with torch.no_grad():
                for p, value in zip(model.parameters(), before, strict=True):
                    p.copy_(value)
        for p, one in zip(model.parameters(), sums, strict=True):
            p.grad = one
        optimizer.step()
        losses.append(mean)
    hashes = set()
    for ranks in (1, 2, 3, 4):
        for exact in (True, False):
            folder = tmp_path / f"{ranks}{exact}"
            steps = traced(job, folder, 3, ranks, execution={"exact": exact})
            assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
            end = steps[-1].parameters
            for name, value in model.named_parameters():
                torch.testing.assert_close(end[name], value.detach(), rtol=1e-4, atol=1e-5, msg=name)
            if exact:
                hashes.add(bits_checksum([end[name] for name in sorted(end)]))
    assert len(hashes) == 1
    moving = replace(job_of(torch.optim.SGD, grains=4), loss=poisson.sharp(made.loss, 0.5), fuse=False)
    plan = shoal.Plan().with_sections(layout={"data": 2})
    verdict = shoal.verify(moving, plan, 2)
    assert verdict.verified, verdict.render()
    assert traced(moving, tmp_path / "moving", 1, 2)[0].phase("buffers")["1.num_batches_tracked"] == 1


def test_a_resumed_run_has_the_history(tmp_path: Path) -> None:
    whole, cut = run_all(
        [
            Run(FILE, tmp_path / "whole", 1, exact=True, settings={"steps": 4, "max_iter": 5}),
            Run(
                FILE, tmp_path / "cut", 2, exact=True, settings={"steps": 4, "max_iter": 5}, arguments=("--steps", "2")
            ),
        ]
    )
    cut.expect(0)
    resumed = run(Run(FILE, tmp_path / "cut", 1, arguments=("--resume", "--steps", "4"))).expect(0)
    for key in ("weights_sha256", "sample_digest", "train_loss", "steps", "samples"):
        assert resumed.result[key] == whole.result[key], key
    assert whole.result["samples"] == 4 * 256


def test_an_error_in_a_later_evaluation_ends_all_ranks(tmp_path: Path) -> None:
    evaluations: list[int] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        if torch.equal(batch[0][0], last):
            evaluations.append(1)
            if len(evaluations) > LOOKS:
                raise ValueError("at the end")
        return (model(batch[0]).squeeze(1) - batch[1]).square().sum(), len(batch[0])

    made = job_of(torch.optim.LBFGS, drops=False)
    last = made.train_data[0][18]
    with pytest.raises(ShoalError, match="at the end"):
        traced(replace(made, loss=loss), tmp_path, 2, 2, execution={"exact": True})


LOOKS = 12


SHARED = {"memory": {"shared": True}, "collectives": {"all_reduce": "shared_memory"}}


def test_layouts_that_divide_parameters_or_gradients_are_refused(tmp_path: Path) -> None:
    for sections in ({"collectives": {"compression": "bfloat16"}}, SHARED):
        with pytest.raises(ShoalError, match=r"computes? (the loss again|several gradients)"):
            traced(job_of(torch.optim.LBFGS), tmp_path / next(iter(sections)), 1, 2, **sections)


def test_a_verification_finds_a_later_evaluation_of_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(lambda p: poisson.SAM(p, lr=0.1, rho=0.5))
    plan = shoal.Plan().with_sections(layout={"data": 2}, batch={"grains_per_microbatch": 1})
    assert shoal.verify(job, plan, 2).verified
    run_again = StepRunner.run_again

    def fewer(runner: StepRunner, step: int, factor: float) -> Any:
        del runner._copies[1:]
        return run_again(runner, step, factor)

    monkeypatch.setattr(StepRunner, "run_again", fewer)
    failed = shoal.verify(job, plan, 2).failed
    assert {check.phase for check in failed} == {"update"}
