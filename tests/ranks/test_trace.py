"""`--trace` writes one file of all ranks, whose spans are those of the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Run, run
from tests.usual import parametrize

from shoal.runs.chrome_trace import read

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LAYOUTS = {"data": {"data": 2}, "shard": {"shard": 2}, "pipeline": {"pipeline": 2}}
# A trace has nanoseconds, a record float32.
ROUNDING = 1e-5


def traced(layout: dict[str, int], folder: Path, *arguments: str) -> tuple[Ended, list[dict[str, Any]]]:
    """A run of six steps whose third to fifth are traced."""
    plan = folder / "plan.toml"
    plan.write_text("schema = 1\n[layout]\n" + "".join(f"{axis} = {n}\n" for axis, n in layout.items()))
    more = ("--plan", str(plan), "--steps", "6", "--trace", "3-5", *arguments)
    ended = run(Run(JOBS / "tiny.py", folder / "out", None, arguments=more)).expect(0)
    return ended, read(ended.out / "trace-3-5.json.gz")["traceEvents"]


@parametrize("name", LAYOUTS)
def test_every_rank_is_there_and_spans_are_those_of_the_records(name: str, tmp_path: Path) -> None:
    ended, events = traced(LAYOUTS[name], tmp_path)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    own = [e for e in events if e.get("cat") == "shoal"]
    for pid in (1, 2):
        steps = [e for e in own if e["pid"] == pid and e["name"].startswith("step ")]
        assert [e["name"] for e in steps] == ["step 3", "step 4", "step 5"]
        spans = [e for e in own if e["pid"] == pid and e["args"].get("step")]
        for step in steps:
            within = [e for e in spans if f"step {e['args']['step']}" == step["name"]]
            assert within
            for span in within:
                assert step["ts"] <= span["ts"] + ROUNDING * 1e6
                assert span["ts"] + span["dur"] <= step["ts"] + step["dur"] + ROUNDING * 1e6
        assert any(e["name"] == "aten::addmm" and e["pid"] == pid for e in events)
        assert any("grain" in e["name"] for e in own if e["pid"] == pid)
    for record in ended.records[2:5]:
        for span, seconds in record["spans"].items():
            found = [e for e in own if e["pid"] == 1 and e["name"] == span and e["args"]["step"] == record["step"]]
            assert sum(e["dur"] for e in found) / 1e6 == pytest.approx(seconds, rel=1e-4, abs=ROUNDING)


def test_a_trace_changes_no_weights(tmp_path: Path) -> None:
    ended, _ = traced({"data": 2}, tmp_path, "--exact")
    plain = run(Run(JOBS / "tiny.py", tmp_path / "plain", 2, exact=True, arguments=("--steps", "6"))).expect(0)
    assert ended.result["weights_sha256"] == plain.result["weights_sha256"]
    assert not list(plain.out.glob("trace-*"))
