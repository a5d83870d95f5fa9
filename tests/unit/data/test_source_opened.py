"""A torch DataLoader as data: taken apart, what it says holds or is refused by name."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import shoal
from shoal.data.loader import DataRank, MapLoader
from shoal.data.order import Order
from shoal.data.samplers import Weighted
from shoal.data.source import MapSource, Opened, TensorSource, open_data, open_evaluation, opened, order_of
from shoal.errors import DataError, JobError

X, Y = torch.arange(24.0).view(12, 2), torch.arange(12)
ROWS = TensorDataset(X, Y)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(12))


class Drawn(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([3, 1])

    def __len__(self) -> int:
        return 2


class Renamed(RandomSampler):
    """Another order than torch's, for all that is known."""


class LengthGroupedSampler(Drawn):
    """Named as that of Transformers."""


class Rebatched(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Stateful:
    """As torchdata's: no subclass of torch's, with all its attributes."""

    __iter__ = DataLoader.__iter__

    def __init__(self, loader: DataLoader[Any]) -> None:
        vars(self).update(vars(loader))


class Foreign:
    """Another library's: batches, of a dataset that is within."""

    dataset, batch_size = ROWS, 4

    def __iter__(self) -> Iterator[Any]:
        return iter([])

    def __len__(self) -> int:
        return 3


def pad(samples: list[Any]) -> Any:
    return samples


def given(loader: Any, collate: Callable[[list[Any]], Any] | None = None) -> Opened:
    return open_data("train_data", loader, collate, 4)


def job(**changes: Any) -> shoal.Job:
    def unused(*_: Any) -> Any:
        raise AssertionError

    return shoal.Job(**{"model": unused, "loss": unused, "optimizer": unused, "global_batch": 4, **changes})


def test_its_dataset_is_read_as_if_given_alone() -> None:
    for loader in (DataLoader(ROWS, 4), lambda: DataLoader(ROWS, 4), Stateful(DataLoader(ROWS, 4))):
        found = given(loader)
        assert isinstance(found.source, TensorSource)
        assert len(found.source) == 12
        assert (found.shuffle, found.workers, found.notes) == (False, 0, ())


def test_its_order_holds() -> None:
    assert given(DataLoader(ROWS, 4, shuffle=True)).shuffle is True
    assert given(DataLoader(ROWS, 4, sampler=SequentialSampler(ROWS))).shuffle is False
    assert given(DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 4, False))).shuffle is True
    some = given(DataLoader(ROWS, 4, sampler=SubsetRandomSampler([5, 3, 1, 0])))
    assert some.shuffle is True
    assert isinstance(some.source, MapSource)
    assert len(some.source) == 4


def test_draws_with_replacement_and_by_weight_hold() -> None:
    weighted = WeightedRandomSampler([0.0] * 9 + [1.0, 2.0, 3.0], 20, generator=torch.Generator())
    found = opened(job(train_data=DataLoader(ROWS, 4, sampler=weighted), grains=4))
    order = order_of(found.train_data, found, found.length)
    assert (order.num_samples, order.num_steps) == (20, 5)
    assert set(np.concatenate([np.concatenate(order.ids(s, order.grains(s))) for s in range(5)])) == {9, 10, 11}
    assert found.describe()["sampler"]["draws"] == 20
    assert opened(found).describe() == found.describe()
    drawn = given(DataLoader(ROWS, 4, sampler=RandomSampler(ROWS, True))).sampler
    assert isinstance(drawn, Weighted)
    with pytest.raises(DataError, match="leave shuffle=True out"):
        opened(job(train_data=DataLoader(ROWS, 4, sampler=weighted), shuffle=True))
    with pytest.raises(DataError, match="an evaluation reads every sample once"):
        open_evaluation("eval_data", DataLoader(ROWS, 4, sampler=weighted), None)
    with pytest.raises(JobError, match="of 3 samples, and a dataset of 12"):
        opened(job(train_data=DataLoader(ROWS, 4, sampler=WeightedRandomSampler([1.0] * 3, 12))))


def test_its_collate_function_makes_the_batches() -> None:
    source = given(DataLoader(range(12), 4, collate_fn=pad)).source  # type: ignore[arg-type]
    assert isinstance(source, MapSource)
    assert source.fetch([Y[:2].numpy()], [0]) == [0, 1]
    assert given(DataLoader(Stream(), 4, collate_fn=pad)).collate is pad
    assert given(DataLoader(Stream(), 4), pad).collate is pad
    assert given(DataLoader(Stream(), 4, collate_fn=pad), pad).collate is pad


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_has_an_order_of_its_own(shuffle: bool) -> None:
    said = f"train_data: shuffle={shuffle} has no effect: a stream is read in its own order"
    assert open_data("train_data", iter(range(3)), None, 8, shuffle).notes == (said,)
    assert open_data("train_data", iter(range(3)), None, 8).notes == ()
    assert open_data("train_data", list(range(3)), None, 8, shuffle).notes == ()


