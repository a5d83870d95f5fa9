"""The optimizer that a job makes, and what is refused as one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.distributed.mesh import alone
from shoal.errors import JobError, UserCodeError
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.update.closure import needs_closure
from shoal.training.update.job_optimizer import (
    Parameters,
    build_optimizer,
    refuse_divided,
    refuse_served,
    step_error,
    unsuited,
    without_optimizer,
)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_parameters_are_those_that_train_each_once() -> None:
    made = model()
    made[2].weight.requires_grad_(False)
    made.tied = made[0]
    parameters = Parameters(made)
    assert [name for name, _ in parameters.named] == ["0.weight", "0.bias", "2.bias"]
    assert [p for _, p in parameters.named] == list(parameters)
    assert list(parameters.named) == list(parameters.named)
    with pytest.raises(JobError, match="a Tanh without trainable parameters"):
        Parameters(nn.Tanh())


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class Sam(torch.optim.SGD):
    """As it is published: the signature allows None, and the step does not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharpness Aware Minimization requires closure"
        return super().step()


class Raising(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("needs one")


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NeedsClosure, Sam, Raising, torch.optim.SGD, torch.optim.Adam])
def test_the_need_of_a_closure_is_read_from_step(kind: type[torch.optim.Optimizer]) -> None:
    needs = kind not in (torch.optim.SGD, torch.optim.Adam)
    assert needs_closure(build_optimizer(lambda p: kind(p, lr=0.1), Parameters(model()))) == needs


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), "an optimizer with 1 tensors"),
        (lambda p: torch.optim.SGD([*p, torch.zeros(2), torch.zeros(1)], lr=0.1), "an optimizer with 2 tensors"),
        (lambda p: torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(p, lr=0.1), lambda s: 1.0), "returned LambdaLR"),
        (lambda p: None, "returned NoneType"),
        (lambda p: torch.optim.SGD, "returned type"),
    ],
)
def test_what_cannot_be_stepped_once_a_step_is_refused(make: Callable[[Any], Any], given: str) -> None:
    with pytest.raises(JobError) as caught:
        build_optimizer(make, Parameters(model()))
    assert given in caught.value.given


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (TypeError("closure is a NoneType"), JobError, "compute the loss once"),
        (RuntimeError("aten.copy_.default got mixed torch.Tensor and DTensor"), JobError, "a form of its own"),
        (ValueError("other"), UserCodeError, "it raised ValueError: other"),
    ],
)
def test_a_step_that_raises_names_the_cause(error: Exception, kind: type[Exception], says: str) -> None:
    found = step_error(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), error)
    assert type(found) is kind
    assert says in found.conflict


def test_an_optimizer_function_that_raises_is_told() -> None:
    with pytest.raises(UserCodeError, match=r"the optimizer function .* raised ValueError: Invalid learning"):
        build_optimizer(lambda p: torch.optim.SGD(p, lr=-1.0), Parameters(model()))
    with pytest.raises(UserCodeError, match="Muon only supports 2D") as caught:
        build_optimizer(lambda p: torch.optim.Muon(p, lr=0.1), Parameters(model()))
    assert "dataset" not in caught.value.remedy
    assert "the optimizer function gets every parameter" in caught.value.remedy


def test_parameters_may_be_grouped_by_name() -> None:
    def make(parameters: Parameters) -> torch.optim.Optimizer:
        decay = [p for name, p in parameters.named if name.endswith("weight")]
        rest = [p for name, p in parameters.named if not name.endswith("weight")]
        return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])

    assert [len(g["params"]) for g in build_optimizer(make, Parameters(model())).param_groups] == [2, 2]


def test_a_rank_of_frozen_stages_has_an_optimizer_of_nothing() -> None:
    made = model().requires_grad_(False)
    elsewhere = nn.Linear(2, 2, device="meta")
    parameters = Parameters(nn.ModuleList([made, elsewhere]))
    assert parameters == []
    optimizer = build_optimizer(lambda p: torch.optim.AdamW(p, lr=0.1), parameters)
    optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == [[]]
    grouped = build_optimizer(lambda p: torch.optim.SGD([{"params": [q for _, q in p.named]}], lr=0.1), parameters)
    assert [group["params"] for group in grouped.param_groups] == [[]]
    with pytest.raises(JobError, match="nothing to train"):
        Parameters(made)


class Within(torch.optim.Optimizer):
    """An optimizer that holds another, and a tensor of its own."""

    def __init__(self, parameters: Any) -> None:
        self.inner, self.slow = torch.optim.SGD(parameters, lr=0.5), torch.zeros(2)
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Free(torch.optim.SGD):
    """An optimizer with evaluation weights."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    parameters, mesh = Parameters(made := model()), alone(torch.device("cpu"))
    divided = ShardedModel(mesh, made, divides_state=True)
    with pytest.raises(JobError, match="optimizer Within, which keeps a tensor in slow"):
        refuse_divided(build_optimizer(Within, parameters), divided, lambda p: True)
    free = build_optimizer(lambda p: Free(p, lr=0.1), parameters)
    refuse_divided(free, divided, lambda p: True)
    with pytest.raises(JobError, match=r"optimizer Free, which has train\(\) and eval\(\)"):
        refuse_divided(free, divided, lambda p: p.ndim > 1)
    for optimizer in (build_optimizer(Within, parameters), free):
        refuse_divided(optimizer, ShardedModel(mesh, made), lambda p: False)
        with pytest.raises(JobError, match="with parameter servers"):
            refuse_served(optimizer)
    refuse_served(build_optimizer(lambda p: torch.optim.SGD(p, lr=0.1), parameters))


def test_parameters_of_no_group_are_named() -> None:
    parameters = Parameters(model())
    some = build_optimizer(lambda p: torch.optim.SGD([q for q in p if q.ndim > 1], lr=0.1), parameters)
    (said,) = without_optimizer([some], parameters.named)
    assert said.startswith("no optimizer updates 0.bias, 2.bias, which require a gradient")
    assert without_optimizer([build_optimizer(Within, parameters)], parameters.named) == []


def test_what_muon_is_not_meant_for_is_named() -> None:
    made = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    every = build_optimizer(lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]), Parameters(made))
    (said,) = unsuited(every, made)
    assert said.startswith("Muon updates 0.weight, 2.weight: it is meant for the matrices between")
    assert unsuited(build_optimizer(lambda p: torch.optim.Muon([made[1].weight]), Parameters(made)), made) == []
    assert unsuited(build_optimizer(torch.optim.AdamW, Parameters(made)), made) == []

    class MuonAndAdamW(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.muon = torch.optim.Muon([made[1].weight])
            self.others = torch.optim.AdamW([p for p in parameters if p is not made[1].weight])
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            self.muon.step()
            self.others.step()

    assert unsuited(build_optimizer(MuonAndAdamW, Parameters(made)), made) == []
