"""Sources: whatever kind the data are, the samples of a grain are the same in any microbatch."""

import random
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from shoal.data.source import MapSource, NoSamples, SampleSource, TensorSource, open_data
from shoal.errors import DataError, DatasetNotFoundError
from shoal.plans.grains import random_key

X, Y = torch.arange(24.0).view(12, 2), torch.arange(12)
IDS = [np.array([3, 0]), np.array([11])]


def opened(data: Any, collate: Callable[[list[Any]], Any] | None = None) -> MapSource:
    source = open_data("train_data", data, collate).source
    assert isinstance(source, MapSource)
    return source


def fetch(data: Any, collate: Callable[[list[Any]], Any] | None = None) -> Any:
    return opened(data, collate).fetch(IDS, [1, 2])


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return X[i], Y[i]


class Many(Plain):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [(X[i], Y[i]) for i in ids]

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("one by one")


PAIRS = {
    "tuple": (X, Y),
    "numpy": (X.numpy(), Y.numpy()),
    "TensorDataset": TensorDataset(X, Y),
    "plain": Plain(),
    "many": Many(),
    "subset": Subset(Plain(), range(12)),
    "list": [(X[i], Y[i]) for i in range(12)],
    "function": lambda: (X, Y),
    "class": Plain,
}


@pytest.mark.parametrize("kind", PAIRS)
def test_every_kind_gives_the_same_batch(kind: str) -> None:
    source = opened(PAIRS[kind])
    assert len(source) == 12
    batch = fetch(PAIRS[kind])
    assert isinstance(batch, list)
    assert torch.equal(batch[0], X[[3, 0, 11]])
    assert torch.equal(batch[1], Y[[3, 0, 11]])


@pytest.mark.parametrize("kind", ["tuple", "numpy", "TensorDataset"])
def test_tensors_are_indexed_whole(kind: str) -> None:
    assert isinstance(opened(PAIRS[kind]), TensorSource)
    assert isinstance(opened(Plain()), SampleSource)


def test_a_tensor_alone_and_tensors_by_name() -> None:
    assert torch.equal(fetch(X), X[[3, 0, 11]])
    named = fetch({"x": X, "y": Y.numpy()})
    assert list(named) == ["x", "y"]
    assert torch.equal(named["y"], Y[[3, 0, 11]])


def test_a_batch_is_no_view_of_the_data() -> None:
    data = np.arange(12.0)
    batch = open_data("d", data, None).source.fetch([np.array([0, 1])], [0])  # type: ignore[union-attr]
    batch.fill_(-1)
    assert data.min() == 0.0


def test_a_collate_function_is_given_the_samples_in_order() -> None:
    assert fetch(list(range(12)), lambda samples: samples) == [3, 0, 11]
    assert fetch(TensorDataset(Y), lambda samples: [int(s[0]) for s in samples]) == [3, 0, 11]


def test_a_collate_function_of_tensors_is_given_their_rows() -> None:
    assert len(opened((X, Y), lambda samples: samples)) == 12


@pytest.mark.parametrize("data", [(X, list(range(12))), (X, "labels")])
def test_a_tuple_that_is_not_all_tensors_is_refused(data: Any) -> None:
    with pytest.raises(DataError):
        opened(data)


class Augmented(Plain):
    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i + torch.rand(()), random.random(), np.random.rand()])


@pytest.mark.parametrize("many", [False, True])
def test_augmentation_belongs_to_the_grain(many: bool) -> None:
    data = Augmented()
    if many:
        data.__getitems__ = lambda ids: [data[i] for i in ids]  # type: ignore[attr-defined]
    source = opened(data)
    grains = [np.array([4, 7]), np.array([1, 2]), np.array([9])]
    keys = [random_key(0, "data", 5, g) for g in range(3)]
    whole = source.fetch(grains, keys)
    for torn in ([[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]]):
        random.random(), torch.rand(3), np.random.rand(2)
        parts = [source.fetch([grains[g] for g in run], [keys[g] for g in run]) for run in torn]
        assert torch.equal(torch.cat(parts), whole)
    assert len(set(whole.flatten().tolist())) == 15
    assert not torch.equal(source.fetch(grains[:1], keys[1:2]), whole[:2])


