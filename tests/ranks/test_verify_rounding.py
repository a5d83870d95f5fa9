"""What rounds more in a later step, and what is finite in float32 only, is no divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.training.observe.trace.traces import StepTrace
from shoal.training.setup.preflight import judged as complete
from shoal.verification import Verdict
from shoal.verification.forked import trace_forked
from shoal.verification.judge import judge
from shoal.verification.traced_run import read_outcome

pytestmark = pytest.mark.ranks

STEEP = 1e5
CPU = torch.device("cpu")


class Steep(nn.Module):
    """A sine of large angles, which are zero and so exact before the first update."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        nn.init.zeros_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)
        self.sine = Sine()

    def forward(self, x: Tensor) -> Tensor:
        return self.sine(self.inner(x))


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(STEEP * x)


class Threaded(nn.Linear):
    """A layer that also calls a kernel, the output of which it does not use: the loss is a sum over grains."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__(8, 4)
        self.kernel = Kernel(off)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.kernel(found.detach())
        return found


class Kernel(nn.Module):
    """It rounds otherwise where one thread computes several grains, as products in bfloat16 do with AMX."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.off = off

    def forward(self, x: Tensor) -> Tensor:
        rounded = torch.get_num_threads() == 1 and len(x) > 4
        return x * (1.0 + (1e-4 if rounded else 0.0) + self.off)


class Hidden(nn.Module):
    """A mask made in one dtype and added in another: in float64 a row that sees nothing is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.value = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.ask(x)
        hidden = torch.full_like(scores, torch.finfo(scores.dtype).min).float()
        return self.value((hidden + scores.detach() * 0).softmax(-1).to(x) * scores)


class Centered(nn.Module):
    """A shift before the batch's mean is subtracted: its gradient is zero, here to the bit, of terms that are not."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.shift, self.off = nn.Parameter(torch.zeros(8)), off

    def forward(self, x: Tensor) -> Tensor:
        y = x.round() + self.shift
        return y - y.mean(0) + self.shift * self.off / 8


class Recomputed(nn.Module):
    """The user's own recomputation around buffers; half of a weight is frozen after its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.layer.weight.register_post_accumulate_grad_hook(self.freeze)

    @staticmethod
    def freeze(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad[::2] = 0.0

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) - 1.0).square().sum(), len(batch)


def job(model: Callable[[], nn.Module]) -> shoal.Job:
    return shoal.Job(
        model=model,
        loss=squares,
        optimizer=partial(torch.optim.SGD, lr=1e-6),
        train_data=torch.randn(16, 8, generator=torch.Generator().manual_seed(0)),
        global_batch=8,
        grains=2,
        length=shoal.Steps(2),
    )


def nudged(steps: Iterator[StepTrace], share: float) -> Iterator[StepTrace]:
    """The traces as a rank leaves them whose sine is off by a share in the second step."""
    for trace in steps:
        if trace.step == 1:
            (call,) = [call for call in trace.forward if call.startswith("sine")]
            own = trace.forward[call]
            trace.forward[call] = {grain: [number * (1 + share) for number in found] for grain, found in own.items()}
        yield trace


def test_a_later_step_is_computed_in_all_ways_before_it_is_called_wrong(tmp_path: Path) -> None:
    """Rounding makes of these angles a thousand times what the first step has shown, and of an error still more."""
    made = job(Steep)
    plan = complete(made, shoal.Plan()).plan
    trace_forked(lambda: made, plan, tmp_path, 2)
    traced = read_outcome(tmp_path / "parallel")

    def judged(share: float) -> Verdict:
        steps = nudged(traced.steps(tmp_path / "parallel"), share)
        return judge(made, plan, traced, steps, torch.device("cpu"))

    within, beyond = judged(1e-5), judged(1e-2)
    assert within.verified, within.render()
    assert not beyond.verified
    assert beyond.failed[0].name.startswith("sine")


def test_a_kernel_that_rounds_by_threads_and_shape_is_no_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks have one thread, and no other reference computes several grains on one."""
    monkeypatch.setattr("shoal.verification.judge.cores", lambda: 2)
    plan = complete(job(Threaded), shoal.Plan.model_validate({"batch": {"grains_per_microbatch": 2}})).plan

    def judged(off: float) -> Verdict:
        folder = tmp_path / str(off)
        trace_forked(lambda: job(partial(Threaded, off)), plan, folder, 2)
        traced = read_outcome(folder / "parallel")
        return judge(job(Threaded), plan, traced, traced.steps(folder / "parallel"), CPU)

    within, beyond = judged(0.0), judged(2e-3)
    assert within.verified, within.render()
    assert [check.name for check in beyond.failed] == ["kernel"]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.AdamW, weight_decay=0.1)])
