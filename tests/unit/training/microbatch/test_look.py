"""State that forwards keep is found by what it does to a loss; a look leaves no trace of itself."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import functools
import itertools
import queue
import random
import threading
import tracemalloc
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tests.unit.training.stateful_helper
import torch
from tests.unit.training.microbatch.test_step_loss import X, computer, first_batch, look_at
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.losses import mse
from shoal.numerics.no_trace import NoTrace
from shoal.training.microbatch.look import Look

Loss = Callable[[nn.Module, Any], Any]
Case = tuple[nn.Module, Loss]
CALLS = {"n": 0}
COUNT = 0


def plain(model: nn.Module, batch: Any) -> Any:
    return mse(model(batch[0]), batch[1])


class Net(nn.Module):
    """A linear layer whose output is changed by `more`, which may keep state in the module."""

    total = 0

    def __init__(self, more: Callable[[Any, Tensor], Tensor], **state: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.more = more
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self, self.layer(x))


def carried(net: Any, y: Tensor) -> Tensor:
    before, net.state = net.state, y.detach()
    return y if before is None or before.shape != y.shape else y + 0.1 * before


def warmed_up(net: Any, y: Tensor) -> Tensor:
    net.calls += 1
    return y * min(1.0, net.calls / 100)


def begins_later(net: Any, y: Tensor) -> Tensor:
    net.calls += 1
    return y if net.calls < 5_000 else y * 0.5


def each_tenth(net: Any, y: Tensor) -> Tensor:
    net.calls += 1
    return y * 0.5 if net.calls % 10 == 0 else y


def annealed(net: Any, y: Tensor) -> Tensor:
    net.temperature *= 0.99
    return y * net.temperature


def grown(net: Any, y: Tensor) -> Tensor:
    net.bank.append(y.detach().mean())
    return y + (sum(net.bank) if len(net.bank) > 4 else 0.0)


def written_in_place(net: Any, y: Tensor) -> Tensor:
    net.mean.mul_(0.9).add_(y.detach().mean() * 0.1)
    return y - net.mean


def of_class(net: Any, y: Tensor) -> Tensor:
    Net.total += 1
    return y * (1 + Net.total / 10)


def of_global(net: Any, y: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return y + COUNT


def of_generator(net: Any, y: Tensor) -> Tensor:
    return y + torch.rand((), generator=net.generator)


def of_numpy_generator(net: Any, y: Tensor) -> Tensor:
    return y + float(net.generator.normal())


def in_loss(model: nn.Module, batch: Any) -> Any:
    CALLS["n"] += 1
    return mse(model(batch[0]) * CALLS["n"], batch[1])


def in_closure() -> Loss:
    mean = torch.zeros(())

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal mean
        y = model(batch[0])
        mean = 0.9 * mean + 0.1 * y.detach().mean()
        return mse(y - mean, batch[1])

    return loss


class Running:
    """A loss that is an object with a state of its own."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.scale = 0.9 * self.scale + 0.1 * float(model(batch[0]).abs().mean())
        return mse(model(batch[0]) / self.scale, batch[1])


def on_function(model: nn.Module, batch: Any) -> Any:
    on_function.calls += 1  # type: ignore[attr-defined]
    return mse(model(batch[0]) * on_function.calls, batch[1])  # type: ignore[attr-defined]


on_function.calls = 0  # type: ignore[attr-defined]


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def of_object(net: Any, y: Tensor) -> Tensor:
    net.kept.n += 1
    return y * net.kept.n


def of_iterator(net: Any, y: Tensor) -> Tensor:
    return y * (1 + next(net.kept))


def of_new_class_attribute(net: Any, y: Tensor) -> Tensor:
    Net.fresh = getattr(Net, "fresh", 0) + 1  # type: ignore[attr-defined]
    return y * Net.fresh  # type: ignore[attr-defined]


def of_new_global(net: Any, y: Tensor) -> Tensor:
    global FRESH
    try:
        FRESH += 1
    except NameError:
        FRESH = 1
    return y * FRESH


