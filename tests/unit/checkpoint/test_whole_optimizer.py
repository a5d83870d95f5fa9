"""Optimizers that hold others, or keep more than torch's: all of it comes back, to the bit."""

import enum
import itertools
import logging
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from shoal.checkpoint.state import load_optimizer, model_tensors, optimizer_state
from shoal.checkpoint.whole_optimizer import begin, evaluated_weights, groups, parts, to_train
from shoal.errors import JobMismatchError, UserCodeError

sys.path.append(str(Path(__file__).resolve().parents[2] / "jobs"))
from composed import Averaged, Both

Make = Callable[[Iterable[Tensor]], Optimizer]


class Lookahead(Optimizer):
    """As published: it shares the groups of its optimizer, and another name is of that one's state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.fast_state = optimizer, optimizer.param_groups, optimizer.state
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] = (group["counter"] + 1) % 2
            for p in group["params"] if group["counter"] else ():
                p.copy_(self.state[p].setdefault("slow", p.clone()).lerp_(p, 0.5))


class Notebook:
    """An object that an optimizer writes to."""

    def __init__(self) -> None:
        self.total, self.seen = 0.0, torch.zeros(2)


class Busy(SGD):
    """State in attributes of all kinds, and a rank number that is none."""

    def __init__(self, parameters: Any, rank: int = 0) -> None:
        super().__init__(parameters, lr=0.1)
        self.every = [p for group in self.param_groups for p in group["params"]]
        self.rank, self.count, self.recent, self.book = rank, 0, deque[float](maxlen=2), Notebook()
        self.steps_of = dict.fromkeys(self.every, 0)
        self.noise, self.python, self.numpy = torch.Generator(), random.Random(0), np.random.default_rng(0)
        self.slow: list[Tensor] = [p.detach().clone() for p in self.every]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        drawn = torch.rand((), generator=self.noise).item() + self.python.random() + self.numpy.random()
        self.recent.append(drawn)
        self.book.total += sum(self.recent)
        self.book.seen += self.count
        self.last = self.book.total  # which no __init__ has made
        for p, slow in zip(self.every, self.slow, strict=True):
            self.steps_of[p] += 1
            p.sub_(p.grad * (self.book.total + self.steps_of[p] + self.book.seen[0]) / 100)
            p.copy_(slow.lerp_(p, 0.5))


elsewhere = {"count": 0}


class Elsewhere(SGD):
    """A counter that its own `state_dict` alone knows of."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        elsewhere["count"] += 1
        self.param_groups[0]["lr"] = 0.1 / elsewhere["count"]
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": elsewhere["count"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        elsewhere["count"] = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


