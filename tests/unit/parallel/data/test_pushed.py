"""A server's shard under pushes that come twice, late, and in any order; and how parameters are divided."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.data.loader import Microbatch
from shoal.distributed.mesh import alone
from shoal.jobs.job import Progress
from shoal.parallel.base import Flags
from shoal.parallel.data.pushed import (
    FastPart,
    Ledger,
    Push,
    ServerShard,
    combine,
    divide_parameters,
    pack,
    unpack,
)
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.grains import divide

GRAINS = 4


def progress(step: int) -> Progress:
    return Progress(step, 10, 0)


class Momentum:
    """A shard of two parameters whose update remembers every gradient that it was given: twice is not once."""

    def __init__(self, exact: bool = False) -> None:
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
        self.optimizer = torch.optim.SGD([self.first, self.second], lr=0.1, momentum=0.9)
        self.shard = ServerShard([self.first, self.second], self._step, GRAINS, exact=exact)
        self.steps: list[int] = []

    def _step(self, progress: Progress) -> None:
        self.steps.append(progress.step)
        self.optimizer.step()

    def apply(self, step: int, tickets: dict[int, int], scale: float | None = 1.0) -> bool:
        if step not in self.shard._ledger:
            self.shard.combine(step, tickets)
        return self.shard.apply(step, self.shard.version + 1, scale, progress(step))


def push(step: int, part: int, ticket: int, used: tuple[int, ...] = (0, 1)) -> Push:
    """Part 0 holds grains 0 and 1, part 1 the others; the content belongs to step and part alone."""
    flat = torch.arange(7.0) + step * 10 + part
    return Push(step, part, ticket, ((2 * part, 2 * part + 2),), used, (flat,))


def parameters_after(events: list[Callable[[Momentum], object]]) -> Tensor:
    held = Momentum()
    for event in events:
        event(held)
    return torch.cat([held.first.detach(), held.second.detach().flatten()])


PLAIN: list[Callable[[Momentum], object]] = [
    lambda held: held.shard.push(push(0, 0, 1)),
    lambda held: held.shard.push(push(0, 1, 2)),
    lambda held: held.apply(0, {0: 1, 1: 2}),
    lambda held: held.shard.push(push(1, 0, 3)),
    lambda held: held.shard.push(push(1, 1, 4)),
    lambda held: held.apply(1, {0: 3, 1: 4}),
]


def test_a_push_that_comes_twice_counts_once() -> None:
    twice = [event for event in PLAIN for _ in range(2)]
    assert torch.equal(parameters_after(twice), parameters_after(PLAIN))
    held = Momentum()
    taken = [event(held) for event in twice]
    assert taken == [True, False] * 6
    assert held.steps == [0, 1]
    assert held.shard.repeated == 4


def test_a_push_that_comes_after_it_was_applied_changes_nothing() -> None:
    late = [*PLAIN, lambda held: held.shard.push(push(0, 0, 9)), lambda held: held.apply(0, {0: 9, 1: 9})]
    assert torch.equal(parameters_after(late), parameters_after(PLAIN))
    held = Momentum()
    for event in late:
        event(held)
    assert held.shard.version == 2
    assert not held.shard._staged, "nothing of an applied step is kept"


def test_pushes_in_another_order() -> None:
    """Of the next step before this one's, and the parts the other way round: to the bit the same."""
    order = [4, 1, 0, 3, 2, 5]
    assert torch.equal(parameters_after([PLAIN[i] for i in order]), parameters_after(PLAIN))


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), max_size=6))
def test_any_order_and_any_repetition(order: list[int], again: list[int]) -> None:
    pushes = [PLAIN[i] for i in (0, 1, 3, 4)]
    events = [pushes[i] for i in (*order, *again)]
    assert torch.equal(parameters_after([*events, PLAIN[2], *events, PLAIN[5], *events]), parameters_after(PLAIN))


def test_what_was_given_out_anew_takes_the_place_of_what_was_pushed_before() -> None:
    held = Momentum()
    assert held.shard.push(push(0, 0, 1))
    assert held.shard.push(push(0, 0, 5)), "a later ticket"
    assert not held.shard.push(push(0, 0, 1)), "of a worker that was taken for dead"
    held.shard.push(push(0, 1, 2))
    with pytest.raises(ValueError, match="step 0"):
        held.shard.combine(0, {0: 1, 1: 2})
    held.shard.combine(0, {0: 5, 1: 2})


def test_a_step_that_lacks_a_part_is_not_added_up() -> None:
    held = Momentum()
    held.shard.push(push(0, 0, 1))
    with pytest.raises(ValueError, match="of the pushes"):
        held.shard.combine(0, {0: 1, 1: 2})


def test_a_push_of_another_size_is_refused() -> None:
    held = Momentum()
    with pytest.raises(ValueError, match="for 7"):
        held.shard.push(Push(0, 0, 1, ((0, 4),), (), (torch.zeros(8),)))