def of_other_module(net: Any, y: Tensor) -> Tensor:
    return tests.unit.training.stateful_helper.counted(y)


def in_default(model: nn.Module, batch: Any, *, calls: list[int] = []) -> Any:  # noqa: B006
    calls.append(1)
    return mse(model(batch[0]) * len(calls), batch[1])


def in_partial(calls: list[int], model: nn.Module, batch: Any) -> Any:
    return in_default(model, batch, calls=calls)


def in_hook() -> nn.Module:
    net, calls = Net(unchanged), [0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * calls[0]

    net.layer.register_forward_hook(hook)
    return net


def unchanged(net: Any, y: Tensor) -> Tensor:
    return y


def of_queue(net: Any, y: Tensor) -> Tensor:
    before = net.kept.get()
    net.kept.put(y.detach().mean())
    return y + before


def queue_of(value: Tensor) -> queue.Queue[Tensor]:
    made: queue.Queue[Tensor] = queue.Queue()
    made.put(value)
    return made


def of_array(net: Any, y: Tensor) -> Tensor:
    net.kept[0] *= 0.9
    return y * net.kept[0]


def of_parameter(net: Any, y: Tensor) -> Tensor:
    net.layer.weight.calls = getattr(net.layer.weight, "calls", 0) + 1
    return y * net.layer.weight.calls


LOCAL = threading.local()


def of_thread(net: Any, y: Tensor) -> Tensor:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return y * LOCAL.calls


class Scaled(Net):
    @property
    def scale(self) -> int:
        CALLS["n"] += 1
        return CALLS["n"]


def of_hook(net: Any, y: Tensor) -> Tensor:
    """Divides the gradient by a running mean of its size."""

    def hook(gradient: Tensor) -> Tensor:
        net.size = 0.5 * net.size + 0.5 * float(gradient.norm())
        return gradient / net.size

    if y.requires_grad:
        y.register_hook(hook)
    return y


def reversed_later(net: Any, y: Tensor) -> Tensor:
    """Scales the gradient alone, by a counter of forwards."""
    net.calls += 1
    return y.detach() + (y - y.detach()) * min(1.0, net.calls / 10)


def counts_inside(net: Any, y: Tensor) -> Tensor:
    net.kept.n += 1
    return y if net.kept.n < 50 else y * 0.5


def counts_in_tensor(net: Any, y: Tensor) -> Tensor:
    net.kept += 1
    return y if net.kept < 50 else y * 0.5


def counts_in_list(net: Any, y: Tensor) -> Tensor:
    net.kept[0] += 1
    return y if net.kept[0] < 50 else y * 0.5


def counts_by_iterator(net: Any, y: Tensor) -> Tensor:
    return y if next(net.kept) < 50 else y * 0.5


def decays(net: Any, y: Tensor) -> Tensor:
    net.kept *= 0.98
    return y if net.kept > 0.4 else y * 0.5


def full(net: Any, y: Tensor) -> Tensor:
    net.kept.append(float(y.detach().mean()))
    return y if len(net.kept) < 50 else y + sum(net.kept)


def best_so_far(net: Any, y: Tensor) -> Tensor:
    net.kept = max(net.kept, float(y.detach().mean()))
    return y if net.kept < 5 else y * 0.5


STATE: dict[str, tuple[Callable[[], Case], str]] = {
    "queue": (lambda: (Net(of_queue, kept=queue_of(torch.zeros(()))), plain), "kept"),
    "chain of dicts": (lambda: (Net(of_array, kept=collections.ChainMap({0: 1.0})), plain), "kept"),
    "array": (lambda: (Net(of_array, kept=array.array("d", [1.0])), plain), "kept"),
    "cycle": (lambda: (Net(of_iterator, kept=itertools.cycle([1.0, 2.0, 3.0])), plain), "kept"),
    "zip": (lambda: (Net(lambda net, y: y * sum(next(net.kept)), kept=zip(range(99), strict=True)), plain), "kept"),
    "parameter's attribute": (lambda: (Net(of_parameter), plain), "layer.weight.calls"),
    "thread": (lambda: (Net(of_thread), plain), "LOCAL"),
    "property": (lambda: (Scaled(lambda net, y: y * net.scale), plain), "CALLS"),
    "hook on an activation": (lambda: (Net(of_hook, size=1.0), plain), "size"),
    "of the gradient": (lambda: (Net(reversed_later, calls=0), plain), "calls"),
    "later, in an object": (lambda: (Net(counts_inside, kept=Slotted()), plain), "kept"),
    "later, in a tensor": (lambda: (Net(counts_in_tensor, kept=torch.zeros(())), plain), "kept"),
    "later, in a list": (lambda: (Net(counts_in_list, kept=[0]), plain), "kept"),
    "later, in an iterator": (lambda: (Net(counts_by_iterator, kept=itertools.count()), plain), "kept"),
    "later, by a factor": (lambda: (Net(decays, kept=1.0), plain), "kept"),
    "later, when it is full": (lambda: (Net(full, kept=collections.deque(maxlen=60)), plain), "kept"),
    "later, when it is large": (lambda: (Net(best_so_far, kept=-1e9), plain), "kept"),
    "carried": (lambda: (Net(carried, state=None), plain), "state"),
    "warmed up": (lambda: (Net(warmed_up, calls=0), plain), "calls"),
    "begins later": (lambda: (Net(begins_later, calls=0), plain), "calls"),
    "each tenth": (lambda: (Net(each_tenth, calls=0), plain), "calls"),
    "annealed": (lambda: (Net(annealed, temperature=2.0), plain), "temperature"),
    "grown": (lambda: (Net(grown, bank=[]), plain), "bank"),
    "grown deque": (lambda: (Net(grown, bank=collections.deque(maxlen=8)), plain), "bank"),
    "tensor attribute": (lambda: (Net(written_in_place, mean=torch.zeros(())), plain), "mean"),
    "class attribute": (lambda: (Net(of_class), plain), "Net.total"),
    "global": (lambda: (Net(of_global), plain), "COUNT"),
    "torch generator": (lambda: (Net(of_generator, generator=torch.Generator()), plain), "generator"),
    "numpy generator": (lambda: (Net(of_numpy_generator, generator=np.random.default_rng(0)), plain), "generator"),
    "loss's global": (lambda: (Net(unchanged), in_loss), "loss.CALLS"),
    "loss's closure": (lambda: (Net(unchanged), in_closure()), "loss.mean"),
    "loss object": (lambda: (Net(unchanged), Running()), "loss.scale"),
    "slots": (lambda: (Net(of_object, kept=Slotted()), plain), "kept"),
    "namespace": (lambda: (Net(of_object, kept=types.SimpleNamespace(n=0)), plain), "kept"),
    "count": (lambda: (Net(of_iterator, kept=itertools.count()), plain), "kept"),
    "iterator": (lambda: (Net(of_iterator, kept=iter(range(10_000))), plain), "kept"),
    "generator": (lambda: (Net(of_iterator, kept=(n / 10 for n in range(10_000))), plain), "kept"),
    "new class attribute": (lambda: (Net(of_new_class_attribute), plain), "Net.fresh"),
    "new global": (lambda: (Net(of_new_global), plain), "FRESH"),
    "other module": (lambda: (Net(of_other_module), plain), "counted.calls"),
    "forward hook": (lambda: (in_hook(), plain), "hook.calls"),
    "loss's default": (lambda: (Net(unchanged), in_default), "loss.calls"),
    "loss's partial": (lambda: (Net(unchanged), functools.partial(in_partial, [])), "loss.0"),
    "loss's attribute": (lambda: (Net(unchanged), on_function), "loss.calls"),
}


@pytest.mark.parametrize("name", STATE)
def test_state_that_changes_a_loss_is_refused_by_its_name(name: str) -> None:
    make, attribute = STATE[name]
    model, loss = make()
    with pytest.raises(JobError) as caught:
        look_at(computer(model, loss), first_batch(), StepBuffers(model))
    assert attribute in caught.value.given
    assert "allow_state" in caught.value.remedy


def cached(net: Any, y: Tensor) -> Tensor:
    if net.mask is None or len(net.mask) < len(y):
        net.mask = torch.ones(len(y), 1)
    return y * net.mask[: len(y)]


def kept_for_plots(net: Any, y: Tensor) -> Tensor:
    net.last = y
    net.history.append(float(y.detach().sum()))
    net.calls += 1
    return y


def first_call(net: Any, y: Tensor) -> Tensor:
    if net.first:
        net.first, net.ones = False, torch.ones(1)
    return y * net.ones


def seeded_anew(net: Any, y: Tensor) -> Tensor:
    return y + torch.rand((), generator=torch.Generator().manual_seed(3))


def clamped(net: Any, y: Tensor) -> Tensor:
    net.scale.data = net.scale.data.clamp(max=1.0)
    return y * net.scale


def auxiliary(model: Any, batch: Any) -> Any:
    total, weight = plain(model, batch)
    return total + model.last.square().sum(), weight


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


def hooked(net: Any, y: Tensor) -> Tensor:
    """Registers a hook in its first forward, which an attribute remembers, and counts the hook's calls."""
    if not hasattr(net, "hooked"):
        net.layer.register_forward_hook(lambda *_: net.calls.append(1))
        net.hooked = True
    net.calls.clear()
    net.layer(torch.zeros(1, 3))
    return y * len(net.calls)


def for_logs(net: Any, y: Tensor) -> Tensor:
    net.samples, net.rows = net.samples + len(y), len(y)
    net.best = max(net.best, float(y.detach().mean()))
    net.scale = net.scale or y.shape[1] ** -0.5
    if y.requires_grad:
        y.register_hook(lambda gradient: net.norms.append(float(gradient.norm())))
    return y.reshape(net.rows, -1) * net.scale


PURE: dict[str, Callable[[], Case]] = {
    "for logs": lambda: (Net(for_logs, samples=0, best=-1e9, scale=None, norms=[]), plain),
    "cache": lambda: (Net(cached, mask=None), plain),
    "kept for plots": lambda: (Net(kept_for_plots, last=None, history=[], calls=0), plain),
    "auxiliary loss": lambda: (Net(kept_for_plots, last=None, history=[], calls=0), auxiliary),
    "first call": lambda: (Net(first_call, first=True, ones=None), plain),
    "seeded anew": lambda: (Net(seeded_anew), plain),
    "hooks": lambda: (Net(hooked, calls=[]), plain),
    "clamped": lambda: (Net(clamped, scale=nn.Parameter(torch.tensor(2.0))), plain),
    "lru_cache": lambda: (Net(lambda net, y: y * table(1)), plain),
    "array of arrays": lambda: (Net(unchanged, rows=np.array([np.zeros(2), np.zeros(3)], dtype=object)), plain),
    "large inference tensor": lambda: (Net(unchanged, table=torch.inference_mode()(torch.zeros)(300_000)), plain),
    "long chain": lambda: (Net(unchanged, chain=functools.reduce(lambda end, _: [end], range(2_000), [])), plain),
    "counter of a loop": lambda: (Net(lambda net, y: y + next(itertools.count(1))), plain),
}


@pytest.mark.parametrize("name", PURE)
def test_what_does_not_change_a_loss_is_let_pass(name: str) -> None:
    model, loss = PURE[name]()
    found = look_at(computer(model, loss), first_batch(), StepBuffers(model)).computation
    assert found.fuse or found.randomness == "opaque"
    assert not found.kept_state
    assert not any(module._forward_hooks for module in model.modules())


def test_a_buffer_that_a_backward_writes_is_refused_by_its_name() -> None:
    def keeps_largest(net: Any, y: Tensor) -> Tensor:
        if y.requires_grad:
            y.register_hook(lambda gradient: net.largest.copy_(gradient.abs().max()))
        return y

    model = Net(keeps_largest)
    model.register_buffer("largest", torch.zeros(()))
    with pytest.raises(JobError, match="a backward that writes buffer largest"):
        look_at(computer(model), first_batch(), StepBuffers(model))


def test_a_loss_with_a_buffer_belongs_into_the_model() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1))

        def forward(self, model: nn.Module, batch: Any) -> Any:
            y = model(batch[0])
            self.center.lerp_(y.detach().mean(0), 0.5)
            return mse(y - self.center.clone(), batch[1])

    model = Net(unchanged)
    with pytest.raises(JobError, match="a part of the model"):
        look_at(computer(model, Centred()), first_batch(), StepBuffers(model))