class Named(SGD):
    """A counter in the state, under a name and not of a parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[call-overload]
        self.param_groups[0]["lr"] = 0.1 / self.state["count"]  # type: ignore[call-overload]
        super().step()


class Counted(SGD):
    """It counts by iterators; one of its own parameters has come to its end."""

    def __init__(self, parameters: Any) -> None:
        self.given = (p for p in parameters)
        super().__init__(self.given, lr=0.1)
        self.numbers, self.rates = itertools.count(1), [itertools.count(0.5, 0.25)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.1 * next(self.rates[0]) / next(self.numbers)
        super().step()


OPTIMIZERS: dict[str, Make] = {
    "both": Both,
    "averaged": lambda p: Averaged(Both(p)),
    "lookahead": lambda p: Lookahead(Adam(p)),
    "lookahead of two": lambda p: Averaged(Lookahead(SGD(p, lr=0.1, momentum=0.9))),
    "busy": Busy,
    "elsewhere": lambda p: Elsewhere(p, momentum=0.9),
    "named": Named,
    "counted": Counted,
}


def made(make: Make) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    elsewhere["count"] = 0
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    to_train(optimizer)
    begin(optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_new_optimizer_and_the_live_one_go_on_from_a_checkpoint(kind: str, at: int) -> None:
    whole, optimizer = made(OPTIMIZERS[kind])
    train(whole, optimizer, range(at))
    weights, (tensors, document) = model_tensors(whole), optimizer_state(optimizer, whole)
    train(whole, optimizer, range(at, 7))

    def go_on(model: nn.Module, optimizer: Optimizer) -> bool:
        model.load_state_dict(weights)
        load_optimizer(optimizer, model, tensors, document)
        train(model, optimizer, range(at, 7))
        return same(model, whole)

    anew = made(OPTIMIZERS[kind])
    assert go_on(*anew)
    assert go_on(*anew), "a rollback"


def test_the_state_of_an_optimizer_within_is_kept_once() -> None:
    model, optimizer = made(lambda p: Lookahead(Adam(p)))
    train(model, optimizer, range(3))
    tensors, document = optimizer_state(optimizer, model)
    assert sum("exp_avg_sq" in path for path in tensors) == len(list(model.parameters()))
    assert list(document["inner"]) == ["optimizer"]
    assert [len(parts(o)) for o in (optimizer, SGD(model.parameters()))] == [2, 1]
    assert groups(optimizer) == optimizer.param_groups


def test_what_no_step_changes_is_the_jobs() -> None:
    """A rank number of another layout, say."""
    model, optimizer = made(lambda p: Busy(p, rank=1))
    train(model, optimizer, range(2))
    tensors, document = optimizer_state(optimizer, model)
    other, fresh = made(Busy)
    load_optimizer(fresh, other, tensors, document)
    assert (fresh.rank, fresh.count) == (0, 2)  # type: ignore[attr-defined]


def test_other_optimizers_within_are_refused() -> None:
    model, optimizer = made(Both)
    tensors, document = optimizer_state(optimizer, model)
    with pytest.raises(JobMismatchError, match=r"the job's holds none in parts\[0\], parts\[1\]"):
        load_optimizer(made(SGD)[1], model, tensors, document)


def test_an_object_that_only_a_step_makes_is_refused_by_name() -> None:
    class Late(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.book = Notebook()

    model, optimizer = made(Late)
    train(model, optimizer, range(1))
    with pytest.raises(UserCodeError, match="the attribute book of optimizer Late, of type Notebook"):
        optimizer_state(optimizer, model)


def test_evaluated_weights_leave_no_bit() -> None:
    model, optimizer = made(lambda p: Averaged(SGD(p, lr=0.3)))
    undisturbed, twin = made(lambda p: Averaged(SGD(p, lr=0.3)))
    for step in itertools.islice(itertools.count(), 6):
        train(model, optimizer, range(step, step + 1))
        train(undisturbed, twin, range(step, step + 1))
        with evaluated_weights(optimizer) as found:
            assert [id(p) for p in found] == [id(p) for p in model.parameters()]
            assert step == 0 or not same(model, undisturbed)
        assert same(model, undisturbed)
    plain = SGD(model.parameters(), lr=0.1)
    with evaluated_weights(plain) as found:
        assert found == []


class Phase(enum.Enum):
    WARMUP = "warmup"
    MAIN = "main"


@dataclass(frozen=True)
class Frozen:
    count: int = 0


@dataclass(slots=True)
class Slotted:
    count: int = 0


class Curious(SGD):
    """Attributes of kinds that have no `__dict__` to write to, and some that are no state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.phase, self.frozen, self.slotted, self.made = Phase.WARMUP, Frozen(), Slotted(), None
        self.seen, self.root, self.key = frozenset[int](), 0j, b""
        self.numpy, self.reversed = np.random.RandomState(0), np.arange(4.0)[::-1]
        self.names, self.log = np.array(["a", "b"]), logging.getLogger("a test's optimizer")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.phase, self.frozen = Phase.MAIN, replace(self.frozen, count=self.frozen.count + 1)
        self.slotted.count += 1
        self.seen, self.root, self.key = self.seen | {self.slotted.count}, self.root + 1j, self.key + b"x"
        self.reversed = self.reversed + self.numpy.rand()
        self.log.isEnabledFor(logging.DEBUG)  # which the logger remembers

    @property
    def values(self) -> list[Any]:
        return [self.phase, self.frozen, self.slotted, self.seen, self.root, self.key, *self.reversed]


def test_enums_frozen_and_slotted_objects_and_arrays() -> None:
    whole, half = (nn.Linear(2, 2) for _ in range(2))
    before, after = Curious(whole.parameters()), Curious(half.parameters())
    begin(before)
    begin(after)
    for _ in range(2):
        before.step()
    tensors, document = optimizer_state(before, whole)
    assert not {"log", "names", "made"} & document["attributes"].keys()
    load_optimizer(after, half, tensors, document)
    assert after.values == before.values
    assert after.phase is Phase.MAIN
    assert Phase.WARMUP.value == "warmup"
    before.step()
    after.step()
    assert after.values == before.values


@pytest.mark.parametrize("value", [Frozen(1), random.Random(), deque([1], maxlen=2), defaultdict(int, a=1)])
def test_objects_that_a_step_puts_into_an_empty_attribute_are_refused(value: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = Curious(model.parameters())
    begin(optimizer)
    optimizer.made = value
    with pytest.raises(UserCodeError, match="the attribute made of optimizer Curious"):
        optimizer_state(optimizer, model)


@pytest.mark.parametrize(
    "rates", [(0.1 / n for n in itertools.count(1)), itertools.cycle([0.1, 0.2]), iter([0.1, 0.2]), [iter(range(9))]]
)
def test_an_iterator_is_refused_by_the_name_of_its_attribute(rates: Any) -> None:
    class Rated(SGD):
        pass

    optimizer = Rated(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.rates = rates
    with pytest.raises(UserCodeError, match="the attribute rates of optimizer Rated"):
        begin(optimizer)
