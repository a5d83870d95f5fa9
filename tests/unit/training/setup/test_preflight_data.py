"""Digests of a job's data: they follow the samples wherever they are in the set, and have no say where these vary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shoal.data.source import MapSource, source_of
from shoal.training.setup import preflight
from shoal.training.setup.preflight import _PARTS, _digests_of, _some


class Numbers(Dataset[Any]):
    def __init__(self, length: int, other: range = range(0), own: bool = False) -> None:
        self.length, self.other, self.rng = length, other, np.random.default_rng() if own else None
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        noise = self.rng.normal() if self.rng is not None else float(torch.rand(()))  # of grains, or of its own
        return torch.tensor([i, noise]), -1 if i in self.other else i % 4


@pytest.fixture(autouse=True)
def _all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_SECONDS", 60.0)  # however busy the machine is


def digests(data: Any, workers: int | None = 0, most: int = len(_PARTS)) -> list[str]:
    return _digests_of(source_of("train_data", data, None), workers, most)


@pytest.mark.parametrize("length", [1, 3, 200, 100_000])
def test_samples_are_drawn_over_the_whole_set(length: int) -> None:
    same = digests(Numbers(length))
    assert same == digests(Numbers(length))
    for begin in range(0, length, -(-length // 5)):  # a fifth of the samples is other ones
        assert digests(Numbers(length, range(begin, begin - (-length // 5)))) != same


@pytest.mark.parametrize("workers", [0, 2])
def test_readers_in_processes_and_here_agree(workers: int) -> None:
    data = Numbers(500)
    assert digests(data, workers) == digests(Numbers(500))
    assert data.reads == 0  # files that a worker opens stay closed here


class Rotated:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, x: float) -> torch.Tensor:
        return torch.tensor(x + self.rng.normal())


class Transformed(Dataset[Any]):
    def __init__(self) -> None:
        self.transforms = [Rotated()]

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> Any:
        return self.transforms[0](i)


def test_generators_of_a_dataset_stay_as_they_are() -> None:
    data = Transformed()
    assert digests(data) == []
    assert float(data[0]) == np.float32(np.random.default_rng(3).normal())


def test_tensors_and_parts() -> None:
    x = torch.arange(1000.0)
    found = digests((x, -x))
    assert len(found) == len(_PARTS)
    assert digests((x, x)) != found
    assert digests((x, -x), most=2) == found[:2]


def test_data_that_vary_have_none() -> None:
    assert digests(Numbers(500, own=True)) == []
    assert digests(iter([1, 2])) == []
    assert digests(Numbers(500), None) == []
    assert not isinstance(source_of("train_data", iter([1]), None), MapSource)


def test_data_that_cannot_be_read_are_the_steps_to_tell() -> None:
    class Broken(Numbers):
        def __getitem__(self, i: int) -> Any:
            raise OSError("gone")

    assert digests(Broken(500)) == digests(Broken(500), 1) == []


def test_ranks_agree_that_data_vary() -> None:
    assert _some(source_of("train_data", Numbers(500, own=True), None)) is None
    assert _some(source_of("train_data", Numbers(500), None)) is not None
