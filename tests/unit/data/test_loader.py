"""Loaders: over all ranks every sample of a step once, in microbatches that change nothing."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.loader import DataRank, MapLoader, Microbatch
from shoal.data.order import Order
from shoal.data.source import MapSource, open_data
from shoal.errors import DataError
from shoal.jobs.job import Epochs, Length, Samples


class Noisy:
    """Sample i is i with three kinds of noise, so that its augmentation shows."""

    def __init__(self, size: int = 50, broken: int | None = None) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if i == self.broken:
            raise OSError(f"cannot read {i}")
        return torch.tensor([float(i), float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64)


def order(num_samples: int, batch: int, grains: int, length: Length | None = None) -> Order:
    return Order(num_samples, batch, grains, seed=1, shuffle=True, length=length or Epochs(2))


def loader(data: Any, how: Order, rank: int = 0, ranks: int = 1, workers: int = 0) -> MapLoader:
    source = open_data("train_data", data, None).source
    assert isinstance(source, MapSource)
    return MapLoader(source, how, DataRank(rank, ranks), workers, pin_memory=False)


def microbatches(loader: MapLoader, step: int) -> list[Microbatch]:
    data = loader.step(step)
    found = list(data.microbatches)
    assert len(found) == data.num_microbatches
    assert all(m.step == data.step == step for m in found)
    return found


@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_the_ranks_together_compute_each_sample_once(size: int, batch: int, grains: int, ranks: int, per: int) -> None:
    data, how = torch.arange(size), order(size, batch, grains)
    loaders = [loader(data, how, rank, ranks) for rank in range(ranks)]
    for one in loaders:
        one.seek(0, per)
    epoch: list[int] = []
    for step in range(how.first_step(1)):
        found = [m for one in loaders for m in microbatches(one, step)]
        assert [g for m in found for g in m.grains] == how.grains(step)
        assert all(len(m.grains) <= per for m in found)
        for m in found:
            assert m.batch.tolist() == [i for ids in m.ids for i in ids.tolist()]
            assert m.num_samples == len(m.batch)
            assert [len(ids) for ids in m.ids] == [g.size for g in m.grains]
        epoch += [i for m in found for i in m.batch.tolist()]
    assert sorted(epoch) == list(range(size))


def test_samples_and_augmentation_do_not_depend_on_ranks_and_microbatches() -> None:
    how = order(50, 16, 5)

    def rows(ranks: int, per: int) -> torch.Tensor:
        found = []
        for rank in range(ranks):
            one = loader(Noisy(), how, rank, ranks)
            one.seek(2, per)
            found += [m.batch for m in microbatches(one, 2)]
        return torch.cat(found)

    assert len(rows(1, 5)[:, 1:].unique()) == 3 * 16, "each grain has noise of its own"
    assert all(torch.equal(rows(ranks, per), rows(1, 5)) for ranks in (1, 2, 3) for per in (1, 2, 4))


def test_split_and_samples_read_the_same_data_again() -> None:
    one = loader(Noisy(), order(50, 16, 4))
    (whole,) = microbatches(one, 0)
    parts = whole.split()
    assert [p.grains for p in parts] == [(g,) for g in whole.grains]
    assert torch.equal(torch.cat([p.batch for p in parts]), whole.batch)
    singles = parts[2].samples()
    assert [s.ids[0].tolist() for s in singles] == [[i] for i in parts[2].ids[0].tolist()]
    assert torch.equal(torch.cat([s.batch for s in singles])[:, 0], parts[2].batch[:, 0])
    assert [s.grains[0].start for s in singles] == [8, 9, 10, 11]
    assert all(s.num_samples == 1 and s.grains[0].index == 2 for s in singles)


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_change_nothing(workers: int) -> None:
    how = order(50, 16, 4)
    here, there = loader(Noisy(), how), loader(Noisy(), how, workers=workers)
    try:
        for one in (here, there):
            one.seek(0, 2)
        for step in (0, 1, 2, 3, 4, 1, 3):  # over the end of an epoch, then back
            for mine, theirs in zip(microbatches(here, step), microbatches(there, step), strict=True):
                assert mine.grains == theirs.grains
                assert torch.equal(mine.batch, theirs.batch)
    finally:
        there.close()


def test_a_sample_that_raised_in_a_worker_is_named() -> None:
    one = loader(Noisy(16, broken=5), order(16, 16, 4), workers=1)
    try:
        with pytest.raises(DataError) as caught:
            microbatches(one, 0)
        assert caught.value.given == "sample 5 of train_data"
    finally:
        one.close()


def test_a_step_can_be_asked_again_in_other_microbatches() -> None:
    one = loader(Noisy(), order(50, 16, 4))
    whole = torch.cat([m.batch for m in microbatches(one, 1)])
    one.seek(1, 1)
    again = microbatches(one, 1)
    assert len(again) == 4
    assert torch.equal(torch.cat([m.batch for m in again]), whole)
    assert torch.equal(torch.cat([m.batch for m in microbatches(one, 1)]), whole)


def test_a_rank_may_have_nothing_in_a_short_step() -> None:
    how = order(17, 16, 4)
    sizes = [sum(m.num_samples for m in microbatches(loader(Noisy(17), how, rank, 4), 1)) for rank in range(4)]
    assert sizes == [0, 0, 0, 1]


def test_the_last_step_of_a_length_in_samples_is_short() -> None:
    one = loader(Noisy(), order(50, 16, 4, Samples(37)))
    assert [sum(m.num_samples for m in microbatches(one, step)) for step in range(3)] == [16, 16, 5]


def test_epochs_are_counted() -> None:
    one = loader(Noisy(), order(50, 16, 4))
    assert [one.step(step).epoch for step in (0, 3, 4, 7)] == [0, 0, 1, 1]


def test_there_is_no_state_to_keep() -> None:
    one = loader(Noisy(), order(50, 16, 4))
    one.commit()
    assert one.state() == {}
    one.restore([{}, {}])


@pytest.mark.parametrize("write", [lambda rows: rows.data.neg_(), lambda rows: np.negative(rows.numpy(), rows.numpy())])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_that_a_job_writes_to_are_new_in_the_next_step_read(num_ranks: int, write: Any) -> None:
    """By any way, also such as torch does not count."""
    data = torch.arange(640.0).repeat(16, 1).T.contiguous()
    own = loader(data, order(640, 32, 8), 0, num_ranks)
    own.seek(0, 8 // num_ranks)
    assert microbatches(own, 0)
    write(data)
    for found in microbatches(own, 1):
        assert torch.equal(found.batch[:, 0], -torch.from_numpy(np.concatenate(found.ids)).float())


class OfEpochs(torch.utils.data.Dataset[Any]):
    """Samples that have the epoch in them."""

    epoch = -1

    def __len__(self) -> int:
        return 6

    def set_epoch(self, epoch: int) -> None:
        if epoch > 2:
            raise IndexError(epoch)
        self.epoch = epoch

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i, self.epoch])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: torch.utils.data.Subset(d, range(6))])
def test_a_dataset_is_told_the_epoch_of_each_sample(workers: int, wrap: Any) -> None:
    """In each worker, also of samples that are read ahead, a second time, or first after a resume in mid-epoch."""
    one = loader(wrap(OfEpochs()), order(6, 4, 2, Epochs(3)), workers=workers)
    for step in (3, 4, 5, 1, 2):
        one.seek(step, 2)
        ahead = one.step(step)
        first = next(ahead.microbatches)
        following = next(one.step(step + 1).microbatches)  # one after the last step has the last epoch
        assert first.batch[:, 1].tolist() == [step // 2] * len(first.batch)
        assert set(following.batch[:, 1].tolist()) == {min(2, (step + 1) // 2)}
        assert {e for part in first.split() for e in part.batch[:, 1].tolist()} == {step // 2}
    one.close()
