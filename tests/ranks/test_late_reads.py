"""Steps that ranks queue before they read the one before: no read of a device in a steady step, and one course.

CPU tensors stand for those of a device.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE
from typing import Any

import pytest
from tests.forks import Popen
from tests.jobs.read_late import STEADY, STEPS
from tests.launching import ROOT
from tests.usual import parametrize

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(180)]

# What every rank prints of a case: by its name and whether steps are read late.
Courses = dict[tuple[str, bool], dict[str, Any]]

UNREADABLE, BRANCHES = "a sample that one rank cannot read", "gradients that come and go"
UNSURE, STOPPED = "an at_once that raises on one rank", "a stop on one rank"
STEADY_CASES = ("clipped", "not finite")


def courses(layout: dict[str, Any], level: str, names: tuple[str, ...]) -> list[Courses]:
    """What each rank has printed of these cases."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_ranks = str(math.prod(degree for degree in layout.values() if isinstance(degree, int)))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.jobs.late_rank", json.dumps(layout), level, *names],
            cwd=ROOT,
            env={**os.environ, **common, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=PIPE,
            stderr=PIPE,
            text=True,
        )
        for rank in range(int(num_ranks))
    ]
    try:
        with ThreadPoolExecutor() as readers:  # of one after the other, a rank waits for its pipe and another for it
            told = list(readers.map(lambda process: process.communicate(timeout=160), processes))
        for process, (_, stderr) in zip(processes, told, strict=True):
            assert process.returncode == 0, stderr[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = [[json.loads(line) for line in output.splitlines()] for output, _ in told]
    return [{(one["name"], one["late"]): one for one in own} for own in found]


def compare(found: Courses, reads_at_once: int) -> None:
    """Both ways of one rank are one course; the steady steps read so often, and not at all."""
    for name in {name for name, _ in found}:
        at_once, late = found[name, False], found[name, True]
        if name != STOPPED:  # which is seen by when it comes
            same = ("weights", "state", "error", "records") + (() if name == UNSURE else ("notes",))
            assert [late[key] for key in same] == [at_once[key] for key in same], name
    steady = found["clipped", True]
    assert reads(steady) == {}
    # Where sums and rows travel together, a record comes with the next step's: one read less is behind the first ones.
    assert math.ceil(sum(reads(found["clipped", False]).values()) / (STEPS - STEADY)) == reads_at_once
    assert is_late(steady, 3)
    assert found["not finite", True]["state"]["skipped_steps"] == 2
    assert is_late(found["not finite", True], 3)


def reads(course: dict[str, Any]) -> dict[str, int]:
    """Reads in steady steps by place, without the comparison of replicas and looks."""
    others = ("numerics/checksum.py", "numerics/no_trace.py", "training/microbatch/look.py")
    return {place: count for place, count in course["reads"].items() if not place.startswith(others)}


def is_late(course: dict[str, Any], step: int) -> bool:
    """Whether the step after `step` had begun before that was recorded."""
    return course["order"].index(["forward", step + 1]) < course["order"].index(["record", step])


WHOLE = (*STEADY_CASES, "an error on one rank", UNSURE, STOPPED)


@parametrize("layout", [{"data": 2}, {"shard": 2}, {"data": 2, "reduce": "bfloat16"}], ids=str, usual=["{'data': 2}"])
def test_ranks_with_the_whole_model_read_late_what_they_would_have_read_at_once(layout: dict[str, Any]) -> None:
    """Data parallelism, and ZeRO-1: good steps, one that is not finite, an error and a stop on one rank alone.

    Sums in bfloat16 are apart from the gradients, and so are read apart as well.
    """
    ranks = courses(layout, "optimizer", WHOLE)
    for found in ranks:
        compare(found, reads_at_once=3 if "reduce" in layout else 2)
        assert found["an error on one rank", True]["state"]["step"] == 6
    assert "once" in ranks[1]["an error on one rank", True]["error"]
    assert "rank 1" in ranks[0]["an error on one rank", True]["error"]
    check_callbacks(ranks)


SHORT, REFUSED = "a short last batch", "a model that one rank reads"
LAYOUTS = [
    {"data": 2},
    {"shard": 2},
    {"data": 2, "grains_per_microbatch": 1},
    {"data": 2, "reduce": "bfloat16"},
]


@parametrize("layout", LAYOUTS, ids=str, usual=["{'shard': 2}"])
def test_ranks_replay_what_they_would_have_queued(layout: dict[str, Any]) -> None:
    """Sums and exchanges of ranks are in the graph, which a recorder on the host repeats: all ranks replay, or none."""
    names = ("clipped", "not finite", STOPPED, UNREADABLE, SHORT, REFUSED)
    ranks = courses({**layout, "captures": True}, "optimizer", names)
    for found in ranks:
        for name in names:
            at_once, captured = found[name, False], found[name, True]
            same = ("weights", "state", "error", "records") if name != STOPPED else ()
            assert [captured[key] for key in same] == [at_once[key] for key in same], name
            said = [note for note in captured["notes"] if note.startswith("execution.cuda_graph")]
            if name == REFUSED:
                assert captured["counted"].get("replay", 0) == 0
                assert "rank 1: it reads a number off the device" in said[0]
                assert "(in Reading, late_rank.py:" in said[0]
            else:
                assert len(said) == 1, said
                assert captured["counted"]["replay"] > captured["counted"]["record"] >= 1, captured["counted"]
        num_first = 2 if "data" in layout else 1  # replicas are compared after the first two steps
        assert found["clipped", True]["counted"] == {"warm_up": 3, "record": 1, "replay": 1 + STEPS - num_first}
        assert reads(found["clipped", True]) == {}
        assert found[SHORT, True]["counted"] == {"warm_up": 3, "record": 1, "replay": 1 + 18 - num_first - 3}
        assert "unreadable" in found[UNREADABLE, True]["error"]
        assert found["not finite", True]["state"]["skipped_steps"] == 2
    stopped = [found[STOPPED, True]["state"] for found in ranks]
    assert stopped[0] == stopped[1]


def check_callbacks(ranks: list[Courses]) -> None:
    """All ranks stop after the same step, and all know of a callback that raised on one."""
    assert all(found[UNSURE, True]["state"]["step"] == STEPS for found in ranks)
    notes = ranks[0][UNSURE, True]["notes"]
    assert any("Unsure raised in at_once" in note and "rank 1" in note for note in notes), notes
    stopped = [found[STOPPED, True] for found in ranks]
    assert 2 <= stopped[0]["state"]["step"] < STEPS
    assert all(one["state"] == stopped[0]["state"] for one in stopped)


# Layout and level of sharding; reads of each rank in a steady step that is read at once; what is trained besides.
PARTS: dict[str, tuple[dict[str, int], str, list[int], tuple[str, ...]]] = {
    "ZeRO-2": ({"shard": 2}, "gradients", [2, 2], (BRANCHES,)),
    "ZeRO-3": ({"shard": 2}, "parameters", [2, 2], (UNREADABLE, BRANCHES)),
    "tensor": ({"tensor": 2}, "optimizer", [2, 2], (UNREADABLE, STOPPED)),
    # The second rank's gradients are the first one's: it has nothing to count in the norm.
    "context": ({"context": 2}, "optimizer", [3, 2], (UNREADABLE,)),
    "three stages": ({"pipeline": 3}, "optimizer", [3, 3, 3], (UNREADABLE, "an error in a stage")),
    "data and ZeRO-3": ({"data": 2, "shard": 2}, "parameters", [2, 2, 1, 1], (UNSURE, STOPPED)),
    "pipeline and ZeRO-3": ({"pipeline": 2, "shard": 2}, "parameters", [3, 3, 3, 3], ()),
    "data and tensor": ({"data": 2, "tensor": 2}, "optimizer", [3, 3, 2, 2], ()),
}


# What two axes do together is what each does, and ZeRO-2 has the reads of ZeRO-3.
@parametrize("name", PARTS, usual=["ZeRO-3", "three stages"])
def test_ranks_with_parts_of_a_model_read_late_what_they_would_have_read_at_once(name: str) -> None:
    layout, level, reads, others = PARTS[name]
    ranks = courses(layout, level, (*STEADY_CASES, *others))
    for found, reads_at_once in zip(ranks, reads, strict=True):
        compare(found, reads_at_once)
        if UNREADABLE in others:  # known before the step, which nobody begins
            assert found[UNREADABLE, True]["state"]["step"] == 3
            assert "unreadable" in found[UNREADABLE, True]["error"]
            assert ["forward", 4] not in found[UNREADABLE, True]["order"]
            assert is_late(found[UNREADABLE, True], 2)
        if "an error in a stage" in others:
            assert found["an error in a stage", True]["state"]["step"] == 2
            assert "once" in found["an error in a stage", True]["error"]
            assert is_late(found["an error in a stage", True], 2)
    if UNSURE in others:
        check_callbacks(ranks)
