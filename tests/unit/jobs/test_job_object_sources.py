"""Digests of a job that is an object: they follow what is computed, not how it is written or called."""

from __future__ import annotations

import linecache
from functools import partial
from typing import Any

import pytest

from shoal.jobs.differences import changed
from shoal.jobs.job import Epochs, Job, warmup_cosine
from shoal.jobs.job_file import JOB_FILE
from shoal.jobs.job_object import code_of
from shoal.training.callbacks.ema import EMA

TEXT = """
RATE = 0.1
class Net:
    width = 3
    def forward(self, x):
        return x * self.width
def scale(x, by=2):
    return RATE * x * by
def loss(model, batch):
    return scale(model(batch)), 1
def data():
    return [1, 2]
def job(lr: float = 0.1):
    return Job(model=Net, loss=loss, optimizer=lambda p: [p, lr], train_data=data, global_batch=4, seed=1)
made = Job(
    model=Net, loss=lambda model, batch: (model(batch), 1), optimizer=lambda p: [p], train_data=data, global_batch=4
)
"""


def namespace(text: str, *, readable: bool = True) -> dict[str, Any]:
    name = f"<cell {hash((text, readable))}>"
    if readable:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    found: dict[str, Any] = {"__name__": "__main__", "Job": Job}
    exec(compile(text, name, "exec"), found)
    return found


def differences(name: str, old: str, new: str, *, readable: bool = True) -> list[str]:
    """What `changed` says of the object of that name once a text was replaced."""
    assert old in TEXT
    before, now = (namespace(text, readable=readable)[name] for text in (TEXT, TEXT.replace(old, new)))
    return changed(code_of(before), code_of(now))


CASES: dict[str, tuple[str, str, str, str]] = {
    "the job function": ("job", "lr]", "2 * lr]", "job"),
    "a function of it": ("job", "scale(model", "-scale(model", "loss"),
    "a function of that": ("job", "RATE * x", "RATE + x", "scale"),
    "a default": ("job", "by=2", "by=3", "scale(by)"),
    "a global value": ("job", "RATE = 0.1", "RATE = 0.2", "scale: RATE"),
    "a method": ("job", "x * self", "x + self", "Net.forward"),
    "a class's value": ("job", "width = 3", "width = 4", "Net.width"),
    "a Job's lambda": ("made", "(model(batch), 1)", "(model(batch), 2)", "loss"),
    "a lambda beside it": ("made", "lambda p: [p]", "lambda p: [p, p]", "optimizer"),
    "a Job's function": ("made", "return [1, 2]", "return [1, 3]", "data"),
}


@pytest.mark.parametrize("readable", [True, False], ids=["source", "bytecode"])
@pytest.mark.parametrize("case", CASES)
def test_a_change_is_named(case: str, readable: bool) -> None:
    name, old, new, where = CASES[case]
    (found,) = differences(name, old, new, readable=readable)
    also = "scale, " if readable and case == "a default" else ""  # its text is the function's as well
    assert found == f"{JOB_FILE}: {also}{where}"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("job", "def data():", "# why\n\ndef data():"),
        ("job", "def data():\n", 'def data():\n    """Two."""\n'),
        ("job", "lr: float = 0.1", "lr: float = 0.5"),
        ("job", "seed=1", "seed=1, length=3"),
        ("job", "seed=1)", "seed=1, on_nonfinite='skip')"),
        ("made", "lambda p: [p]", "lambda p: [  p ]"),
        ("job", "made = Job(", "unused = 3\nmade = Job("),
    ],
    ids=["comment", "docstring", "setting", "length", "on_nonfinite", "spaces", "other lines"],
)
def test_what_computes_nothing_is_no_change(name: str, old: str, new: str) -> None:
    assert differences(name, old, new) == []


def test_numbers_of_a_job_are_compared_elsewhere() -> None:
    made = namespace(TEXT)["made"]
    assert code_of(made)[JOB_FILE].keys() == {
        *("Net.forward", "Net.width", "callbacks", "data", "fuse", "loss", "optimizer")
    }


def test_values_that_are_no_code_are_read_too() -> None:
    def job(loss: Any) -> Job:
        return Job(
            model=dict, loss=loss, optimizer=partial(_rated, lr=0.1), train_data=[1], global_batch=1, length=Epochs(1)
        )

    def closed(factor: float) -> Any:
        return lambda model, batch: (factor * model, 1)

    one, other = code_of(job(closed(1.0))), code_of(job(closed(2.0)))
    assert changed(one, other) == [f"{JOB_FILE}: loss: factor"]
    assert code_of(job(closed(1.0))) == one
    # What a module of this file defines counts with its file.
    assert any(name.endswith("test_job_object_sources.py") for name in one)


def test_state_that_computes() -> None:
    """A schedule's numbers, a data set's transform; not what may change while the job is the same."""

    class Data:
        def __init__(self, transform: Any) -> None:
            self.transform, self.reads = transform, 0

    def job(**changes: Any) -> Job:
        given: dict[str, Any] = {"model": dict, "loss": print, "optimizer": list, "train_data": [1], "global_batch": 1}
        return Job(**{**given, **changes})

    def differing(one: Job, other: Job) -> list[str]:
        return changed(code_of(one), code_of(other))

    short, long = (job(schedule=warmup_cosine(part)) for part in (0.1, 0.2))
    assert differing(short, long) == [f"{JOB_FILE}: schedule.warmup"]
    slow, fast = (job(callbacks=[EMA(decay)]) for decay in (0.9, 0.99))
    assert differing(slow, fast) == [f"{JOB_FILE}: callbacks[0].decay"]
    read = Data(len)
    read.reads = 3
    assert differing(job(train_data=Data(len)), job(train_data=read)) == []

    def scaled(by: int) -> Data:
        return Data(lambda x: by * x)

    twice, thrice = (job(train_data=scaled(by)) for by in (2, 3))
    assert differing(twice, thrice) == [f"{JOB_FILE}: train_data.transform: by"]


def _rated(parameters: Any, lr: float) -> Any:
    return parameters, lr


def test_recursion_ends() -> None:
    found = namespace("def one(x):\n    return two(x)\ndef two(x):\n    return one(x) + y\ny = []\ny.append(y)\n")
    assert code_of(found["one"])[JOB_FILE].keys() == {"one", "two", "y"}
