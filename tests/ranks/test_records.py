"""What a run leaves behind and what it opens: records that add up, a whole result, loopback only."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Gate, Run, Started, run, start
from tests.sharing import Shared

pytestmark = pytest.mark.ranks

SPANS = (
    "data_wait",
    "host_to_device",
    "forward",
    "backward",
    "exposed_communication",
    "optimizer",
    "checkpoint",
    "other",
)
RESULT_KEYS = [
    "status",
    "steps",
    "samples",
    "world_size",
    "train_loss",
    "metrics",
    "eval_samples",
    "weights_sha256",
    "sample_digest",
    "step_seconds",
    "wall_seconds",
]
# The clock is read a few times a step and the spans are its differences: they sum to the step but for the time between
# two readings and float64's rounding. A tenth of a millisecond leaves
# room for a process that is not scheduled between two readings for a moment.
SPAN_TOLERANCE_SECONDS = 1e-4
LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


@pytest.fixture(scope="module")
def three(shared: Shared) -> Ended:
    return shared.run(Run(JOBS / "tiny.py", Path(), 3, arguments=("--checkpoint-every", "4")))


def test_spans_sum_to_the_step(three: Ended) -> None:
    assert [r["step"] for r in three.records] == list(range(1, 17))
    for record in three.records:
        assert tuple(record["spans"]) == SPANS
        assert all(seconds >= 0.0 for seconds in record["spans"].values())
        assert math.isclose(sum(record["spans"].values()), record["seconds"], abs_tol=SPAN_TOLERANCE_SECONDS)
    assert all(r["spans"]["forward"] > 0.0 and r["spans"]["backward"] > 0.0 for r in three.records)
    assert any(r["spans"]["checkpoint"] > 0.0 for r in three.records)


def test_each_record_has_the_spread_over_ranks(three: Ended) -> None:
    for record in three.records:
        assert {*SPANS, "step_seconds", "memory_bytes"} <= set(record["ranks"])
        for name, spread in record["ranks"].items():
            assert spread["min"] <= spread["max"], name
            assert spread["rank_of_max"] in range(3)
        for name in SPANS:
            assert record["ranks"][name]["min"] <= record["spans"][name] <= record["ranks"][name]["max"]
        assert record["ranks"]["memory_bytes"]["min"] > 0
    assert any(
        record["ranks"]["step_seconds"]["min"] < record["ranks"]["step_seconds"]["max"] for record in three.records
    )


def test_one_record_in_ten_says_who_waited_for_whom(three: Ended) -> None:
    told = {record["step"]: record["by_rank"] for record in three.records if record["by_rank"]}
    assert list(told) == [10]
    sums, own = told[10], three.records[:10]
    assert sums["steps"] == 10
    assert min(sums["busy_seconds"]) >= sum(r["ranks"]["busy_seconds"]["min"] for r in own) - 1e-5
    assert max(sums["busy_seconds"]) <= sum(r["ranks"]["busy_seconds"]["max"] for r in own) + 1e-5
    for rank, waited in sums["waits"].items():
        slowest = [r["ranks"]["busy_seconds"] for r in own if r["ranks"]["busy_seconds"]["rank_of_max"] == int(rank)]
        assert waited[int(rank)] == 0.0
        assert max(waited) <= sum(spread["max"] - spread["min"] for spread in slowest) + 1e-5


def test_the_result_is_whole(three: Ended) -> None:
    result = three.result
    assert set(RESULT_KEYS) <= set(result)
    assert (result["status"], result["steps"], result["world_size"]) == ("completed", 16, 3)
    assert result["train_loss"] == three.records[-1]["loss"]
    assert result["sample_digest"] == three.records[-1]["digest"]
    assert result["samples"] == three.records[-1]["samples"]
    assert set(result["step_seconds"]) == {"median", "p10", "p90"}
    assert 0 < result["step_seconds"]["p10"] <= result["step_seconds"]["median"] <= result["step_seconds"]["p90"]
    assert len(result["weights_sha256"]) == len(result["sample_digest"]) == 64


def test_the_directory_holds_what_the_command_promises(three: Ended) -> None:
    assert {"plan.toml", "job.json", "records.jsonl", "checkpoints", "result.json"} <= {
        p.name for p in three.out.iterdir()
    }
    assert [p.name for p in sorted((three.out / "checkpoints").iterdir())] == [
        "step-00000008",
        "step-00000012",
        "step-00000016",
    ]
    assert "slowest rank" in three.stdout


def test_without_telemetry_nothing_else_changes(three: Ended, tmp_path: Path) -> None:
    bare = run(Run(JOBS / "tiny.py", tmp_path / "run", 3, arguments=("--no-telemetry",))).expect(0)
    assert not (bare.out / "records.jsonl").exists()
    assert bare.result["sample_digest"] == three.result["sample_digest"]
    assert bare.result["train_loss"] == three.result["train_loss"]


def listening(pids: list[int]) -> set[str]:
    """The addresses, hexadecimal, on which sockets of these processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTEN and columns[9] in sockets:
                found.add(columns[1].split(":")[0])
    return found


def is_loopback(address: str) -> bool:
    """127.0.0.0/8, ::1 and ::ffff:127.0.0.0/104, as the kernel prints them: words in the host's byte order."""
    if len(address) == 8:
        return address.endswith("7F")
    return address == "0" * 24 + "01000000" or (address.startswith("0" * 16 + "FFFF0000") and address.endswith("7F"))


def test_is_loopback_can_fail() -> None:
    assert is_loopback("0100007F")
    assert not is_loopback("00000000")
    assert not is_loopback("0" * 32)


def test_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 2)

    def look(started: Started) -> set[str]:
        started.until(lambda: gate.reached(2), "the gate")
        found = listening(list(started.processes()))
        gate.open()
        return found

    with start(Run(JOBS / "tiny.py", tmp_path / "run", 2, environment=gate.environment)) as started:
        found = look(started)
        started.wait().expect(0)
    assert found, "no listening socket was found: this test would not see one"
    assert all(map(is_loopback, found)), found
