"""Processes that stood still while others took their run over: they commit nothing, say so, and end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.faults.test_preempted import CHECKPOINTS, JOB, assert_same
from tests.launching import Ended, Gate, Run, run, start
from tests.sharing import Shared
from tests.usual import parametrize

from shoal.runs.records import read_steps

pytestmark = pytest.mark.faults

_MAIN = "from shoal.cli.main import main; raise SystemExit(main())"
# A host of its own, as far as the directory's lock can tell; and one whose processes look at the fence when they write.
ELSEWHERE = f"import shoal.runs.directory as l; l._boot = lambda: 'another kernel'; {_MAIN}"
LATE = f"import shoal.runs.directory as g; g._LOOK_SECONDS = 600.0; {ELSEWHERE}"
HASTY = (
    "import functools; import shoal.runs.directory as l; "
    f"l.Patience = functools.partial(l.Patience, beat_seconds=0.1, missed_beats=3, settling_seconds=0.1); {_MAIN}"
)


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@parametrize(
    ("devices", "then", "code"),
    [(1, 1, LATE), (1, 2, ELSEWHERE), (2, 1, ELSEWHERE)],
    ids=["one process at its next checkpoint", "one process", "a launcher and two ranks"],
    usual=["one process at its next checkpoint"],
)
def test_a_host_that_stood_still(devices: int, then: int, code: str, undisturbed: Ended, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 6), tmp_path / "run"
    zombie = Run(JOB, out, devices, True, ("--checkpoint-every", "1"), environment=gate.environment, restarts=5)
    zombie.launcher = ("-c", code)
    with start(zombie) as started:
        started.until(lambda: gate.reached(devices), "the gate")
        stopped = list(started.processes())
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        other = Run(JOB, out, then, True, ("--resume", *CHECKPOINTS), launcher=("-c", HASTY))
        ended = run(other).expect(0)
        assert "is taken over" in ended.stderr
        assert_same(ended, undisturbed)
        before, records = content(out), list(read_steps(out / "records.jsonl"))
        gate.open()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        back = started.wait().fails(69)
    assert "this process is fenced" in back.stderr
    assert "generation 2 has begun, by process" in back.stderr
    after = content(out)
    assert after.pop("records.jsonl").startswith(before.pop("records.jsonl"))
    assert after == before
    assert list(read_steps(out / "records.jsonl")) == records, "late lines of the process do not count"
