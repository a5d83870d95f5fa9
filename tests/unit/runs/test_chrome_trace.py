"""One file has every rank's process, its rows apart, and all times on one clock."""

from pathlib import Path
from typing import Any

from shoal.runs.chrome_trace import MICROBATCH_ROW, SPAN_ROW, OwnEvent, RankTrace, merged, read, write


def traced(rank: int, began: float, **more: Any) -> RankTrace:
    """A rank with a step, a span and a microbatch of its own, and an operator 1 ms after the step's beginning."""
    own = (
        OwnEvent("forward", SPAN_ROW, began, began + 0.004, {"step": 3}),
        OwnEvent("step 3", SPAN_ROW, began, began + 0.005),
        OwnEvent("grain 0", MICROBATCH_ROW, began + 0.001, began + 0.003),
    )
    lag = more.get("lag", 0.0)
    operator = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 77,
        "tid": 78,
        "ts": (began + 0.001 - lag) * 1e6,
        "dur": 500.0,
        "args": {"Ev Idx": 4, "Input Dims": []},
    }
    named = {"ph": "M", "name": "thread_name", "pid": 77, "tid": 78, "args": {"name": "main"}}
    window = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": 0, "ts": 0.0, "dur": 1}
    return RankTrace(rank, f"host{rank}", own, (named, operator, window), **more)


def events(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["name"] == name]


def test_each_rank_is_a_process_with_rows_of_its_own() -> None:
    document = merged([traced(0, 5.0), traced(1, 5.0)], {"steps": "3"})
    assert [event["args"]["name"] for event in events(document, "process_name")] == ["rank 0", "rank 1"]
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events(document, "thread_name")}
    assert len(rows) == 6
    assert len({tid for _, tid in rows}) == 6
    for event in document["traceEvents"]:
        assert (event["pid"], event["tid"]) in rows
    assert rows[events(document, "aten::mm")[1]["pid"], events(document, "aten::mm")[1]["tid"]] == "main"
    assert not events(document, "PyTorch Profiler (0)")
    assert document["otherData"] == {"steps": "3"}


def test_clocks_are_aligned_and_begin_at_zero() -> None:
    # The second host's clock is 40 s ahead, and its profiler counts from elsewhere.
    document = merged([traced(0, 5.0), traced(1, 45.002, clock=-40.0, lag=7.5)], {})
    assert [event["ts"] for event in events(document, "step 3")] == [0.0, 2000.0]
    assert [event["ts"] for event in events(document, "aten::mm")] == [1000.0, 3000.0]
    assert events(document, "aten::mm")[0]["args"] == {"Input Dims": []}


def test_arrows_of_ranks_do_not_meet() -> None:
    arrow = {"ph": "s", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "tid": 1, "ts": 1.0}
    document = merged([RankTrace(rank, "here", (), (arrow,)) for rank in (0, 1)], {})
    assert len({event["id"] for event in events(document, "fwdbwd")}) == 2


def test_what_is_written_is_read(tmp_path: Path) -> None:
    document = merged([traced(0, 5.0)], {})
    write(tmp_path / "trace.json.gz", document)
    assert read(tmp_path / "trace.json.gz") == document
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
