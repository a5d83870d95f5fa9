"""Equal blocks run once in a trace: it is the one of all of them run, also where blocks only look alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.pipeline.stage_trace import StageTrace
from shoal.parallel.pipeline.stages import Stages, places, shared_trace

BATCH = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2])
RUN: SimpleQueue[int] = SimpleQueue()  # no state of a block; a trace would put a list back as it was


@pytest.fixture(autouse=True)
def blocks_of_these_tests_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shoal.parallel.pipeline.stage_repeats._PACKAGES", frozenset(("torch", "transformers", "tests"))
    )


def loss(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


class Shared:
    """Object beside the modules, with attributes."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Block(nn.Module):
    """What all blocks do, and in `more` what makes some of them differ."""

    def __init__(self, layer_idx: int, more: Any = None, **own: Any) -> None:
        super().__init__()
        self.layer_idx, self.more, self.dropout = layer_idx, more, 0.1
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        RUN.put(self.layer_idx)
        found = x + F.dropout(self.second(torch.relu(self.first(x))), self.dropout)
        return found if self.more is None else self.more(self, found, *others)


class Model(nn.Module):
    """Blocks between two layers; `between(model, block, x)` calls each, `after(model, x)` comes behind them."""

    def __init__(self, blocks: list[Block], between: Any = None, after: Any = None) -> None:
        super().__init__()
        self.before, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList(blocks), nn.Linear(4, 4)
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        for block in self.blocks:
            x = block(x) if self.between is None else self.between(self, block, x)
        return self.head(x if self.after is None else self.after(self, x))


def seen(trace: StageTrace) -> Any:
    """All that a trace says, with lifetimes in the places of the ids that have them."""
    calls = [replace(call, argument_ids=frozenset()) for call in trace.calls]
    given = [sorted(trace.lives[key] for key in call.argument_ids & trace.lives.keys()) for call in trace.calls]
    return calls, given, trace.uses, sorted(trace.lives.values()), trace.end, trace.flops, trace.parameter_bytes


def ran() -> list[int]:
    """The blocks that have run since the last call, by their places."""
    return [RUN.get() for _ in range(RUN.qsize())]


def run_blocks(make: Callable[[], nn.Module], batch: Any = BATCH, function: Any = loss) -> list[int]:
    """The blocks that the shared trace runs, by their places; sees that it is as the whole one, and so are places."""
    model = make()
    whole = Stages(model, torch.device("cpu"), {}).traced(function, batch)
    model = make()
    ran()
    shared = shared_trace(Stages(model, torch.device("cpu"), {}), model, function, batch)
    found = ran()
    assert seen(shared) == seen(whole)
    assert all(type(block.layer_idx) is int for block in model.blocks)  # type: ignore[union-attr]
    return found


ALL = [0, 1, 2, 3, 4, 5]


def same(**own: Any) -> list[Block]:
    return [Block(place, **own) for place in ALL]


def test_of_equal_blocks_one_is_run() -> None:
    assert run_blocks(lambda: Model(same())) == [0]
    assert places(Model(same()), loss, BATCH) == tuple(f"blocks.{place}" for place in ALL)


def view(block: Block, x: Tensor) -> Tensor:
    return (x + 0.0).view(3, 2, 2).flatten(1)


def in_a_tuple(block: Block, x: Tensor) -> Any:
    return x, None, 3


def test_outputs_of_other_kinds() -> None:
    # The second block is the first one whose argument is a view.
    assert run_blocks(lambda: Model(same(more=view))) == [0, 1]
    assert run_blocks(lambda: Model(same(more=in_a_tuple), lambda model, block, x: block(x)[0])) == [0]


def test_outputs_in_one_memory() -> None:
    assert run_blocks(lambda: Model(same(more=lambda block, x: (x, x.view(2, 6))), lambda m, b, x: b(x)[0])) == ALL


def test_blocks_of_two_lists() -> None:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__([])
            self.one, self.other = Model(same()), Model(same())
            self.one.before = self.one.head = self.other.before = self.other.head = nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return self.head(self.other(self.one(self.before(x))))

    assert run_blocks(Two) == [0]