def test_a_stream_within_is_a_stream() -> None:
    stream = Stream()
    found = given(DataLoader(stream, 4, num_workers=2))
    assert found.source is stream
    assert found.notes == ("train_data: num_workers=2 has no effect: a stream is read in the rank itself",)


def test_what_has_no_effect_is_said() -> None:
    (note,) = given(DataLoader(ROWS, 4, shuffle=True, generator=torch.Generator())).notes
    assert "the job's seed" in note


def test_no_matter_what_batches_an_evaluation_has() -> None:
    assert isinstance(open_data("eval_data", DataLoader(ROWS, 5), None).source, MapSource)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "batch size": (lambda: DataLoader(ROWS, 3), "write batch_size=4 there, or global_batch=3"),
    "default batch size": (lambda: DataLoader(ROWS), "write batch_size=4 there"),
    "whole batches": (lambda: DataLoader(ROWS, None), "a dataset of single samples"),
    "batch sampler": (lambda: DataLoader(ROWS, batch_sampler=[[0, 1]]), "batch_sampler=list"),
    "sampler": (lambda: DataLoader(ROWS, 4, sampler=Drawn()), r"Subset\(dataset, list\(sampler\)\)"),
    "sampler's subclass": (lambda: DataLoader(ROWS, 4, sampler=Renamed(ROWS)), "sampler=Renamed"),
    "length": (lambda: DataLoader(ROWS, 4, sampler=LengthGroupedSampler()), r"sampler=shoal.ByLength\(lengths"),
    "num_samples": (lambda: DataLoader(ROWS, 4, sampler=RandomSampler(ROWS, num_samples=5)), "num_samples=5"),
    "other data": (lambda: DataLoader(ROWS, 4, sampler=RandomSampler(range(5))), "5 of its 12 samples"),
    "distributed": (
        lambda: DataLoader(ROWS, 2, sampler=DistributedSampler(ROWS, 2, 0, seed=7)),
        r"DataLoader\(dataset, batch_size=4, shuffle=True\), and seed=7",
    ),
    "drop_last": (lambda: DataLoader(Subset(ROWS, range(11)), 4, drop_last=True), "give 8 samples"),
    "drop_last of a stream": (lambda: DataLoader(Stream(), 4, drop_last=True), "drop_last=True"),
    "subclass": (lambda: Rebatched(ROWS, 4), "give its dataset"),
    "another library's": (Foreign, "the dataset itself"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(kind: str) -> None:
    build, said = REFUSED[kind]
    with pytest.raises(DataError, match=said):
        given(build())


def test_everything_is_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"(?s)batch_size=3.*collate_fn=pad and collate=<lambda>.*drop_last=True"):
        given(DataLoader(Subset(ROWS, range(11)), 3, collate_fn=pad, drop_last=True), lambda samples: samples)


def test_drop_last_where_nothing_is_dropped() -> None:
    assert isinstance(given(DataLoader(ROWS, 4, drop_last=True)).source, MapSource)


@pytest.mark.parametrize(("loader", "said", "holds"), [(False, None, False), (True, None, True), (None, None, True)])
def test_a_job_that_says_nothing_has_the_order_of_its_data(loader: bool | None, said: None, holds: bool) -> None:
    data: Any = ROWS if loader is None else DataLoader(ROWS, 4, shuffle=loader)
    found = opened(job(train_data=data, shuffle=said))
    assert found.shuffle is holds
    assert found.describe()["shuffle"] is holds
    assert opened(found).describe() == found.describe()


@pytest.mark.parametrize("said", [True, False])
def test_a_job_and_its_data_have_to_agree(said: bool) -> None:
    assert opened(job(train_data=DataLoader(ROWS, 4, shuffle=said), shuffle=said)).shuffle is said
    with pytest.raises(DataError, match=f"leave shuffle={said} out"):
        opened(job(train_data=DataLoader(ROWS, 4, shuffle=not said), shuffle=said))


class Prepared(Dataset[Any]):
    """Samples that only a prepared worker can read."""

    factor = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i * self.factor)


def prepare(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.factor = 10  # type: ignore[attr-defined]


def test_worker_processes_are_prepared_as_it_says() -> None:
    found = given(DataLoader(Prepared(), 4, num_workers=1, worker_init_fn=prepare, prefetch_factor=3, timeout=60))
    assert dict(found.reading) == {"worker_init_fn": prepare, "prefetch_factor": 3, "timeout": 60}
    assert isinstance(found.source, MapSource)
    order = Order(12, 4, 2, seed=0, shuffle=False, length=shoal.Steps(3))
    loader = MapLoader(found.source, order, DataRank(0, 1), 1, pin_memory=False, reading=found.reading)
    try:
        batches = [microbatch.batch.tolist() for microbatch in loader.step(1).microbatches]
    finally:
        loader.close()
    assert batches == [[40, 50, 60, 70]]
