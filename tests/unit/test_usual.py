"""What chooses the tests that every run takes."""

from __future__ import annotations

from itertools import product

import pytest
from tests.usual import pairs, parametrize


def test_cases_that_are_not_usual_are_slow_and_those_that_are_gone_are_told() -> None:
    mark = parametrize(("name", "ranks"), product("ab", (1, 2)), usual=["a-2"])
    assert [(case.id, bool(case.marks)) for case in mark.args[1]] == [
        ("a-1", True),
        ("a-2", False),
        ("b-1", True),
        ("b-2", True),
    ]
    rest = parametrize("name", "ab", rare=["b"])
    assert [bool(case.marks) for case in rest.args[1]] == [False, True]
    with pytest.raises(ValueError, match="no cases \\['c'\\]"):
        parametrize("name", "ab", usual=["c"])


def test_a_few_rows_have_every_pair_and_take_the_last_value_in_turn() -> None:
    rows = [(a, b, c) for a in "abcdef" for b in "xy" for c in (f"{b}1", f"{b}2")]
    chosen = pairs(rows, [(0, 1), (1, 2)])
    assert {(a, b) for a, b, _ in chosen} == set(product("abcdef", "xy"))
    assert len(chosen) == 12
    assert sorted(sum(row[2] == last for row in chosen) for last in ("x1", "x2", "y1", "y2")) == [3, 3, 3, 3]
