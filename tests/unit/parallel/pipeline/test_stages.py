"""Stages in one process: what is cut where, what each stage holds, and what is refused rather than computed wrongly."""

from __future__ import annotations

import copy
import functools
import itertools
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.models import GPT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.distributed.failures import user_error
from shoal.errors import JobError, PlanError, ShoalError
from shoal.parallel.base import backward_input, backward_weight, run_engine
from shoal.parallel.pipeline.stage_program import balanced
from shoal.parallel.pipeline.stages import Passed, Stages

CPU = torch.device("cpu")
BATCH = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2]))


def loss(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def linear_stack(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))


def trained(stages: Stages, function: Any, batch: Any, num_stages: int, split_backward: bool = False) -> Tensor:
    """All stages one after the other in this process; the loss."""
    passed: list[Passed] = []
    for stage in range(num_stages):
        values = [value.detach().clone() for value in passed[-1].values] if passed else []
        passed.append(stages.forward(stage, function, batch, lambda blanks, v=values: v))  # type: ignore[misc]
    total: Tensor = passed[-1].result[0]
    gradients: list[Any] = [torch.ones_like(total)]
    values = [total]
    weights = list(stages._model.parameters())
    for stage in reversed(range(num_stages)):
        roots = [torch.autograd.graph.get_gradient_edge(v) for v in values]
        received = passed[stage].received
        if split_backward and stage:
            found, rest = backward_input(roots, gradients, received, weights)
            backward_weight(rest, itertools.repeat(None))
            gradients = list(found)
        else:
            run_engine(roots, gradients)
            gradients = [value.grad for value in received]
        values = passed[stage - 1].values
    return total


def assert_as_one_process(model: nn.Module, function: Any, batch: Any, num_stages: int, *split: str) -> Stages:
    for halves in (False, True):
        alone, cut = copy.deepcopy(model), copy.deepcopy(model)
        wanted = function(alone, batch)[0]
        wanted.backward()
        stages = Stages.build(cut, function, batch, num_stages=num_stages, split=split)
        assert torch.equal(trained(stages, function, batch, num_stages, halves), wanted)
        for (name, a), b in zip(alone.named_parameters(), cut.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                assert torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-7), name
    return stages


def test_names_and_holdings() -> None:
    model = GPT(layers=4, width=64, heads=2, block=6, dropout=0.0)
    names = [name for name, _ in model.named_parameters()]
    tokens = torch.randint(0, 256, (2, 6))

    def next_token(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()

    stages = assert_as_one_process(model, next_token, tokens, 2)
    assert [name for name, _ in model.named_parameters()] == names
    assert stages.firsts == ["blocks.2"]
    assert stages.holds[0] & stages.holds[1] == {"embedding.weight"}
    assert stages.holds[0] | stages.holds[1] == set(names)


class Skip(nn.Module):
    """A value passes by the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = linear_stack(3)

    def forward(self, x: Tensor) -> Tensor:
        early = self.blocks[0](x)
        out: Tensor = self.blocks[2](torch.tanh(self.blocks[1](early))) + early
        return out


def test_a_value_that_crosses_another_way_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"'blocks.0' gives on a stage before is used after the cut, by add"):
        Stages.build(Skip(), loss, BATCH, num_stages=2, split=("blocks.2",))
    assert_as_one_process(Skip(), lambda m, b: loss(m.blocks, b), BATCH, 2)


class Memory(nn.Module):
    """Every block is given what the encoder made, as a decoder's are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


def test_an_argument_of_every_block_is_passed_on() -> None:
    assert_as_one_process(Memory(), loss, BATCH, 3, "blocks.1", "blocks.3")


class Loose(nn.Module):
    """A parameter and an in-place addition in code that spans the stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.offset = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.blocks = linear_stack(2)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += self.offset
        return F.linear(self.blocks(x) * self.scale, self.first.weight[:3])


def test_loose_parameters_are_held_where_their_code_runs() -> None:
    stages = assert_as_one_process(Loose(), loss, BATCH, 2, "blocks.1")
    assert "scale" in stages.holds[1] - stages.holds[0]
    assert {"offset", "first.weight"} <= stages.holds[0] & stages.holds[1]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PlanError, match="use 4 stages at most"):
        Stages.build(linear_stack(4), loss, BATCH, num_stages=5)
    with pytest.raises(PlanError, match="did you mean"):
        Stages.build(linear_stack(4), loss, BATCH, num_stages=2, split=("33",))
    with pytest.raises(PlanError, match="name 2 modules"):
        Stages.build(linear_stack(4), loss, BATCH, num_stages=3, split=("1",))
    with pytest.raises(PlanError, match=r"split = \['1', '2'\]"):
        Stages.build(linear_stack(4), loss, BATCH, num_stages=3, split=("2", "1"))
    with pytest.raises(JobError, match="run without data"):
        Stages.build(linear_stack(4), lambda m, b: (m(b[0]).sum().item(), 1), BATCH, num_stages=2)


def test_what_the_job_raises_without_data_is_not_called_its_fault() -> None:
    """As a kernel that has no version for tensors without data: with data it computes."""

    def grouped(model: nn.Module, batch: Any) -> Any:
        raise user_error("the model or loss", RuntimeError("Expected inputs of BF16 type"))

    with pytest.raises(JobError, match=r"run without data.*RuntimeError: Expected inputs of BF16.*batched_mm"):
        Stages.build(linear_stack(4), grouped, BATCH, num_stages=2)


@functools.lru_cache
def _positions(length: int) -> Tensor:
    return torch.arange(length) / length


class _Keeps(nn.Module):
    """Keeps outputs in a list and an attribute, and positions in a cache; a buffer moves."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.history, self.mean = linear_stack(4), [], torch.zeros(4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x + _positions(4))
        self.history.append(y.detach())
        self.mean, self.seen = 0.9 * self.mean + x.mean(0), self.seen + x.sum(0)
        return y - torch.stack(self.history).mean()


def test_a_trace_leaves_no_tensor_without_values() -> None:
    model, kept = _Keeps(), []

    def keeping(model: nn.Module, batch: Any) -> Any:
        total = model(batch[0]).sum()
        kept.append(total)
        return total, 1

    stages = Stages.build(model, keeping, BATCH, num_stages=2)
    with torch.no_grad():  # other programs, and the shapes that stubs have
        stages.blanks(1, keeping, BATCH)
    assert not model.history
    assert not kept
    assert not _positions.cache_info().currsize or type(_positions(4)) is Tensor
    assert {type(t) for t in (model.mean, model.seen)} == {Tensor}


def test_no_cut_within_a_reentrant_checkpoint() -> None:
    def recomputed(model: nn.Module, batch: Any) -> Any:
        x = batch[0].clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=True).sum(), 1

    with pytest.raises(PlanError, match="at 0 places"):
        Stages.build(linear_stack(4), recomputed, BATCH, num_stages=2)
    with pytest.raises(PlanError, match="use_reentrant=False"):
        Stages.build(linear_stack(4), recomputed, BATCH, num_stages=2, split=("2",))


