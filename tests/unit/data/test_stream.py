"""Streams are divided over grains, so that a step holds the same samples on any number of ranks."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.loader import DataRank
from shoal.data.order import Order
from shoal.data.stream import StreamLoader
from shoal.errors import DataError
from shoal.jobs.job import Length, Samples, Steps
from shoal.numerics.generators import seed_everything

ENDLESS = 1 << 62


class Plain:
    """The numbers from 0 up to `size`."""

    def __init__(self, size: int, broken: int | None = None) -> None:
        self.size, self.broken = size, broken

    def __iter__(self) -> Iterator[int]:
        for i in range(self.size):
            if i == self.broken:
                raise OSError("socket closed")
            yield i


class Sharded(Plain):
    """Shard `index` of n holds the numbers that are `index` modulo n."""

    def shard(self, num_shards: int, index: int) -> Sequence[int]:
        return range(index, self.size, num_shards)


class Drawn(Plain):
    """A number drawn for each sample; shards are generators."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(self.size):
            yield random.random() + np.random.rand() + float(torch.rand(()))

    def shard(self, num_shards: int, index: int) -> Iterator[float]:
        return iter(self)


class Stateful(Plain):
    """Can say where it is and go on from there; counts how often it is read."""

    reads = 0

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.size:
            self.place += 1
            type(self).reads += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


KINDS = {"plain": Plain, "sharded": Sharded, "stateful": Stateful}


def opened(kind: str, size: int, ranks: int, batch: int = 8, grains: int = 4, length: Length | None = None) -> Any:
    how = Order(ENDLESS, batch, grains, seed=0, shuffle=True, length=length or Steps(1000))
    return [StreamLoader(KINDS[kind](size), how, DataRank(rank, ranks), None) for rank in range(ranks)]


def step(loaders: list[StreamLoader], number: int) -> list[tuple[int, list[int], list[int]]]:
    """(grain, ids, samples) of one step over all ranks."""
    found = []
    for loader in loaders:
        data = loader.step(number)
        for m in [] if data is None else data.microbatches:
            values = iter(m.batch.tolist())
            for grain, ids in zip(m.grains, m.ids, strict=True):
                found.append((grain.index, ids.tolist(), [next(values) for _ in range(grain.size)]))
    return sorted(found)


def test_what_a_stream_draws_depends_on_nothing_but_step_and_grain() -> None:
    found = []
    for ranks in (1, 2):
        how = Order(ENDLESS, 8, 4, seed=0, shuffle=True, length=Steps(1000))
        loaders = [StreamLoader(Drawn(1000), how, DataRank(rank, ranks), None) for rank in range(ranks)]
        rows = []
        for number in (0, 1):
            seed_everything(ranks)  # what another layout would leave there
            rows += [m.batch for one in loaders for m in one.step(number).microbatches]  # type: ignore[union-attr]
            for one in loaders:
                one.commit()
        found.append(torch.cat(rows))
    assert torch.equal(*found)
    assert len(found[0].unique()) == 16


def steps(loaders: list[StreamLoader], numbers: range) -> list[list[tuple[int, list[int], list[int]]]]:
    found = []
    for number in numbers:
        found.append(step(loaders, number))
        for loader in loaders:
            loader.commit()
    return found


@settings(max_examples=25)
@given(st.sampled_from(["plain", "sharded"]), st.integers(0, 60), st.integers(1, 12), st.integers(1, 5), st.data())
def test_a_step_is_the_same_on_any_number_of_ranks(
    kind: str, size: int, batch: int, grains: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, grains))
    alone = steps(opened(kind, size, 1, batch, grains), range(8))
    assert steps(opened(kind, size, ranks, batch, grains), range(8)) == alone
    samples = [i for one in alone for _, _, values in one for i in values]
    ids = [i for one in alone for _, places, _ in one for i in places]
    assert len(set(samples)) == len(samples)
    assert ids == samples
    if kind == "plain":
        assert samples == list(range(min(size, 8 * batch)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 2), (2, 3), (4, 4)])
def test_another_number_of_ranks_goes_on_in_the_same_place(kind: str, before: int, after: int) -> None:
    whole = steps(opened(kind, 70, 1), range(7))
    first = opened(kind, 70, before)
    assert steps(first, range(3)) == whole[:3]
    step(first, 3)  # read ahead, never trained on
    states = [loader.state() for loader in first]
    second = opened(kind, 70, after)
    for loader in second:
        loader.restore(states)
    assert steps(second, range(3, 7)) == whole[3:]


