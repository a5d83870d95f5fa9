"""Hooks on parameters: called by nobody but `call`, with what is in `.grad` then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import JobError, UserCodeError
from shoal.parallel.model.parameter_hooks import ParameterHooks, refuse_hooks
from shoal.parallel.model.sharded_model import TensorSlice


def line() -> nn.Linear:
    return nn.Linear(2, 2)


def called(model: nn.Module, hooks: ParameterHooks, key: int = 1) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    hooks.call(dict(model.named_parameters()), key)


def test_autograd_calls_them_no_more_until_they_are_given_back() -> None:
    model, seen = line(), list[str]()
    model.weight.register_hook(lambda gradient: seen.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("parameter"))
    hooks = ParameterHooks(model)
    model(torch.ones(1, 2)).sum().backward()
    assert seen == []
    called(model, hooks)
    assert seen == ["gradient", "parameter"]
    hooks.give_back(model)
    model(torch.ones(1, 2)).sum().backward()
    assert seen == ["gradient", "parameter"] * 2


def test_what_a_hook_returns_or_sets_is_the_gradient() -> None:
    model = line()
    model.weight.register_hook(lambda gradient: gradient.clamp(max=1.0))

    def dropped(parameter: Tensor) -> None:
        parameter.grad = None

    model.bias.register_post_accumulate_grad_hook(dropped)
    called(model, ParameterHooks(model))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert model.bias.grad is None


def test_a_handle_still_removes_its_hook() -> None:
    model, seen = line(), list[Tensor]()
    handle = model.weight.register_hook(seen.append)
    hooks = ParameterHooks(model)
    handle.remove()
    called(model, hooks)
    assert seen == []


def test_random_numbers_are_the_seeds_and_leave_the_generators_alone() -> None:
    found = []
    for _ in range(2):
        model = line()
        model.weight.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
        before = torch.get_rng_state()
        called(model, ParameterHooks(model), key=5)
        assert torch.equal(before, torch.get_rng_state())
        torch.rand(3)
        found.append(model.weight.grad)
    assert torch.equal(*found)  # type: ignore[misc]


def test_an_optimizer_within_a_hook_is_refused() -> None:
    model = line()
    model.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.sub_(parameter.grad))  # type: ignore
    with pytest.raises(JobError, match="parameter weight that changes the parameter itself"):
        called(model, ParameterHooks(model))


def test_what_a_hook_raises_names_the_parameter() -> None:
    model = line()

    def wrong(gradient: Tensor) -> None:
        raise ValueError("no")

    model.bias.register_hook(wrong)
    with pytest.raises(UserCodeError, match="a hook on the parameter bias"):
        called(model, ParameterHooks(model))


def test_a_parameter_that_the_tensor_axis_cuts_is_refused_by_name() -> None:
    model = line()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: None)
    hooks = ParameterHooks(model)
    parts = {"weight": TensorSlice.whole((2, 2)), "bias": TensorSlice.whole((2,)).narrow(0, 0, 1)}
    with pytest.raises(JobError, match="a hook on the parameter bias, with tensor > 1"):
        refuse_hooks(hooks, parts, shoal.Plan())