def test_a_version_that_does_not_follow_is_refused() -> None:
    held = Momentum()
    held.shard.push(push(0, 0, 1))
    held.shard.combine(0, {0: 1})
    with pytest.raises(ValueError, match="version 3 after 0"):
        held.shard.apply(0, 3, 1.0, progress(0))


def test_a_step_that_is_left_out_moves_nothing_but_the_version() -> None:
    held = Momentum()
    held.shard.push(push(0, 0, 1))
    before = held.shard.pull()[1].clone()
    assert held.apply(0, {0: 1}, scale=None)
    assert held.shard.version == 1
    assert torch.equal(held.shard.pull()[1], before)
    assert held.steps == []


def test_what_was_pulled_stays_while_others_push() -> None:
    held = Momentum()
    version, pulled = held.shard.pull()
    before = pulled.clone()
    held.shard.push(push(0, 0, 1))
    held.apply(0, {0: 1})
    assert version == 0
    assert torch.equal(pulled, before)
    assert held.shard.pull()[0] == 1
    assert not torch.equal(held.shard.pull()[1], before)


def test_a_parameter_that_no_part_used_has_no_gradient() -> None:
    held = Momentum()
    held.shard.push(push(0, 0, 1, used=(1,)))
    held.shard.push(push(0, 1, 2, used=()))
    norms = held.shard.combine(0, {0: 1, 1: 2})
    assert norms[0] is None
    assert held.first.grad is None
    expected = (torch.arange(7.0) + torch.arange(7.0) + 1)[3:]
    assert norms[1] == pytest.approx(float(expected.norm()))


def test_sums_by_the_tree_or_in_order() -> None:
    """Numbers whose sum depends on the order: by the tree (a + b) + (c + d), in order ((a + b) + c) + d."""
    values = {(i, i + 1): torch.tensor([x]) for i, x in enumerate((1e8, 1.0, -1e8, 1.0))}
    tree = (values[0, 1] + values[1, 2]) + (values[2, 3] + values[3, 4])
    order = ((values[0, 1] + values[1, 2]) + values[2, 3]) + values[3, 4]
    shuffled = {node: values[node] for node in sorted(values, reverse=True)}
    assert torch.equal(combine(shuffled, 4, torch.add, exact=True), tree)  # type: ignore[arg-type]
    assert torch.equal(combine(shuffled, 4, torch.add, exact=False), order)  # type: ignore[arg-type]
    assert not torch.equal(tree, order)


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 100), min_size=1), st.integers(1, 5))
def test_every_parameter_has_one_home(sizes: dict[str, int], num_servers: int) -> None:
    homes = divide_parameters(sizes, num_servers)
    assert sorted(name for home in homes for name in home) == sorted(sizes)
    for home in homes:
        assert home == [name for name in sizes if name in home], "in the order of the model"
    if len(sizes) >= num_servers:
        assert all(homes)
    loads = [sum(max(1, sizes[name]) for name in home) for home in homes]
    assert max(loads) <= math.ceil(sum(loads) / num_servers) + max(max(1, size) for size in sizes.values())


@given(st.permutations(range(12)), st.integers(0, 5))
def test_the_ledger(order: list[int], first: int) -> None:
    ledger = Ledger(first)
    for number, step in enumerate(order):
        assert (first + step) not in ledger
        ledger.add(first + step)
        assert first + step in ledger
        seen = set(order[: number + 1])
        assert {n for n in range(-1, 13) if first + n in ledger} == {-1, *seen}
    with pytest.raises(ValueError, match="already applied"):
        ledger.add(first + order[0])


def test_packed_bytes_come_back() -> None:
    tensors = [torch.randn(3), torch.randn(2, 2).bfloat16(), torch.randn(5).double(), torch.tensor(1.5)]
    targets = [torch.zeros_like(t) for t in tensors]
    unpack(pack(tensors), targets)
    assert all(torch.equal(a, b) for a, b in zip(tensors, targets, strict=True))


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_what_is_pushed_of_narrow_parameters_is_not_rounded_before_it_is_summed(reduce: torch.dtype) -> None:
    """256 + 1 is 256 in bfloat16, but not in float32; where that is not asked for, a push is what autograd makes."""
    unused, weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(1).bfloat16())
    model = ShardedModel(alone(torch.device("cpu")), nn.ParameterList([unused, weight]))
    part = FastPart(model, [unused, weight], reduce, lambda phase: None)
    part.begin()
    for grain, factor in zip(divide(2, 2, 2), (256.0, 1.0), strict=True):
        microbatch = Microbatch(0, (grain,), (), None, lambda *_: None)
        part.backward(microbatch, (weight * factor).sum(), torch.zeros(4, dtype=torch.float64), grain.index == 1)
    part.finish(Flags(0, 0), 4, [])
    pushed = part.gradients([weight, unused], reduce)
    assert pushed[0, 2].dtype == reduce
    assert pushed[0, 2].tolist() == [257.0 if reduce == torch.float32 else 256.0, 0.0, 0.0]
    assert part.used([weight, unused]) == [0]
    part.close()
