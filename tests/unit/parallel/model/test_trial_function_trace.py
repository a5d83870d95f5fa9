"""A traced run sees every torch function with its tensors, and leaves nothing behind."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.parallel.model.trial import FunctionCall, FunctionTrace, dropout_arguments, on_copies


class Names(FunctionTrace):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[FunctionCall] = []
        self.ids: list[int] = []

    def seen(self, call: FunctionCall) -> None:
        self.calls.append(call)
        self.ids += [id(tensor) for tensor in call.results]


def test_calls_are_seen_with_their_tensors() -> None:
    x, y = torch.ones(2), torch.ones(2)
    with Names() as trace:
        found = torch.add(x, other=y)
        F.scaled_dot_product_attention(torch.ones(1, 1, 2, 2), x.expand(1, 1, 2, 2), torch.ones(1, 1, 2, 2), None, 0.5)
    add, attention = trace.calls[0], trace.calls[-1]
    assert (add.name, [id(t) for t in add.given]) == ("add", [id(x), id(y)])
    assert add.results[0] is found
    assert attention.argument(4, "dropout_p", 0.0) == 0.5
    assert attention.argument(5, "is_causal", False) is False


def test_an_id_is_that_of_one_tensor() -> None:
    with Names() as trace:
        for n in range(50):
            torch.full((), n)  # dropped at once
    assert len(set(trace.ids)) == 50


def test_hooks_go_with_the_trace() -> None:
    module, told = nn.Linear(2, 2), []
    trace = Names()
    trace.hook(module, lambda *_: told.append("after"), lambda *_: told.append("before"))
    with trace:
        module(torch.ones(2))
    module(torch.ones(2))
    assert told == ["before", "after"]


@pytest.mark.parametrize("with_values", [False, True])
def test_a_run_on_copies_changes_nothing(with_values: bool) -> None:
    model, batch = nn.Linear(2, 2), {"x": torch.ones(3, 2), "ids": torch.arange(3)}
    model.alias = model.weight
    held, state = dict(model.named_parameters()), torch.get_rng_state()
    values = (lambda name: held[name].detach() + 1) if with_values else None
    kept: list[torch.Tensor] = []

    @functools.lru_cache(maxsize=1)
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        kept.append(model(batch["x"]))
        return kept[0].sum() + positions(len(batch["x"])).sum()

    positions(2)
    with on_copies(model, loss, batch, values) as (copied, shown):
        loss(copied, shown)
        assert copied.alias is copied.weight is not model.weight
        shadows = [isinstance(t, FakeTensor) for t in (shown["x"], shown["ids"], *copied.parameters())]
        assert shadows == ([False] * 4 if with_values else [True, False, True, True])  # integers have their values
        F.dropout(copied(shown["x"]), 0.5).sum().backward()
        if with_values:
            assert torch.equal(copied.weight, model.weight + 1)
            shown["x"].sub_(0)
        else:
            shown["ids"].add_(1)
    assert torch.equal(batch["ids"], torch.arange(3))
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not kept
    assert not positions.cache_info().currsize  # of a trace that has made its own positions nothing stays


@pytest.mark.parametrize(
    ("args", "kwargs", "active"),
    [((), {}, True), ((0.0,), {}, False), ((0.5, False), {}, False), ((0.5,), {"train": False}, False)],
)
def test_whether_a_dropout_drops(args: tuple[object, ...], kwargs: dict[str, bool], active: bool) -> None:
    input: Tensor = torch.ones(1)
    assert dropout_arguments(input, *args, **kwargs)[2] is active  # type: ignore[arg-type]
