"""A Job is checked as a whole when it is made."""

import itertools
import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.errors import JobError
from shoal.jobs.job import Epochs, Job, Progress, Samples, Steps, warmup_cosine


def job(**changes: Any) -> Job:
    fields = {"model": object, "loss": print, "optimizer": print, "train_data": [1], "global_batch": 32}
    return Job(**{**fields, **changes})


def test_every_mistake_is_told_at_once() -> None:
    wrong = {
        "model": None,
        "loss": 3,
        "optimizer": "sgd",
        "schedule": 0.1,
        "collate": [],
        "metrics": {"accuracy": 3},
        "global_batch": 0,
        "grains": 2.5,
        "seed": -1,
        "clip_norm": math.nan,
        "length": 10,
        "train_data": None,
        "on_nonfinite": "ignore",
        "shuffle": "yes",
    }
    with pytest.raises(JobError) as caught:
        job(**wrong)
    error = caught.value
    for name in wrong:
        assert name in error.given, name
    assert len(error.conflict.split("; ")) == len(error.remedy.split("; ")) == len(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("global_batch", v) for v in (0, -4, 2.0, True, "8", None)],
        *[("grains", v) for v in (0, -1, True, 2.0)],
        *[("seed", v) for v in (-1, 1.5, None, True)],
        *[(name, v) for name in ("clip_norm", "clip_value") for v in (0, -1.0, math.inf, math.nan, True, "1")],
        *[("length", v) for v in (None, 3, Steps(0), Steps(2.5), Samples(-1), Epochs(0.0), Epochs(math.nan))],
        *[("length", v) for v in (Epochs(math.inf), Steps(True), Epochs("3"))],
        *[("metrics", v) for v in ([print], {"loss": print}, None)],
        *[("shuffle", v) for v in (0, "no")],
        *[("buffers", v) for v in (("load",), {"load": "average"}, {3: "sum"})],
    ],
)
def test_a_wrong_field_is_refused(name: str, value: Any) -> None:
    with pytest.raises(JobError) as caught:
        job(**{name: value})
    assert name in caught.value.given


def test_right_fields_are_kept() -> None:
    made = job(length=Epochs(0.5), clip_norm=1, seed=2**70, metrics={"accuracy": print}, grains=5)
    assert made.grain_size == 7
    assert made.describe() == {
        "global_batch": 32,
        "grains": 5,
        "length": {"kind": "epochs", "count": 0.5},
        "clip_norm": 1,
        "clip_value": None,
        "seed": 2**70,
        "shuffle": True,
        "on_nonfinite": "stop",
        "allow_state": [],
        "buffers": {},
    }


def test_a_module_instead_of_a_function_that_builds_it_is_refused() -> None:
    with pytest.raises(JobError) as caught:
        job(model=torch.nn.Sequential(torch.nn.Linear(1, 1)))
    assert caught.value.given == "Job(model=Sequential(...))"
    assert "give a function that builds it" in caught.value.remedy
    assert job(model=torch.nn.Linear).model is torch.nn.Linear


def test_progress_is_a_fraction_that_knows_its_step() -> None:
    progress = Progress(3, 12, 96)
    assert (progress, progress.step, progress.num_steps, progress.samples) == (0.25, 3, 12, 96)
    assert Progress(20, 12, 640) == 1.0
    assert Progress(0, 0, 0) == 0.0


def test_warmup_rises_from_one_step_and_the_cosine_falls_to_the_floor() -> None:
    schedule = warmup_cosine(warmup=0.2, floor=0.1)
    values = [schedule(Progress(step, 20, 0)) for step in range(21)]
    assert values[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert values[4] == pytest.approx(1.0)
    assert values[12] == pytest.approx(0.1 + 0.9 * 0.5)  # half way down
    assert values[8] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert values[20] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(values[4:]))
    assert warmup_cosine()(Progress(0, 10, 0)) == 1.0
    assert warmup_cosine(0.5)(0.25) == 0.5  # a plain float knows no steps