@pytest.mark.parametrize("data", [[], X[:0], (X[:0], Y[:0]), list, {}])
def test_empty_data_are_refused(data: Any) -> None:
    with pytest.raises(DataError):
        opened(data)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(DataError, match=r"first dims \[11, 12\]"):
        opened((X, Y[:11]))
    with pytest.raises(DataError, match=r"first dims \[11, 12\]"):
        opened({"x": X, "y": Y[:11].numpy()})


@pytest.mark.parametrize("data", [3, object(), Dataset()])
def test_what_is_no_dataset_is_refused(data: Any) -> None:
    with pytest.raises(DataError, match=f"train_data of type {type(data).__name__}"):
        opened(data)


def test_a_scalar_is_refused() -> None:
    with pytest.raises(DataError):
        opened(torch.tensor(1.0))


def test_a_stream_comes_back_as_it_is() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    def generate() -> Iterator[int]:
        yield from range(3)

    stream, generator = Stream(), generate()
    assert open_data("d", stream, None).source is stream
    assert open_data("d", generator, None).source is generator
    found = open_data("d", generate, None).source
    assert not isinstance(found, MapSource)
    assert list(found) == [0, 1, 2]


class Broken(Plain):
    def __getitem__(self, i: int) -> Any:
        if i == 11:
            raise KeyError("no such image")
        return X[i]


def test_the_sample_that_raised_is_named() -> None:
    with pytest.raises(DataError) as caught:
        fetch(Broken())
    assert caught.value.given == "sample 11 of train_data"
    assert "KeyError: 'no such image'" in caught.value.conflict
    assert "test_source.py:" in caught.value.conflict
    assert isinstance(caught.value.__cause__, KeyError)


def test_samples_read_together_are_named_together() -> None:
    class All(Broken):
        def __getitems__(self, ids: list[int]) -> list[Any]:
            return [self[i] for i in ids]

    with pytest.raises(DataError) as caught:
        fetch(All())
    assert caught.value.given == "samples [11] of train_data"
    with pytest.raises(DataError, match=r"samples \[0, 1, ... 11\] \(12\)"):
        opened(All()).fetch([np.arange(12)], [0])


def test_samples_that_do_not_fit_together_ask_for_a_collate() -> None:
    with pytest.raises(DataError, match="collating them raised RuntimeError") as caught:
        fetch([torch.zeros(i + 1) for i in range(12)])
    assert caught.value.given == "a batch of 3 samples of train_data"
    assert "Job(collate=...)" in caught.value.remedy


def test_a_function_that_raises_is_named() -> None:
    def build() -> Any:
        raise ValueError("disk is gone\nand more")

    with pytest.raises(
        DataError, match=r"it raised ValueError: disk is gone at .*test_source.py:\d+ in build;"
    ) as caught:
        opened(build)
    assert 'raise ValueError("disk is gone' in str(caught.value.traceback_text), "for the run directory"

    def missing() -> Any:
        raise DatasetNotFoundError(given="a", conflict="b", remedy="c")

    with pytest.raises(DatasetNotFoundError):
        opened(missing)


def test_a_mapping_of_another_library_is_a_dict() -> None:
    """As a tokenizer's BatchEncoding, whose tensors torch's pytree does not see."""
    batch = fetch(list(range(20)), lambda samples: UserDict(ids=torch.tensor(samples)))
    assert type(batch) is dict
    assert torch.equal(batch["ids"], torch.tensor(np.concatenate(IDS)))


@pytest.mark.parametrize("odd", [0, 5])
def test_the_sample_that_does_not_fit_the_others_is_named(odd: int) -> None:
    rows = [torch.zeros(3 if i == odd else 2) for i in range(12)]
    with pytest.raises(DataError, match="collating them raised RuntimeError") as caught:
        opened(rows).fetch([np.arange(4), np.arange(4, 8)], [0, 0])
    assert caught.value.given == f"sample {odd} of train_data"
    assert "mend what does not fit" in caught.value.remedy
    assert len(opened(rows).fetch([np.arange(8, 12)], [0])) == 4