def test_calls_that_follow_the_data_are_noticed() -> None:
    model = linear_stack(4)

    def loss_of(model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) if len(batch[0]) == 3 else model[2](model[1](batch[0]))).sum(), 1

    stages = Stages.build(model, loss_of, BATCH, num_stages=2, split=("2",))
    with pytest.raises(ShoalError, match="depend on the data"):
        stages.forward(1, loss_of, (torch.randn(2, 4),), lambda blanks: [blank.empty() for blank in blanks])


def test_a_stage_is_never_silent_about_what_it_lacks() -> None:
    """What stands for the modules before a stage is NaN."""
    stages = Stages.build(linear_stack(4), loss, BATCH, num_stages=2)
    seen = []
    stages.forward(
        1, loss, BATCH, lambda blanks: [seen.extend(b.filled() for b in blanks) or b.empty() for b in blanks]
    )  # type: ignore[func-returns-value]
    assert all(value.isnan().all() and value.untyped_storage().nbytes() == value.itemsize for value in seen)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5))
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(sizes))
    sums = [(sum(sizes[:i]), i) for i in range(len(sizes) + 1)]

    def largest(cuts: tuple[int, ...]) -> tuple[int, int]:
        edges = [0, *cuts, len(sizes)]
        return max((sums[b][0] - sums[a][0], b - a) for a, b in pairwise(edges))

    best = min(largest(cuts) for cuts in combinations(range(1, len(sizes)), num_stages - 1))
    assert largest(tuple(balanced(sums, num_stages))) == best


class Around:
    """Notes what is done at a module."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.left: list[Any] = []

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.noted.append("enter")
        return args, kwargs

    def leave(self, output: Any) -> None:
        self.noted.append("leave")
        self.left.append(output)

    def again(self) -> Any:
        raise AssertionError

    def begin(self) -> None:
        self.noted.append("begin")

    def stubbed(self, args: Any, kwargs: Any) -> None:
        self.noted.append("stubbed")


class Nested(nn.Module):
    """A stage begins within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear_stack(2), linear_stack(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_is_around_a_module_is_done_where_it_is_computed() -> None:
    stages = Stages.build(Nested(), loss, BATCH, num_stages=2, split=("blocks.0.1",))
    whole, cut = Around(), Around()
    stages.around = {"blocks.1": whole, "blocks.0": cut}
    first = stages.forward(0, loss, BATCH, lambda blanks: [])
    assert (cut.noted, whole.noted) == (["enter", "leave"], [])
    assert cut.left == [first.values]  # left in its midst: what is sent stands for its output
    stages.forward(1, loss, BATCH, lambda blanks: first.values)
    assert whole.noted == ["enter", "leave"]
    assert cut.noted == ["enter", "leave", "enter", "leave"]  # it begins in it


def test_a_follower_is_told_where_its_module_is_stubbed() -> None:
    follower = Around()
    stages = Stages.build(linear_stack(2), loss, BATCH, num_stages=2, split=("1",), followers={"0": follower})
    follower.noted.clear()
    sent = stages.forward(0, loss, BATCH, lambda blanks: []).values
    assert follower.noted == ["begin"]
    stages.forward(1, loss, BATCH, lambda blanks: sent)
    assert follower.noted == ["begin", "begin", "stubbed"]


def test_only_blocks_within_a_stage_are_compiled_and_only_where_they_are_computed() -> None:
    called: list[str] = []

    def compiled(name: str, forward: Any) -> Any:
        return lambda *args: called.append(name) or forward(*args)

    class Deep(Nested):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(linear_stack(2) for _ in range(3))

    stages = Stages.build(Deep(), loss, BATCH, num_stages=3, split=("blocks.1", "blocks.2.1"))
    assert stages.compile(compiled) == ["blocks.0", "blocks.1"]
    sent = stages.forward(0, loss, BATCH, lambda blanks: []).values
    assert called == ["blocks.0"]
    stages.forward(1, loss, BATCH, lambda blanks: sent)
    assert called == ["blocks.0", "blocks.1"]


def test_what_crosses_is_known() -> None:
    stages = Stages.build(linear_stack(2), loss, BATCH, num_stages=2, split=("1",))
    assert [[slot.blank.shape for slot in cut] for cut in stages.cuts] == [[(3, 4)]]
