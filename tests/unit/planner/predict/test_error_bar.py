"""Error bars come from the narrowest group of published rows that has enough of them."""

import tomllib
from importlib.resources import files

import pytest

from shoal.planner.predict.error_bar import ANY, FEWEST_ROWS, Likeness, error_bar, likeness
from shoal.plans.plan import LayoutSection


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
    assert likeness(device, parameters, LayoutSection(**layout)) == expected


def test_a_bar_is_of_the_narrowest_group_that_is_known():
    near = error_bar(2.0, Likeness("A100", "1 to 10 B parameters", "sharded"))
    assert near.like == Likeness("A100", "1 to 10 B parameters", "sharded")
    assert near.least_seconds < near.most_seconds < 2 * 2.0
    assert error_bar(4.0, near.like).most_seconds == pytest.approx(2 * near.most_seconds)
    assert error_bar(2.0, Likeness("A100", "of no size", "sharded")).like == Likeness("A100", ANY, "sharded")
    far = error_bar(2.0, Likeness("ABACUS", "below 1 B parameters", "replicas"))
    assert far.like == Likeness(ANY, ANY, "replicas")
    assert error_bar(2.0, Likeness("ABACUS", "of no size", "of no kind")).like == Likeness(ANY, ANY, ANY)


def test_no_group_of_the_table_is_of_a_few_rows():
    text = files("shoal.planner.predict").joinpath("published_errors.toml").read_text()
    groups = tomllib.loads(text)["group"]
    assert groups
    assert min(group["rows"] for group in groups) >= FEWEST_ROWS
    assert all(0.3 < group["low"] <= group["high"] <= 2.0 for group in groups)