def test_an_argument_of_every_block() -> None:
    def given(block: Block, x: Tensor, memory: Tensor) -> Tensor:
        return x + memory

    def make() -> Model:
        model = Model(same(more=given), lambda model, block, x: block(x, model.kept))
        model.memory = nn.Linear(4, 4)
        model.register_forward_pre_hook(lambda model, args: setattr(model, "kept", model.memory(args[0])))
        return model

    assert run_blocks(make) == [0]


# ------------------------------------------------------------------------------------------------------- look-alikes


def odd_one(change: Callable[[Block], Any]) -> Callable[[], Model]:
    def make() -> Model:
        blocks = same()
        change(blocks[3])
        return Model(blocks)

    return make


def twice(block: Block, x: Tensor) -> Tensor:
    return block.second(block.first(x))  # type: ignore[no-any-return]


def patched(block: Block) -> None:
    original = block.forward
    block.forward = lambda x: original(original(x))  # type: ignore[method-assign,assignment]


ODD: dict[str, Callable[[Block], Any]] = {
    "dropout": lambda block: setattr(block, "dropout", 0.5),
    "evaluation": lambda block: block.eval(),
    "a hook": lambda block: block.second.register_forward_hook(lambda module, args, found: found * module.bias.sum()),
    "a forward of its own": patched,
    "an attribute": lambda block: setattr(block, "more", twice),
    "a closure": lambda block: setattr(block, "more", (lambda count: lambda b, x: x * count)(2)),
    "a partial": lambda block: setattr(block, "more", functools.partial(twice)),
    "an object": lambda block: setattr(block, "config", Shared(window=2)),
    "wider layers": lambda block: vars(block)["_modules"].update(first=nn.Linear(4, 9), second=nn.Linear(9, 4)),
    "a frozen layer": lambda block: block.first.requires_grad_(False),
    "no bias": lambda block: setattr(block, "first", nn.Linear(4, 8, bias=False)),
    "a buffer": lambda block: block.register_buffer("mask", torch.ones(2)),
}


def powers(count: int, block: Block, x: Tensor) -> Tensor:
    for _ in range(count):
        x = block.second(block.first(x))
    return x


def test_partials_of_other_arguments() -> None:
    def make() -> Model:
        return Model([Block(place, functools.partial(powers, 1 + place % 2)) for place in ALL])

    assert run_blocks(make) == [0, 1]


@pytest.mark.parametrize("what", ODD)
def test_a_block_that_differs_in_itself(what: str) -> None:
    found = run_blocks(odd_one(ODD[what]))
    assert set(found) == {0, 3}


@pytest.mark.parametrize("size", [(4,), (1, 4)])
def test_buffers_of_other_shapes(size: tuple[int, ...]) -> None:
    def make() -> Model:
        blocks = same(more=lambda block, x: x * block.scale)
        for block in blocks:
            block.register_buffer("scale", torch.ones(size if block.layer_idx == 4 else (3, 4)))
        return Model(blocks)

    assert run_blocks(make) == [0, 4]


def test_objects_that_differ_inside() -> None:
    def attends(block: Block, x: Tensor) -> Tensor:
        return x * 2 if block.config.windows[0] else block.second(block.first(x))

    def make() -> Model:
        return Model([Block(i, attends, config=Shared(windows=[i in (1, 4)])) for i in ALL])

    assert run_blocks(make) == [0, 1]


# By its own place: of Gemma 2 each other layer, of Qwen all from one on.
def sliding(block: Block, x: Tensor) -> Tensor:
    return block.second(block.first(x)) if block.kinds[block.layer_idx] else x * 2


def late(block: Block, x: Tensor) -> Tensor:
    return block.second(block.first(x)) if block.layer_idx >= block.config.max_window_layers else x * 2


@pytest.mark.parametrize(
    "blocks",
    [
        lambda: same(more=sliding, kinds=[False, True] * 3),
        lambda: same(more=late, config=Shared(max_window_layers=4)),
        lambda: same(more=lambda block, x: x * block.layer_idx),
        lambda: same(more=lambda block, x: x * float(f"{block.layer_idx}")),
        lambda: same(more=lambda block, x: x if block.layer_idx in {2, 3} else x + 1),
    ],
    ids=["a list by place", "from a place on", "a product", "a text", "a set of places"],
)
def test_blocks_that_go_by_their_place_are_all_run(blocks: Any) -> None:
    assert run_blocks(lambda: Model(blocks())) == ALL