@pytest.mark.parametrize(
    ("update", "rules"),
    [
        (lambda seen, y: seen.add_(len(y)), ("sum",)),
        (lambda seen, y: seen.add_(len(y)).clamp_(max=1_000), ()),
        (lambda seen, y: seen.add_(len(y)).remainder_(1_000), ()),
    ],
)
def test_a_count_that_has_a_bound_or_begins_anew_has_no_rule(update: Any, rules: tuple[str, ...]) -> None:
    def counts(net: Any, y: Tensor) -> Tensor:
        update(net.seen, y)
        return y

    model = Net(counts)
    model.register_buffer("seen", torch.zeros((), dtype=torch.long))
    found = Look(computer(model)).buffers(first_batch(), ["seen"])
    assert found.rules["seen"] == rules
    assert model.seen == 0


def test_a_look_keeps_a_bounded_part_of_large_data() -> None:
    rows, images = [list(range(500)) for _ in range(1_000)], [torch.zeros(1 << 18) for _ in range(100)]
    model = Net(unchanged, rows=rows, images=images)
    tracemalloc.start()
    try:
        with NoTrace(model, {"loss": plain}) as kept:
            assert tracemalloc.get_traced_memory()[0] < 10 << 20  # two looked at 500,000 numbers
            images[-1].add_(1)  # beyond what is copied beforehand
            assert [change.name for change in kept.changes()] == ["images"]
    finally:
        tracemalloc.stop()
    assert not images[-1].any()


