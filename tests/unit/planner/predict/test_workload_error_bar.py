"""Error bars come from the narrowest group of published rows that has enough of them."""

import tomllib
from importlib.resources import files

import pytest

from shoal.planner.predict.workload import ANY, FEWEST_ROWS, Likeness, error_bar, likeness, of_device
from shoal.plans.plan import Layout


@pytest.mark.parametrize(
    ("device", "parameters", "layout", "expected"),
    [
        ("A100-80-SXM", 7e9, {"shard": 8}, Likeness("A100", "1 to 10 B parameters", "sharded")),
        ("H100-SXM-80@500W", 7e10, {"tensor": 8}, Likeness("H100", "over 10 B parameters", "tensor or context")),
        ("V100-SXM2-16", 1e8, {"data": 8}, Likeness("V100", "below 1 B parameters", "replicas")),
        ("cpu", 1e6, {"pipeline": 2, "tensor": 2}, Likeness("CPU", "below 1 B parameters", "pipeline")),
    ],
)
def test_what_rows_are_like(device, parameters, layout, expected):
    assert likeness(device, parameters, Layout(**layout)) == expected


def test_a_bar_is_of_the_narrowest_group_that_is_known():
    near = error_bar(Likeness("A100", "1 to 10 B parameters", "sharded"), 3e9)
    assert near.like == Likeness("A100", "1 to 10 B parameters", "sharded")
    assert near.low < near.high < 2
    assert error_bar(Likeness("A100", "of no size", "sharded"), 3e9).like == Likeness("A100", ANY, "sharded")
    assert error_bar(Likeness("A100", "of no size", "of no kind"), 3e9).like == Likeness("A100", ANY, ANY)


def test_rows_of_another_device_or_size_are_unlike():
    assert error_bar(Likeness("B200", "1 to 10 B parameters", "replicas"), 3e9) is None
    assert of_device(Likeness("B200", "1 to 10 B parameters", "replicas")) is None
    unlike = Likeness("H100", "below 1 B parameters", "replicas")
    assert error_bar(unlike, 38_000) is None
    assert of_device(unlike).parameters == (3.57e9, 8.86e9)
    # No row of A100 that divides sequences has so many parameters, and rows that shard have.
    assert error_bar(Likeness("A100", "over 10 B parameters", "tensor or context"), 6e10).like.layout == ANY


def test_no_group_of_the_table_is_of_a_few_rows():
    text = files("shoal.planner.predict").joinpath("published_errors.toml").read_text()
    groups = tomllib.loads(text)["group"]
    assert groups
    assert min(group["rows"] for group in groups) >= FEWEST_ROWS
    assert all(0.3 < group["low"] <= group["high"] <= 2.0 for group in groups)
    assert all(1e8 < group["least_parameters"] <= group["most_parameters"] < 1e11 for group in groups)