def test_a_place_that_nobody_reads_may_be_handed_on() -> None:
    def hands_on(block: Block, x: Tensor) -> Tensor:
        return keep(x, block.layer_idx)

    def keep(x: Tensor, place: int, cache: Any = None) -> Tensor:
        return x if cache is None else cache[place]

    assert run_blocks(lambda: Model(same(more=hands_on))) == [0]


def test_a_place_as_a_number_of_torch() -> None:
    """No stand-in for an integer will do there: the trace is made again, with all blocks."""
    blocks = functools.partial(same, more=lambda block, x: torch.full_like(x, block.layer_idx) + x)
    assert run_blocks(lambda: Model(blocks()))[-len(ALL) :] == ALL


# -------------------------------------------------------------------------------------------------- shared and carried


def test_tied_parameters() -> None:
    def with_block() -> Model:
        model = Model(same())
        model.blocks[3].first.weight = model.blocks[1].first.weight
        return model

    def with_head() -> Model:
        model = Model(same())
        model.blocks[3].own = nn.Linear(4, 4)
        model.blocks[3].more = lambda block, x: block.own(x)
        model.head.weight = model.blocks[3].own.weight
        return model

    def with_first() -> Model:
        model = Model(same(more=lambda block, x: block.own(x), own=None))
        for block in model.blocks:
            block.own = model.before
        return model

    assert run_blocks(with_block) == [0, 3]
    assert run_blocks(with_head) == [0, 3]
    assert run_blocks(with_first) == ALL


def test_a_block_that_is_called_again() -> None:
    """Its parameters are not used for the first time: a third call is as the second."""

    def make() -> Model:
        model = Model(same())
        model.between = lambda model, block, x: block(block(block(x)))
        return model

    assert run_blocks(make) == [0, 0]


CARRIED: dict[str, Any] = {
    # What the one before has left.
    "a tensor": lambda block, x: (
        x * (block.shared.last if block.shared.last is not None else 1),
        setattr(block.shared, "last", x),
    )[0],
    # A count, by which the fourth differs.
    "a number": lambda block, x: (
        setattr(block.shared, "count", block.shared.count + 1),
        block.second(block.first(x)) if block.shared.count == 4 else x + 1,
    )[1],
    # Each other one differs, and the third is in the state of the first.
    "a switch": lambda block, x: (
        setattr(block.shared, "on", not block.shared.on),
        block.second(block.first(x)) if block.shared.on else x + 1,
    )[1],
    "what grows": lambda block, x: (block.shared.all.append(1), x * 2 if len(block.shared.all) < 4 else x)[1],
    "an iterator": lambda block, x: x * 2 if next(block.shared.numbers) < 4 else x,
}


@pytest.mark.parametrize("what", CARRIED)
def test_state_that_is_carried_from_block_to_block(what: str) -> None:
    def make() -> Model:
        more = {"numbers": iter(range(9))} if what == "an iterator" else {}
        shared = Shared(last=None, count=0, on=False, all=[], **more)
        return Model(same(more=CARRIED[what], shared=shared))

    assert run_blocks(make) == ALL