def test_allowed_state_is_listed() -> None:
    model = Net(carried, state=None)
    made = computer(model)
    object.__setattr__(made.job, "allow_state", ("*",))
    assert look_at(made, first_batch(), StepBuffers(model)).computation.kept_state == ("state",)
    object.__setattr__(made.job, "allow_state", ("stat",))
    with pytest.raises(JobError, match="no attribute of a module"):
        look_at(made, first_batch(), StepBuffers(model))


def test_rows_that_a_forward_renormalises_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(64, 1, max_norm=0.1))

    def loss(net: nn.Module, batch: Any) -> Any:
        return mse(net((batch[0][:, 0] * 31 + 32).long()), batch[1])

    before = model[0].weight.clone()
    with pytest.raises(JobError, match="max_norm"):
        look_at(computer(model, loss), first_batch(), StepBuffers(model))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("exact", [False, True])
def test_what_a_forward_writes_is_the_same_but_for_rounding_and_in_exact_mode_to_the_bit(exact: bool) -> None:
    """Ranks compute other numbers of forwards."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(factor).clamp_(max=0.1)
            return super().forward(x)

    torch.manual_seed(0)
    factor, model = 1.0, Scaled(3, 1)
    own = computer(model)
    own.exact = exact
    look_at(own, first_batch(), StepBuffers(model))
    factor = 1 + 1e-6
    with pytest.raises(JobError, match="parameter weight") if exact else contextlib.nullcontext():
        look_at(own, first_batch(), StepBuffers(model))
    factor = 1.1
    with pytest.raises(JobError, match="parameter weight"):
        look_at(own, first_batch(), StepBuffers(model))


def test_a_teacher_that_the_forward_averages_is_a_buffer() -> None:
    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    own.data.mul_(0.9).add_(other.data * 0.1)
            return self.student(x) + self.teacher(x)

    model = Taught()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = StepBuffers(model)
    found = look_at(computer(model), first_batch(), buffers).computation
    assert found.buffers == buffers.names == ("teacher.bias", "teacher.weight")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_average_that_begins_as_its_weight_has_a_rule() -> None:
    """Its first update leaves it as it is. Ranks that have to go on together have no other look."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.register_buffer("slow", self.layer.weight.detach().clone())
            self.register_buffer("still", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.slow.lerp_(self.layer.weight.detach(), 0.1)
            return self.layer(x * self.still) + x @ self.slow.T

    model = Averaged()
    found = Look(computer(model)).buffers(first_batch(), ["slow", "still"])
    assert found.rules.keys() == {"slow"}
    assert found.rules["slow"][0] == "same"
    assert torch.equal(model.slow, model.layer.weight)


def test_the_weights_of_a_recurrent_layer_stay_its_own() -> None:
    """Ranks with sharded parameters put others in their places during a forward."""
    model = nn.GRU(3, 3)
    with NoTrace(model, {}) as kept:
        model.weight_ih_l0 = nn.Parameter(torch.zeros(9, 3))
        assert not kept.changes()
    assert model._flat_weights[0] is model.weight_ih_l0


class Everything(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))
        self.calls, self.history, self.nested = 0, [1.0], {"a": [torch.zeros(2), {"b": 0}]}
        self.array, self.generator = np.zeros(3), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(2.0)
        self.nested["a"][0].add_(1)  # type: ignore[union-attr]
        self.nested["a"][1]["b"] += 1  # type: ignore[index]
        self.new = x
        self.array += 1
        self.seen.data += x.detach().sum(0)
        self.frozen.data.mul_(0.5)
        self.layer.weight.data = self.layer.weight.data * 2
        self.norm.eval()
        torch.rand(1)
        random.random()
        np.random.rand()
        torch.rand(1, generator=self.generator)
        return self.norm(self.layer(x))