@given(st.floats(0, 0.99), st.floats(0, 1), st.integers(1, 500), st.data())
def test_a_multiplier_stays_between_zero_and_one(warmup: float, floor: float, steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, steps))
    assert 0.0 <= warmup_cosine(warmup, floor)(Progress(step, steps, 0)) <= 1.0


@pytest.mark.parametrize(("warmup", "floor"), [(1.0, 0.0), (-0.1, 0.0), (0.0, 1.1), (0.0, -1.0), (math.nan, 0.0)])
def test_a_schedule_that_makes_no_sense_is_refused(warmup: float, floor: float) -> None:
    with pytest.raises(JobError, match="warmup_cosine"):
        warmup_cosine(warmup, floor)


COLUMNS = {"x": np.zeros((3, 2)), "y": np.zeros(3)}
SETS: list[tuple[Any, list[str]]] = [
    (None, []),
    (print, [""]),
    (COLUMNS, [""]),
    ((1, 2), [""]),
    ({}, [""]),
    ({0: "a", 1: "b"}, [""]),
    ({"clean": print, "noisy": COLUMNS}, ["clean", "noisy"]),
    ({"clean": COLUMNS["x"], "noisy": print}, ["clean", "noisy"]),
]


@pytest.mark.parametrize(("data", "names"), SETS)
def test_evaluation_sets_and_their_metrics(data: Any, names: list[str]) -> None:
    made = job(eval_data=data, metrics={"accuracy": print})
    assert list(made.evaluation_sets) == names
    if names in ([], [""]):
        assert made.metric_names == ("loss", "accuracy")
    else:
        assert made.metric_names == ("clean/loss", "clean/accuracy", "noisy/loss", "noisy/accuracy")
        assert job(eval_data=data, watch="noisy/loss:min").watched == ("noisy/loss", False)


def test_an_evaluation_set_has_a_name() -> None:
    with pytest.raises(JobError, match="evaluation sets have names"):
        job(eval_data={"": print, "noisy": print})


MEANT = [
    ("val_loss", "loss"),
    ("eval/accuracy", "accuracy"),
    ("val_acc", "accuracy"),
    ("test_f1", "accuracy"),
    ("acuracy", "accuracy"),
]


@pytest.mark.parametrize(("given", "meant"), MEANT)
def test_a_metric_that_there_is_not_is_answered_with_the_one_that_was_meant(given: str, meant: str) -> None:
    made = partial(job, eval_data=print, metrics={"accuracy": print})
    with pytest.raises(JobError, match=re.escape(f"write EarlyStopping('{meant}', ...)")):
        made(callbacks=[shoal.EarlyStopping(given)])
    with pytest.raises(JobError, match=re.escape(f'write watch="{meant}:min"')):
        made(watch=f"{given}:min")


def test_a_metric_of_several_sets_is_of_the_first() -> None:
    with pytest.raises(JobError, match=r"write EarlyStopping\('clean/loss'"):
        job(eval_data={"clean": print, "noisy": print}, callbacks=[shoal.EarlyStopping()])


@pytest.mark.parametrize(
    ("metric", "mode", "other"),
    [
        ("accuracy", "min", "max"),
        ("loss", "max", "min"),
        ("ema_loss", "max", "min"),
        ("clean/accuracy", "min", "max"),
        ("accuracy", "max", None),
        ("loss", "min", None),
        ("reward", "min", None),
    ],
)
def test_a_mode_that_contradicts_a_name_is_warned_of(metric: str, mode: Any, other: str | None) -> None:
    sets = {"clean": print} if "/" in metric else print
    named = {"accuracy": print, "reward": print, "ema_loss": print}
    found = [
        job(eval_data=sets, metrics=named, **given).doubtful()
        for given in ({"watch": f"{metric}:{mode}"}, {"callbacks": [shoal.EarlyStopping(metric, mode=mode)]})
    ]
    for lines in found:
        assert [line.endswith(f"of such a metric write {other!r}") for line in lines] == [True] * (other is not None)
