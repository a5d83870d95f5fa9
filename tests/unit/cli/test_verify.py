"""What `shoal verify` prints of the plan that it has verified."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.verify import _print
from shoal.plans import Plan


def test_the_layout_line_names_servers(capsys: pytest.CaptureFixture[str]) -> None:
    verdict: Any = SimpleNamespace(num_steps=3, notes=[], seconds=1.0, render=lambda: "verified")
    plan = Plan().with_sections(layout={"data": 2}, server={"mode": "synchronous", "num_servers": 2})
    _print(verdict, plan, 1.0)
    line = capsys.readouterr().out.splitlines()[0]
    told = "data 2, synchronous with 2 servers; fast; parameters float32, compute float32; 3 steps"
    assert line == f"layout             {told}"
