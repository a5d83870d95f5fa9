"""Steps that two processes queue before they read the one before: no read of a device in a steady step, and one course.

CPU tensors stand for those of a device.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from subprocess import PIPE
from typing import Any

import pytest
from tests.forks import Popen
from tests.launching import ROOT

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def courses(axis: str) -> list[dict[tuple[str, bool], dict[str, Any]]]:
    """What each of two ranks has printed, by case and whether it reads late."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.jobs.late_rank", axis],
            cwd=ROOT,
            env={**os.environ, **common, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=PIPE,
            stderr=PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=100) for process in processes]
        for process, (_, stderr) in zip(processes, told, strict=True):
            assert process.returncode == 0, stderr[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = [[json.loads(line) for line in output.splitlines()] for output, _ in told]
    return [{(one["name"], one["late"]): one for one in own} for own in found]


@pytest.mark.parametrize("axis", ["data", "shard"])
def test_two_ranks_read_late_what_they_would_have_read_at_once(axis: str) -> None:
    """Data parallelism, and ZeRO-1: good steps, one that is not finite, an error and a stop on one rank alone."""
    ranks = courses(axis)
    for found in ranks:
        for name in {name for name, _ in found}:
            at_once, late = found[name, False], found[name, True]
            if name != "a stop on one rank":  # which is seen by when it comes
                same = ("weights", "state", "error", "records")
                assert [late[key] for key in same] == [at_once[key] for key in same], name
        steady = found["clipped", True]
        assert steady["reads"] == {}
        assert sum(found["clipped", False]["reads"].values()) >= 5
        order = [tuple(one) for one in steady["order"]]
        assert order.index(("forward", 4)) < order.index(("record", 3))
        assert found["batch statistics, not finite", True]["state"]["skipped_steps"] == 2
        assert found["an error on one rank", True]["state"]["step"] == 6
        assert 2 <= found["a stop on one rank", True]["state"]["step"] < 8
        assert found["an at_once that raises on one rank", True]["state"]["step"] == 8
    notes = ranks[0]["an at_once that raises on one rank", True]["notes"]
    assert any("Unsure raised in at_once" in note and "rank 1" in note for note in notes), notes
    assert "once" in ranks[1]["an error on one rank", True]["error"]
    assert "rank 1" in ranks[0]["an error on one rank", True]["error"]
    stopped = [found["a stop on one rank", True] for found in ranks]
    assert stopped[0]["state"] == stopped[1]["state"]
    assert stopped[0]["weights"] == stopped[1]["weights"]
