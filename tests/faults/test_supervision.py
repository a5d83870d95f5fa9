"""Whoever watches is watched: a supervisor that cannot be blinded by stopped, frozen or shifted processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.engines import freezer
from tests.faults.test_preempted import JOB, assert_same
from tests.faults.test_recovery import events, gated
from tests.launching import Ended, Gate, Run, start
from tests.sharing import Shared
from tests.usual import parametrize

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


@pytest.fixture
def freezes() -> None:
    reason = freezer.unavailable()
    if reason is not None:
        pytest.skip(reason)


@parametrize("loses", [True, False], ids=["and a rank is killed", "to the end"], usual=["and a rank is killed"])
def test_the_process_that_forks_ranks_is_stopped(loses: bool, undisturbed: Ended, tmp_path: Path) -> None:
    """The command still sees its ranks' ends: it starts them again without the server, and ends itself."""
    gate = Gate(tmp_path / "gate", 7)
    with start(gated(tmp_path / "run", gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        (server,) = started.named("shoal-forks")
        os.kill(server, signal.SIGSTOP)
        if loses:
            os.kill(started.workers()[1], signal.SIGKILL)
        gate.open()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == int(loses)


@pytest.mark.usefixtures("freezes")
def test_a_frozen_rank(undisturbed: Ended, tmp_path: Path) -> None:
    """It looks like a process that waits for a disk, and not even SIGKILL ends it: the others go on without it."""
    gate = Gate(tmp_path / "gate", 7)
    with start(gated(tmp_path / "run", gate, 2)) as started, freezer.made() as cgroup:
        started.until(lambda: gate.reached(2), "the gate")
        cgroup.freeze([started.workers()[1]])
        gate.open()
        started.until(lambda: (tmp_path / "run" / "result.json").exists(), "the result")
        cgroup.thaw()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    lost, going_on = events(ended)
    assert (lost["rank"], lost["noticed"]) == (1, "its cgroup")
    assert "was frozen (by its cgroup) for" in lost["what"]
    assert going_on["kind"] == "going_on"