def test_a_gradient_whose_terms_cancel_is_rounded_as_its_terms_are(optimizer: Any, tmp_path: Path) -> None:
    """Adam makes a whole step of the rest, which is judged by what Adam makes of the run's own gradient."""
    plan = complete(job(Centered), shoal.Plan()).plan

    def judged(off: float, folder: Path) -> Verdict:
        given = {"optimizer": partial(optimizer, lr=1e-2), "length": shoal.Steps(1)}
        trace_forked(lambda: replace(job(partial(Centered, off)), **given), plan, folder, 1)
        traced = read_outcome(folder / "parallel")
        return judge(replace(job(Centered), **given), plan, traced, traced.steps(folder / "parallel"), CPU)

    within, beyond = judged(1e-7, tmp_path / "within"), judged(1e-3, tmp_path / "beyond")
    assert within.verified, within.render()
    assert not beyond.verified
    assert (beyond.failed[0].phase, beyond.failed[0].name) == ("backward", "shift")


def test_a_hook_after_accumulation_and_a_forward_that_is_recomputed_are_verified() -> None:
    plan = shoal.Plan.model_validate({"layout": {"data": 2}, "batch": {"grains_per_microbatch": 1}})
    verdict = shoal.verify(replace(job(Recomputed), grains=4), plan, steps=2)
    assert verdict.verified, verdict.render()


def test_float64_that_is_not_finite_is_no_reference() -> None:
    verdict = shoal.verify(job(Hidden), shoal.Plan(), steps=1)
    assert verdict.verified, verdict.render()
    assert any("float64 reference is not finite" in note for note in verdict.notes)


class Narrow(torch.autograd.Function):
    """An operator of one's own with a backward in float32 alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.dtype != torch.float32:
            raise TypeError("float32 alone")
        return gradient * 2.0


class Doubles(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Narrow.apply(super().forward(x))
        return found


def test_what_only_float64_raises_is_no_error_of_the_job() -> None:
    verdict = shoal.verify(job(Doubles), shoal.Plan(), steps=1)
    assert verdict.verified, verdict.render()
    assert any("does not compute in it" in note and "float32 alone" in note for note in verdict.notes)


def layouts(rows: list[Tensor]) -> dict[str, Any]:
    x = torch.stack(rows).relu()
    ragged = [row[: 2 + number % 3] for number, row in enumerate(rows)]
    return {
        "csr": x.to_sparse_csr(),
        "coo": x.to_sparse_coo(),
        "jagged": torch.nested.nested_tensor(ragged, layout=torch.jagged),
        "nested": torch.nested.nested_tensor(ragged),
        "none": None,
        "text": ["row"] * len(rows),
    }


def of_all_layouts(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    assert isinstance(model, nn.Linear)
    found = torch.sparse.mm(batch["csr"], model.weight.T) + torch.sparse.mm(batch["coo"], model.weight.T)
    sizes = torch.stack([row.sum() for name in ("jagged", "nested") for row in batch[name].unbind()])
    return ((found + model.bias).sum(1) - sizes.view(2, -1).sum(0)).square().sum(), len(found)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
def test_batches_of_sparse_and_nested_tensors_are_verified() -> None:
    made = replace(job(partial(nn.Linear, 8, 4)), loss=of_all_layouts, collate=layouts)
    verdict = shoal.verify(made, shoal.Plan.model_validate({"layout": {"data": 2}}), steps=1)
    assert verdict.verified, verdict.render()
    assert {check.name for check in verdict.checks if check.phase == "data"} >= {"(batch)", "(batch)[1]", "(batch)[3]"}
