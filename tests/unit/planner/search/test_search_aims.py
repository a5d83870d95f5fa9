"""Aims as people write them."""

import pytest

from shoal.errors import CommandError
from shoal.planner.search.search import Aim, parse, tied, written_time


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("fastest", "fastest", 0.0),
        ("cheapest", "cheapest", 0.0),
        ("deadline=2h", "deadline", 7200.0),
        ("deadline=90", "deadline", 90.0),
        ("deadline = 1.5d", "deadline", 129600.0),
        ("deadline=30min", "deadline", 1800.0),
        ("efficiency=0.8", "efficiency", 0.8),
        ("widest=75%", "widest", 0.75),
    ],
)
def test_parsed(text: str, name: str, value: float) -> None:
    assert parse(text) == Aim(name, value)
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    "text", ["fast", "fastest=2", "deadline", "deadline=0h", "deadline=2 fortnights", "efficiency=1.2", "widest=x"]
)
def test_refused(text: str) -> None:
    with pytest.raises(CommandError) as error:
        parse(text)
    assert "--aim" in error.value.remedy or "fastest" in error.value.remedy


def test_keys() -> None:
    assert Aim("fastest").key(8, 2.0) < Aim("fastest").key(1, 3.0)
    assert Aim("cheapest").key(1, 3.0) < Aim("cheapest").key(8, 2.0)
    assert Aim("efficiency", 0.5).key(1, 9.0) < Aim("efficiency", 0.5).key(2, 1.0)
    assert Aim("widest", 0.5).key(4, 9.0) < Aim("widest", 0.5).key(2, 1.0)


def test_ties_are_of_seconds_alone() -> None:
    assert tied((1.005,), (1.0,))
    assert not tied((1.02,), (1.0,))
    assert not tied((200.0, 1.0), (199.0, 1.0))


@pytest.mark.parametrize(("seconds", "told"), [(321_881.0, "3.8d"), (8000.0, "2.3h"), (500.0, "8.4m"), (0.32, "0.4s")])
def test_a_deadline_is_written_in_the_unit_that_people_read(seconds: float, told: str) -> None:
    assert written_time(seconds) == told
    assert parse(f"deadline={told}").value >= seconds
