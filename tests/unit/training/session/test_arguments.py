"""What is given to `prepare`, `Session` and the loop is taken as it is meant, or refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import DataError, JobError, PlanError, UserCodeError


def session(**changes: Any) -> shoal.Session:
    return shoal.Session(**{"global_batch": 4, **changes})


def data() -> TensorDataset:
    return TensorDataset(torch.ones(8, 2), torch.ones(8, 1))


def line() -> nn.Linear:
    return nn.Linear(2, 1)


def sgd(*models: nn.Module) -> SGD:
    return SGD([p for model in models for p in model.parameters()], lr=0.1)


def of_accelerate() -> Any:
    made = type("AcceleratedOptimizer", (SGD,), {"__module__": "accelerate.optimizer"})
    return made(line().parameters(), lr=0.1)


def data_parallel() -> nn.Module:
    return nn.DataParallel(line())


def twice() -> tuple[Any, ...]:
    model = line()
    return model, sgd(model), model


def in_two_optimizers() -> tuple[Any, ...]:
    model = line()
    return model, sgd(model), sgd(model)


def other_optimizer() -> tuple[Any, ...]:
    model = line()
    return model, sgd(model), lr_scheduler.StepLR(sgd(model), 1)


# What is given to prepare, and then steps() is called; and what is said.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a DataLoader": (lambda: (line(), DataLoader(data())), "give the DataLoader to session.steps(loader, epochs=3)"),
    "a dataset": (lambda: (line(), data()), "give it to session.steps(dataset, epochs=3)"),
    "None": (lambda: (line(), None), "there is nothing to prepare"),
    "nothing": (tuple, "give the model and the optimizer"),
    "a model twice": (twice, "the same Linear twice"),
    "a wrapped model": (data_parallel, "give the bare module"),
    "a compiled model": (lambda: torch.compile(line(), backend="eager"), "give the model itself"),
    "a GradScaler": (lambda: torch.amp.GradScaler("cpu"), 'shoal.Session(precision="fp16")'),
    "an object of another trainer": (of_accelerate, "give the object itself, as it was before that"),
    "LBFGS": (
        lambda: (m := line(), torch.optim.LBFGS(m.parameters())),
        "whose step() needs a closure",
    ),
    "a class": (lambda: nn.Linear, "a class Linear"),
    "a function": (lambda: line, "it is no model, optimizer or scheduler of torch"),
    "no model": (lambda: sgd(line()), "session.steps() before session.prepare()"),
    "no optimizer": (line, "the session does not know the optimizer"),
    "an optimizer of another model": (lambda: (line(), sgd(line())), "2 of 2 parameters, the first of shape [1, 2]"),
    "a parameter in two optimizers": (in_two_optimizers, "step.batches(shared_optimizer, optimizer)"),
    "a scheduler of another optimizer": (other_optimizer, "of an optimizer that is not prepared"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken_is_refused_in_words(name: str) -> None:
    make, words = REFUSED[name]
    given = make()
    with session() as own, pytest.raises(JobError, match=re.escape(words)):
        begin(own, given if isinstance(given, tuple) else (given,))


def begin(own: shoal.Session, given: tuple[Any, ...]) -> None:
    own.prepare(*given)
    own.steps(data())


def test_a_model_without_an_optimizer_is_taken() -> None:
    student, teacher = line(), line().requires_grad_(False)
    with session() as own:
        assert own.prepare(teacher) is teacher
        model, _ = own.prepare(student, sgd(student))
        for step in own.steps(data()):
            for inputs, _ in step:
                step.backward((model(inputs) - teacher(inputs)).square().sum(), len(inputs))
        assert step.loss > 0.0
        with pytest.raises(JobError, match=r"metrics, model=generator"):
            own.evaluate(data(), {})
        assert own.evaluate(data(), {}, model=teacher) == ({}, 8)
        with pytest.raises(JobError, match=r"after session\.steps"):
            own.prepare(line())


@pytest.fixture
def loop() -> Iterator[tuple[shoal.Session, nn.Module, SGD, SGD]]:
    first, second = line(), line()
    with session(global_batch=8, grains=4) as own:
        own.prepare(first, second, one := sgd(first), other := sgd(second))
        yield own, first, one, other


def test_several_optimizers_are_told_apart(loop: Any) -> None:
    own, *_ = loop
    steps = own.steps(data())
    step = next(steps)
    with pytest.raises(JobError, match=re.escape("for batch in step.batches(optimizer)")):
        list(step)


def test_an_optimizer_that_was_not_prepared(loop: Any) -> None:
    own, model, *_ = loop
    steps = own.steps(data())
    step = next(steps)
    with pytest.raises(JobError, match="that was not prepared"):
        step.batches(sgd(model))


def test_what_a_session_does_itself(loop: Any) -> None:
    own, model, one, _ = loop
    for step in own.steps(data()):
        for inputs, _ in step.batches(one):
            with pytest.raises(UserCodeError, match=r"leave optimizer\.zero_grad\(\) out"):
                one.zero_grad()
            step.backward(model(inputs).sum(), len(inputs))
            with pytest.raises(UserCodeError, match="a second time for the same batch"):
                step.backward(model(inputs).sum(), len(inputs))
        with pytest.raises(UserCodeError, match=r"leave optimizer\.step\(\) out"):
            one.step()
        with pytest.raises(UserCodeError, match="without a batch"):
            step.backward(model(inputs).sum(), len(inputs))
        one.zero_grad()
    one.step()


def test_a_scheduler_that_is_made_in_the_loop(loop: Any) -> None:
    own, model, one, _ = loop
    for step in own.steps(data(), epochs=2):
        if step.number == 1:
            scheduler = lr_scheduler.StepLR(one, 1)
        for inputs, _ in step.batches(one):
            step.backward(model(inputs).sum(), len(inputs))
        scheduler.step()
    assert one.param_groups[0]["lr"] == pytest.approx(1e-3)
    one.step()


def test_a_pass_with_nothing_to_train(loop: Any) -> None:
    own, model, one, _ = loop
    steps = own.steps(data())
    step = next(steps)
    model.requires_grad_(False)
    with pytest.raises(JobError, match="none of their parameters requires a gradient"):
        list(step.batches(one))


def test_a_step_has_one_plain_pass() -> None:
    model = line()
    with session() as own:
        own.prepare(model, sgd(model))
        for step in own.steps(data()):
            for inputs, _ in step:
                step.backward(model(inputs).sum(), len(inputs))
            with pytest.raises(JobError, match=re.escape("write step.batches(optimizer) for each")):
                list(step)
            break


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"global_batsh": 8}, "'global_batsh'; did you mean 'global_batch'?"),
        ({"global_batch": 8, "clipnorm": 1.0}, "did you mean 'clip_norm'?"),
        ({"global_batch": 8, "mixed_precision": "bf16"}, "for mixed_precision write precision"),
        ({"global_batch": 8, "gradient_accumulation_steps": 4}, "global_batch is the batch of one update"),
        ({"seed": 1}, "a Session without global_batch"),
    ],
)
def test_an_argument_of_another_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        shoal.Session(**given)


def test_a_plan_that_is_none() -> None:
    with pytest.raises(PlanError, match="the first argument of a Session is its plan"):
        shoal.Session(256, global_batch=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "arguments", "kind", "words"),
    [
        (iter([1]), {"epochs": 2}, JobError, "write session.steps(stream, shoal.Steps(1000))"),
        (data(), {"length": 5}, JobError, "a length says what it counts"),
        (data(), {"epochs": 0}, JobError, "a length says what it counts"),
        (data(), {"length": shoal.Steps(2), "epochs": 2}, JobError, "a training has one length"),
        (DataLoader(data(), batch_size=2), {}, DataError, "write batch_size=4 there"),
    ],
)
def test_what_is_no_length_or_no_data(dataset: Any, arguments: Any, kind: type[Exception], words: str) -> None:
    model = line()
    with session() as own:
        own.prepare(model, sgd(model))
        with pytest.raises(kind, match=re.escape(words)):
            own.steps(dataset, **arguments)


def test_an_overflow_leaves_out_its_own_update_only() -> None:
    """The scale halves for the next pass, not for the next step."""
    torch.manual_seed(0)
    first, second = line(), line()
    with session(precision="fp16", global_batch=8) as own:
        own.prepare(first, second, one := sgd(first), other := sgd(second))
        before = [p.detach().clone() for p in (first.weight, second.weight)]
        norms = []
        for step in own.steps(data()):
            for model, optimizer, by in ((first, one, 100.0), (second, other, 1.0)):
                for inputs, _ in step.batches(optimizer):
                    step.backward((model(inputs) * by).sum(), len(inputs))
                norms.append(step.grad_norm)
    assert norms[0] == float("inf")
    assert norms[1] == pytest.approx(3**0.5)
    assert torch.equal(first.weight, before[0])
    torch.testing.assert_close(second.weight, before[1] - 0.1)