def test_shared_memory_that_is_too_small_is_no_fault_of_the_samples() -> None:
    def full(samples: list[Any]) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    with pytest.raises(DataError, match="shared memory") as caught:
        fetch(Plain(), full)
    assert "--shm-size" in caught.value.remedy


# ------------------------------------------------------------------------------------------- own generators, no samples


class Seeds(Plain):
    """Each sample with noise: of a generator of the dataset's own, of a new one for the sample, or of torch's."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rng = kind, np.random.default_rng(0)

    def __getitem__(self, i: int) -> Any:
        if self.kind == "own":
            return X[i] + float(self.rng.normal())
        return X[i] + (np.random.default_rng(i).normal() if self.kind == "of sample" else torch.randn(2))


@pytest.mark.parametrize("kind", ["of sample", "torch"])
def test_samples_that_are_the_same_again_pass(kind: str) -> None:
    opened(Seeds(kind)).check_repeats(IDS, [1, 2])


def test_a_generator_of_the_dataset_s_own_is_named() -> None:
    with pytest.raises(DataError, match="sample 3 of train_data, read twice") as caught:
        opened(Seeds("own")).check_repeats(IDS, [1, 2])
    assert "its attribute 'rng'" in caught.value.conflict


def test_a_collate_function_that_draws_from_a_generator_of_its_own_is_named() -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]) + torch.randn(1, generator=generator)

    with pytest.raises(DataError, match="the batch that collate makes of samples of train_data"):
        opened(Plain(), noisy).check_repeats(IDS, [1, 2])


class Holes(Plain):
    def __getitem__(self, i: int) -> Any:
        return None if i % 3 == 0 else X[i]


def only_whole(samples: list[Any]) -> Any:
    return torch.stack([sample for sample in samples if sample is not None])


def first_rows(samples: list[Any]) -> Any:
    return torch.zeros(0, 2), [sample for sample in samples if sample is not None]


@pytest.mark.parametrize("collate", [only_whole, first_rows])
def test_samples_that_are_all_left_out_are_no_samples(collate: Callable[[list[Any]], Any]) -> None:
    source = opened(Holes(), collate)
    assert isinstance(source.fetch([np.array([3, 0])], [1]), NoSamples)


def test_a_collate_function_that_always_raises_is_no_empty_batch() -> None:
    def raises(samples: list[Any]) -> Any:
        raise RuntimeError("no")

    with pytest.raises(DataError, match="no"):
        fetch(Plain(), raises)


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        ({"a": DataLoader(TensorDataset(X)), "b": DataLoader(TensorDataset(X))}, "dict with 'a': DataLoader"),
        ({"train": [1, 2], "test": [3]}, "dict with 'train': list"),
        ([TensorDataset(X), TensorDataset(X)], "list with 0: TensorDataset, 1: TensorDataset"),
    ],
)
def test_several_sets_in_one_are_refused(data: Any, kinds: str) -> None:
    with pytest.raises(DataError) as caught:
        opened(data)
    assert kinds in caught.value.given
    assert "ConcatDataset" in caught.value.remedy


def test_a_dict_by_number_is_a_data_set() -> None:
    assert len(opened({number: (X[number], number) for number in range(12)})) == 12


class Keeps(Plain):
    """Keeps what it has drawn for a sample; `seeded`: from the sample's index."""

    def __init__(self, seeded: bool) -> None:
        self.seeded, self.kept = seeded, dict[int, torch.Tensor]()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.kept:
            if self.seeded:
                torch.manual_seed(index)
            self.kept[index] = torch.rand(2)
        return self.kept[index]


def test_a_sample_that_is_drawn_once_and_kept_is_refused() -> None:
    with pytest.raises(DataError, match="draw random numbers in their first reading and no more"):
        opened(Keeps(seeded=False)).check_repeats(IDS, [1, 2])
    opened(Keeps(seeded=True)).check_repeats(IDS, [1, 2])
