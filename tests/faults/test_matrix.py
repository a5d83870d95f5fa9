"""The matrix of faults: each row is shown by tests that exist and that run when the table says so."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from tests.faults.matrix import ENGINES, ROWS, Row, page

ROOT = Path(__file__).resolve().parents[2]


def is_slow(marks: Any) -> bool:
    return any(mark.name == "slow" for mark in marks)


def mistake(test: str, *, usual: bool) -> str | None:
    """Why a test does not show what the table says; `usual`: whether it is to run every time."""
    file, _, rest = test.partition("::")
    if not (ROOT / "tests" / file).is_file():
        return None if not rest and (ROOT / file).is_file() and not usual else f"{test}: no such file"
    module = importlib.import_module("tests." + file.removesuffix(".py").replace("/", "."))
    name, _, case = rest.removesuffix("]").partition("[")
    function = getattr(module, name, None)
    if function is None:
        return f"{test}: no such test"
    marks = getattr(function, "pytestmark", [])
    of_all = getattr(module, "pytestmark", [])
    if usual and is_slow([*marks, *(of_all if isinstance(of_all, list) else [of_all])]):
        return f"{test}: slow as a whole"
    tables = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    for values in tables:
        cases = {str(value.id): value for value in values if hasattr(value, "marks")}  # plain values are never slow
        if case and case not in cases:
            return f"{test}: no such case"
        wanted = [cases[case]] if case else list(cases.values()) if len(cases) == len(list(values)) else []
        if usual and wanted and all(is_slow(value.marks) for value in wanted):
            return f"{test}: slow"
    return f"{test}: it has no cases" if case and not tables else None


def mistakes(row: Row) -> list[str]:
    """What is wrong in a row of the table."""
    found = []
    if "Q" in row.tier and not row.usual:
        found.append(f"row {row.number}: nothing shows it every time")
    if ("N" in row.tier or row.tier == ENGINES) and not row.soak:
        found.append(f"row {row.number}: nothing shows it in the soak")
    told = [mistake(test, usual=usual) for usual, tests in ((True, row.usual), (False, row.soak)) for test in tests]
    return found + [f"row {row.number}: {text}" for text in told if text]


def test_every_row_is_shown() -> None:
    assert [row.number for row in ROWS] == list(range(1, 53))
    assert [text for row in ROWS for text in mistakes(row)] == []


@pytest.mark.parametrize(
    ("tier", "usual", "soak", "told"),
    [
        ("Q", (), ("faults/test_matrix.py::is_slow",), "nothing shows it every time"),
        ("N", ("faults/test_matrix.py::is_slow",), (), "nothing shows it in the soak"),
        ("Q", ("faults/test_none.py::test_a",), (), "no such file"),
        ("Q", ("faults/test_matrix.py::test_a",), (), "no such test"),
        ("Q", ("faults/test_recovery.py::test_a_killed_rank[of 9]",), (), "no such case"),
        ("Q", ("faults/test_recovery.py::test_a_killed_rank[4 in the last step]",), (), "slow"),
        ("Q", ("faults/test_recovery.py::test_killed_again_and_again",), (), "slow as a whole"),
        ("Q", ("faults/test_matrix.py::is_slow[x]",), (), "it has no cases"),
    ],
)
def test_what_is_wrong_in_a_row_is_told(tier: str, usual: Any, soak: Any, told: str) -> None:
    (text,) = mistakes(Row(1, tier, "", "", usual, soak))
    assert text.endswith(told)


def test_the_page_has_the_table() -> None:
    assert page() in (ROOT / "benchmarks" / "results" / "faults.md").read_text(encoding="utf-8")
