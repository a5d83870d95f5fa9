"""Every option of every command has its effect, or is refused or warned of in words."""

from __future__ import annotations

import argparse

import pytest
from tests.settings.command_rows import (
    BENCH_OPTIONS,
    DOCTOR_OPTIONS,
    EVALUATE_OPTIONS,
    EXPORT_OPTIONS,
    PLAN_OPTIONS,
    PREDICT_OPTIONS,
    REPORT_OPTIONS,
    RESIZE_OPTIONS,
    RUN_OPTIONS,
    RUNS_OPTIONS,
    SLOW,
    VERIFY_OPTIONS,
    WATCH_OPTIONS,
)
from tests.settings.laboratory import Laboratory, Table, further, of_field
from tests.usual import parametrize

from shoal.cli.main import _parser

pytestmark = pytest.mark.ranks

TABLES: dict[str, Table] = {
    "run": RUN_OPTIONS,
    "verify": VERIFY_OPTIONS,
    "plan": PLAN_OPTIONS,
    "export": EXPORT_OPTIONS,
    "evaluate": EVALUATE_OPTIONS,
    "predict": PREDICT_OPTIONS,
    "report": REPORT_OPTIONS,
    "doctor": DOCTOR_OPTIONS,
    "watch": WATCH_OPTIONS,
    "runs": RUNS_OPTIONS,
    "resize": RESIZE_OPTIONS,
    "bench": BENCH_OPTIONS,
}
# The row of `--data` sees that predictions are made; the others are of what `shoal evaluate` shares.
PREDICT_RARE = [f"predict-{key}" for key in PREDICT_OPTIONS if key not in ("--data", "--output: another kind")]
CASES = [(command, key) for command, table in TABLES.items() for key in table]


@parametrize(
    ("command", "key"),
    CASES,
    rare=[
        *("run---trace", "run---keep-checkpoints", *PREDICT_RARE, *(f"bench-{key}" for key in SLOW)),
        *(f"{command}-{key}" for command, table in TABLES.items() for key in further(table)),
    ],
)
def test_of_a_command(command: str, key: str, laboratory: Laboratory) -> None:
    TABLES[command][key].observe(laboratory)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """By command."""
    (found,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize("command", parsers())
def test_each_option_of_a_command_has_a_row(command: str) -> None:
    actions = (a for a in parsers()[command]._actions if not isinstance(a, argparse._HelpAction))
    assert {of_field(key) for key in TABLES[command]} == {(a.option_strings or [a.dest])[-1] for a in actions}