def test_a_stream_with_a_state_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = opened("stateful", 100, 1)
    steps([first], range(5))
    (second,) = opened("stateful", 100, 1)
    monkeypatch.setattr(Stateful, "reads", 0)
    second.restore([first.state()])
    assert Stateful.reads == 0
    assert second.state() == first.state()
    step([second], 5)
    assert Stateful.reads == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_pending_step_is_given_again_until_it_is_committed(kind: str) -> None:
    (loader,) = opened(kind, 70, 1)
    steps([loader], range(2))
    before = loader.state()
    once = step([loader], 2)
    loader.seek(2, 1)
    assert step([loader], 2) == once
    data = loader.step(2)
    assert data is not None
    assert data.num_microbatches == 4
    assert loader.state() == before
    loader.commit()
    assert loader.state() != before
    assert step([loader], 3) != once


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_is_told_and_stays(kind: str) -> None:
    loaders = opened(kind, 21, 2)
    sizes = [sum(len(ids) for _, ids, _ in one) for one in steps(loaders, range(4))]
    assert sum(sizes) == 21
    assert sizes[0] == sizes[1] == 8
    assert all(loader.step(4) is None for loader in loaders)
    for loader in loaders:
        loader.commit()
    assert all(loader.step(5) is None for loader in loaders)


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_in_samples_ends_inside_the_stream(kind: str) -> None:
    (loader,) = opened(kind, 1000, 1, length=Samples(19))
    assert [sum(len(ids) for _, ids, _ in one) for one in steps([loader], range(3))] == [8, 8, 3]


def test_split_and_samples_give_the_same_data() -> None:
    (loader,) = opened("plain", 70, 1)
    data = loader.step(0)
    assert data is not None
    (whole,) = data.microbatches
    assert torch.equal(torch.cat([p.batch for p in whole.split()]), whole.batch)
    singles = whole.split()[1].samples()
    assert [s.batch.tolist() for s in singles] == [s.ids[0].tolist() for s in singles] == [[2], [3]]


def test_the_sample_that_raised_is_named() -> None:
    loader = StreamLoader(Plain(20, broken=11), Order(ENDLESS, 8, 4, 0, True, Steps(9)), DataRank(0, 1), None)
    steps([loader], range(1))
    with pytest.raises(DataError) as caught:
        loader.step(1)
    assert caught.value.given == "sample 11 of train_data (shard 0)"
    assert "OSError: socket closed" in caught.value.conflict


def test_a_rollback_reads_the_stream_from_its_beginning() -> None:
    (loader,) = opened("plain", 70, 1)
    states = []
    whole = []
    for number in range(4):
        states.append(loader.state())
        whole += steps([loader], range(number, number + 1))
    loader.restore([states[1]])
    assert steps([loader], range(1, 4)) == whole[1:]


def test_a_rollback_of_an_iterator_that_cannot_start_again_is_refused() -> None:
    loader = StreamLoader(iter(range(70)), Order(ENDLESS, 8, 4, 0, True, Steps(9)), DataRank(0, 1), None)
    states = [loader.state()]
    steps([loader], range(2))
    with pytest.raises(DataError, match="cannot go back to sample 0"):
        loader.restore(states)


class Shuffled:
    """Draws its order when it begins and its noise at each sample, and has no state to save."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[float]:
        order = list(range(self._count))
        random.shuffle(order)
        for number in order:
            yield number + random.random() / 2


class ShuffledShards(Shuffled):
    def shard(self, num_shards: int, index: int) -> Shuffled:
        return Shuffled(self._count // num_shards)


@pytest.mark.parametrize("stream", [Shuffled, ShuffledShards])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_that_draws_goes_on_as_it_would_have(stream: type[Shuffled], ranks: int) -> None:
    def loaders() -> list[StreamLoader]:
        order = Order(ENDLESS, 8, 4, 0, True, Steps(9))
        return [StreamLoader(stream(400), order, DataRank(rank, ranks), None) for rank in range(ranks)]

    def batches(some: list[StreamLoader], number: int) -> list[Any]:
        found = []
        for loader in some:
            data = loader.step(number)
            assert data is not None
            found += [microbatch.batch.tolist() for microbatch in data.microbatches]
            loader.commit()
        return found

    whole = loaders()
    first = [batches(whole, number) for number in range(4)]
    assert first[0] != first[1]
    again = loaders()
    before = [batches(again, number) for number in range(3)]
    assert before == first[:3]
    states = [loader.state() for loader in again]
    random.seed(99)
    resumed = loaders()
    for loader in resumed:
        loader.restore(states)
    assert batches(resumed, 3) == first[3]