def test_a_look_leaves_no_trace() -> None:
    model, x = Everything(), X.clone()
    layer = model.layer.weight

    def state() -> Any:
        attributes = {k: v for k, v in vars(model).items() if not k.startswith("_")}
        values = {**model.state_dict(), "array": torch.tensor(model.array), "generator": model.generator.get_state()}
        generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        return repr(attributes), {k: v.tolist() for k, v in values.items()}, generators, model.norm.training

    before = state()
    with NoTrace(model, {"loss": plain}) as kept:
        model(x)
        names = {change.name for change in kept.changes()}
        assert {"calls", "history", "nested", "new", "array", "generator", "norm.training"} <= names
        assert set(kept.changed_buffers()) == {"seen"}
        assert kept.changed_parameters().keys() == {"frozen", "layer.weight"}
        kept.restore()
        assert state() == before
        model(x)
    assert state() == before
    assert model.layer.weight is layer
    assert "new" not in vars(model)


def test_what_is_written_past_torch_is_refused() -> None:
    class Past(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.detach().numpy()[:] *= 0.5
            return super().forward(x)

    model = Past(3, 1)
    with pytest.raises(JobError, match="parameter weight"):
        look_at(computer(model), first_batch(), StepBuffers(model))


def test_a_batch_that_is_changed_in_place_is_a_copy() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        batch[0].mul_(0.5)
        return plain(model, batch)

    model, batch = Net(unchanged), first_batch()
    before = batch.batch[0].clone()
    found = Look(computer(model, loss)).policy(batch, batch, StepBuffers(model)).computation
    assert found.fuse
    assert torch.equal(batch.batch[0], before)


MOST = {"output": 0.0, "forwards": 0}


def noted(net: Any, y: Tensor) -> Tensor:
    net.most = max(net.most, float(y.detach().abs().max()))
    MOST.update(output=net.most, forwards=MOST["forwards"] + 1)
    return y


class ByOutput(torch.optim.SGD):
    """Its step is smaller after a large output, which it reads where the forward has left it."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.1 * min(1.0, 1.0 / (1e-3 + MOST["output"]))
        return super().step(closure)


class Logging(torch.optim.SGD):
    """It writes beside what the forward has left, and computes nothing from it."""

    def step(self, closure: Any = None) -> Any:
        MOST["forwards"] += 1
        return super().step(closure)


def by_model(net: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer that has the model from its factory."""

    class ByModel(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] = 0.1 / (1 + net.most)
            return super().step(closure)

    return lambda parameters: ByModel(parameters, lr=0.1)


def test_an_optimizer_that_reads_what_a_forward_leaves_is_refused_by_its_name() -> None:
    net = Net(noted, most=0.0)
    for make, named in ((lambda p: ByOutput(p, lr=0.1), r"ByOutput.*MOST"), (by_model(net), r"ByModel.*most")):
        looking = computer(net)
        looking.job = dataclasses.replace(looking.job, optimizer=make)
        with pytest.raises(JobError, match=named):
            look_at(looking, first_batch(), StepBuffers(net))
        looking.job = dataclasses.replace(looking.job, allow_state=("most", "more.MOST"))
        look_at(looking, first_batch(), StepBuffers(net))
    assert net.most == 0.0
    assert MOST == {"output": 0.0, "forwards": 0}


def test_an_optimizer_that_writes_beside_what_a_forward_leaves_is_not_refused() -> None:
    net = Net(noted, most=0.0)
    looking = computer(net)
    looking.job = dataclasses.replace(looking.job, optimizer=lambda p: Logging(p, lr=0.1))
    look_at(looking, first_batch(), StepBuffers(net))


def put_in_place(net: Any, y: Tensor) -> Tensor:
    net.layer.weight = nn.Parameter(net.layer.weight.detach().clamp(-0.1, 0.1))
    return y


def by_loss(model: Any, batch: Any) -> Any:
    put_in_place(model, batch[0])
    return plain(model, batch)


@pytest.mark.parametrize(("more", "loss"), [(put_in_place, plain), (lambda net, y: y, by_loss)])
def test_a_parameter_that_is_replaced_is_refused_by_its_name_and_put_back(more: Any, loss: Loss) -> None:
    net = Net(more)
    before = net.layer.weight
    with pytest.raises(JobError, match=r"in the place of the parameter layer\.weight"):
        look_at(computer(net, loss), first_batch(), StepBuffers(net))
    assert net.layer.weight is before


def test_a_hook_that_a_forward_registers_on_a_parameter_is_refused() -> None:
    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.register_hook(lambda gradient: 0.5 * gradient)
            return super().forward(x)

    model = Hooked(3, 1)
    with pytest.raises(JobError, match="hook on parameter weight"):
        look_at(computer(model), first_batch(), StepBuffers(model))
    assert not model.weight._backward_hooks


def test_each_number_that_follows_the_samples_is_tried_large() -> None:
    def second(net: Any, y: Tensor) -> Tensor:
        scale = 2 if net.second > 5 else 1
        net.first, net.second = float(y.detach().mean()), float(y.detach().max())
        return y * scale

    model = Net(second, first=0.0, second=0.0)
    with pytest.raises(JobError, match="second"):
        look_at(computer(model), first_batch(), StepBuffers(model))


def test_an_iterator_that_the_forward_makes_is_no_state() -> None:
    def skipped(net: Any, y: Tensor) -> Tensor:
        net.skips = reversed([y, 2 * y])
        return y + next(net.skips)

    model = Net(skipped, skips=None)
    look_at(computer(model), first_batch(), StepBuffers(model))
