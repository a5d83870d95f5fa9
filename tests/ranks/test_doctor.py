"""Runs that were slowed down on purpose: the doctor names each as the first cause, and tries what it says.

Nothing is asserted of the gains that trials measure: other programs move them. What was measured is in
docs/decisions/0038-doctor.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Run, run, start_command

from shoal.hardware.detect import here

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

JOB = JOBS / "slowed.py"
CGROUPS = Path("/sys/fs/cgroup/cpu")  # of the first version, whose quota a job can join by a file
NATIVE = 'schema = 1\n[layout]\ndata = 2\n[collectives]\nall_reduce = "native"\n'


@dataclass(frozen=True)
class Planted:
    """A slowed run, the cause that comes first, and whether a trial can show what mending it brings."""

    cause: str
    devices: int | None = 1
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    threads: str = "1"
    plan: str | None = None
    mended: tuple[str, ...] = ()  # arguments without the slowness, where no remedy of the doctor's is one
    trial_steps: int = 60
    measured: bool = False  # whether only measurements of the machine tell it

    def run(self, job: Path, out: Path, group: str = "") -> Run:
        """The slowed run; `group`: the cgroup of one that has a quota."""
        settings = {key: group if value == "{quota}" else value for key, value in self.settings.items()}
        arguments = self.arguments
        if self.plan is not None:
            plan = out.with_suffix(".toml")
            plan.write_text(self.plan)
            arguments = ("--plan", str(plan), *arguments)
        environment = {"OMP_NUM_THREADS": self.threads}
        return Run(job, out, self.devices, arguments=arguments, settings=settings, environment=environment, fresh=True)


PLANTED = {
    "slow dataset": Planted("data", settings={"nap": 0.001}),
    "slow rank": Planted("slow rank", 2, settings={"quota": "{quota}", "width": 512, "batch": 256}),
    "tiny buckets": Planted("messages", None, settings={"bucket_bytes": 4096, "depth": 60, "width": 64}, plan=NATIVE),
    "too many ranks": Planted("devices", 4),
    "evaluation": Planted("evaluation", settings={"samples": 640, "evaluated": 1024}),
    "checkpoints": Planted("checkpoints", arguments=("--checkpoint-every", "1"), settings={"width": 512}),
    "numbers read back": Planted(
        "read backs", arguments=("--trace", "30-33"), settings={"item": True}, mended=("--set", "item=false")
    ),
    "memory": Planted(
        "memory",
        2,
        settings={"elementwise": 16_380, "depth": 16, "grains": 32},
        arguments=("--checkpoint-every", "1000"),
        measured=True,
    ),
    "threads": Planted("threads", 2, settings={"width": 512}, threads=str(os.cpu_count() or 2)),
}
HEALTHY = Planted("", settings={"width": 512})


@contextlib.contextmanager
def quota() -> Iterator[str]:
    """A cgroup whose processes get three tenths of a core. Skips where none can be made."""
    folder = CGROUPS / f"shoal-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text("5000")
        (folder / "cpu.cfs_quota_us").write_text("1500")
    except OSError as error:
        pytest.skip(f"no cgroup of the first version can be made here: {error}")
    try:
        yield str(folder)
    finally:
        folder.rmdir()


def examined(path: Path, *arguments: str, threads: str) -> dict[str, Any]:
    """What the doctor says of a run."""
    command = [sys.executable, "-m", "shoal", "doctor", str(path), "--json", *arguments]
    with start_command(command, path.parent / "doctor", {"OMP_NUM_THREADS": threads}, fresh=True) as started:
        found: dict[str, Any] = json.loads(started.wait(600).expect(0).stdout)
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_cause_is_what_was_planted(name: str, tmp_path: Path) -> None:
    planted = PLANTED[name]
    if planted.measured and here().device_for(2).memory_alone is None:
        pytest.skip("shoal bench has not measured what ranks share of this machine's memory")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(quota()) if "quota" in planted.settings else ""
        run(planted.run(JOB, tmp_path / "run", group), timeout=200).expect(0)
        more = () if planted.mended else ("--try", "--job", str(JOB))
        found = examined(tmp_path / "run", *more, threads=planted.threads)
    told = [(cause["cause"], round(cause["regained"], 2)) for cause in found["causes"]]
    print(name, told, [(t["name"], t["expected"], t["gains"]) for t in found["tried"]])
    assert told, "a healthy run"
    assert told[0][0] == planted.cause, told
    if not planted.mended:
        assert found["tried"][0]["gain"] is not None, found["tried"]
