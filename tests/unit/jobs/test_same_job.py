from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from shoal.jobs.job import Epochs, Job
from shoal.jobs.same_job import differing_fields


@dataclass
class Row:
    value: float


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int, value: float = 0.0) -> None:
        self.rows = [Row(value) for _ in range(count)]
        self.generator = torch.Generator().manual_seed(count)

    def __getitem__(self, i: int) -> Row:
        return self.rows[i]


def of(data: Any, epochs: int = 1, **fields: Any) -> Job:
    return Job(model=dict, loss=max, optimizer=min, train_data=data, global_batch=8, length=Epochs(epochs), **fields)


def made(value: Any) -> Callable[[], Any]:
    def build() -> Any:
        class Within:
            def answer(self) -> Any:
                return value

        return [value, lambda: value, Within]

    return build


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (lambda x: torch.full((4,), x), 1.0, 2.0),
        (lambda x: torch.full((4,), 1, dtype=x), torch.float32, torch.float64),
        (lambda x: np.full(4, x), float("nan"), 0.0),
        (lambda x: Rows(3, x), 1.0, 2.0),
        (lambda x: Rows(x), 3, 4),
        (made, "a", "b"),
        (lambda x: made(x)()[2], 1, 2),
        (lambda x: functools.partial(made, x), 1, 2),
        (lambda x: {"a": [x, (x, {x})]}, 1, 2),
        (lambda x: Rows(3, x).__getitem__, 1.0, 2.0),
        (lambda x: lambda a=x: a, 1, 2),
        (lambda x: torch.utils.data.Subset(Rows(3), [x]), 1, 2),
    ],
)
def test_what_is_the_same_and_what_is_not(make: Callable[[Any], Any], one: Any, other: Any) -> None:
    assert differing_fields(of(make(one)), of(make(one), epochs=3)) == ("length",)
    assert differing_fields(of(make(one)), of(make(other))) == ("train_data",)


def test_what_cannot_be_compared_is_not_the_same() -> None:
    def stream() -> Any:
        yield 1

    assert differing_fields(of(stream()), of(stream(), seed=1)) == ("train_data", "seed")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    other: list[Any] = []
    for _ in range(100_000):
        other = [other]
    assert differing_fields(of(deep), of(other)) == ("train_data",)


def test_a_circle_ends() -> None:
    def circle() -> list[Any]:
        found: list[Any] = []
        found.append(found)
        return found

    assert differing_fields(of(circle()), of(circle())) == ()


def test_globals_that_a_function_reads() -> None:
    source = "def helper():\n    return X\n\n\ndef data():\n    return helper()\n"

    def loaded(x: int) -> Any:
        space: dict[str, Any] = {"X": x}
        exec(compile(source, "job.py", "exec"), space)
        return space["data"]

    assert differing_fields(of(loaded(1)), of(loaded(1))) == ()
    assert differing_fields(of(loaded(1)), of(loaded(2))) == ("train_data",)