def test_a_number_in_a_closure() -> None:
    def make() -> Model:
        count = 0

        def counts(block: Block, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return x * 2 if count < 4 else block.second(block.first(x))

        return Model(same(more=counts))

    assert run_blocks(make) == ALL


def test_what_is_left_in_one_place_and_used_behind_all_blocks() -> None:
    """The state is the same before and after the third: only the use tells, and all are run again."""

    def leaves(block: Block, x: Tensor) -> Tensor:
        block.shared.last = x * 2
        return x

    def make() -> Model:
        shared = Shared(last=None)
        return Model(same(more=leaves, shared=shared), after=lambda model, x: x + shared.last)

    assert run_blocks(make)[-len(ALL) :] == ALL


def test_what_is_written_into() -> None:
    def into_argument(block: Block, x: Tensor, memory: Tensor) -> Tensor:
        memory += x
        return x

    def given(model: Model, block: Block, x: Tensor) -> Tensor:
        model.memory = x * 2 if block.layer_idx == 0 else model.memory
        return block(x, model.memory)  # type: ignore[no-any-return]

    assert run_blocks(lambda: Model(same(more=into_argument), given)) == ALL

    def into_the_same(block: Block, x: Tensor, memory: Tensor) -> Tensor:
        return into_argument(block, x, memory.contiguous())

    assert run_blocks(lambda: Model(same(more=into_the_same), given)) == ALL

    def into_output(model: Model, block: Block, x: Tensor) -> Tensor:
        found: Tensor = block(x)
        found += 1
        return found

    assert run_blocks(lambda: Model(same(), into_output)) == [0]


# ------------------------------------------------------------------------------------------------------------ arguments


def test_arguments_that_differ() -> None:
    def given(block: Block, x: Tensor, *others: Any) -> Tensor:
        return x if not others or others[-1] is None else x * others[-1]

    def called(argument: Any) -> Any:
        return lambda model, block, x: block(x, *argument(block.layer_idx, x))

    def runs(argument: Any) -> list[int]:
        return run_blocks(lambda: Model(same(more=given), called(argument)))

    masks = torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool)
    assert runs(lambda place, x: [masks[0]]) == [0]
    assert runs(lambda place, x: [masks[place % 2]]) == [0, 1]  # with values, that code may look at
    assert runs(lambda place, x: [None if place in (2, 3) else 2.0]) == [0, 2]
    assert runs(lambda place, x: [x if place < 2 else x * 1]) == [0, 2]
    assert runs(lambda place, x: [torch.ones(4) if place < 2 else torch.ones(3, 4)]) == [0, 2]
    assert runs(lambda place, x: [torch.ones(3, 4) if place < 2 else x * 1]) == [0, 2]  # depends on earlier stages
    assert runs(lambda place, x: [torch.ones(3, 4) if place < 2 else x.detach() * 1]) == [0, 2]
    assert runs(lambda place, x: [torch.ones(3, 4) if place < 2 else torch.ones(4, 3).T]) == [0, 2]


def test_a_mask_that_is_written_into() -> None:
    def masked(block: Block, x: Tensor, mask: Tensor) -> Tensor:
        return x * 2 if mask.any() else block.second(block.first(x))

    def called(model: Model, block: Block, x: Tensor) -> Tensor:
        model.mask = torch.zeros(3, dtype=torch.bool) if block.layer_idx == 0 else model.mask
        if block.layer_idx == 3:
            model.mask.logical_not_()
        return block(x, model.mask)  # type: ignore[no-any-return]

    assert run_blocks(lambda: Model(same(more=masked), called)) == [0, 3]


def test_a_parameter_as_an_argument() -> None:
    def make() -> Model:
        model = Model(same(more=lambda block, x, weight: x * weight), lambda model, block, x: block(x, model.scale))
        model.scale = nn.Parameter(torch.ones(4))
        return model

    assert run_blocks(make) == ALL


def test_attributes_of_tensors() -> None:
    def marked(block: Block, x: Tensor, given: Tensor) -> Tensor:
        return x * 2 if given.mark else block.second(block.first(x))  # type: ignore[attr-defined]

    def called(model: Model, block: Block, x: Tensor) -> Tensor:
        x.mark = block.layer_idx == 3  # type: ignore[attr-defined]
        return block(x, x)  # type: ignore[no-any-return]

    assert run_blocks(lambda: Model(same(more=marked), called)) == [0, 3]


def test_blocks_without_autograd() -> None:
    def called(model: Model, block: Block, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(block.layer_idx >= 2):
            return block(x)  # type: ignore[no-any-return]

    assert run_blocks(lambda: Model(same(), called)) == [0, 1, 2, 3]  # the first has an argument with a gradient


def test_blocks_of_other_packages_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([Block(number) for number in range(4)])
    places(model, loss, BATCH)
    assert ran() == [0], "of equal ones one is"
    monkeypatch.undo()
    places(Model([Block(number) for number in range(4)]), loss, BATCH)
    assert ran() == [0, 1, 2, 3]
