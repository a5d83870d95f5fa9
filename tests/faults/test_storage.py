"""The checkpoints' disk fails: training that nobody could go on from is not reported as safe."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tests.faults.test_preempted import wait_until_handed_on
from tests.launching import JOBS, Ended, Gate, Run, run, start, start_command
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:job"


@parametrize(("stop", "devices"), [(False, 2), (True, 1)], ids=["to the end", "preempted"], usual=[])
def test_the_last_checkpoint_cannot_be_written(stop: bool, devices: int, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 9), tmp_path / "run"
    with start(Run(JOB, out, devices, environment=gate.environment)) as started:
        started.until(lambda: gate.reached(devices), "the gate")
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        (out / "checkpoints").write_text("in the way")
        if stop:
            started.send(signal.SIGTERM)
            wait_until_handed_on(started, 1)
        gate.open()
        ended = started.wait().fails(73)
    assert "StorageError" in ended.stderr
    assert "it could not be written" in ended.stderr
    assert "Traceback" not in ended.output
    assert ended.result["status"] == "failed"
    assert ended.result["error"]["kind"] == "StorageError"
    if not stop:  # what was trained is told all the same
        assert ended.result["steps"] == 16
        assert ended.result["metrics"]["accuracy"] > 0
    # Mended, it starts over, as it has to.
    (out / "checkpoints").unlink()
    run(Run(JOB, out, devices, arguments=("--resume",))).expect(0)


# A checkpoint of this job has 3.2 MB, so that the disk has room for two.
WIDE, EVERY_STEP = f"{JOBS / 'tiny.py'}:wide", ("--checkpoint-every", "1")
ON_SMALL_DISK = 'mount -t tmpfs -o size=8m none "$1" && shift && "$@"; code=$?; cp -r "$OUT" "$OUT-copy"; exit $code'


def on_small_disk(wanted: Run) -> Ended:
    """Run where $OUT is on a disk of 8 MiB, which only these processes see. Returns the end with a copy of $OUT."""
    disk = wanted.out.parent
    disk.mkdir()
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(disk)]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("a mount namespace of one's own needs root and util-linux")
    copy = disk.parent / "copy"
    words = ["unshare", "--mount", "sh", "-c", ON_SMALL_DISK, "sh", str(disk), *wanted.command]
    script = words[4].replace("$OUT-copy", str(copy)).replace("$OUT", str(wanted.out))
    with start_command([*words[:4], script, *words[5:]], wanted.out.parent, fresh=True) as started:
        ended = started.wait()
    return Ended(ended.code, ended.stdout, ended.stderr, copy)


@parametrize("layout", ["data=1", "shard=2"], ids=["a thread", "all ranks"], usual=["a thread"])
def test_a_full_disk_loses_the_oldest_checkpoint_first(layout: str, tmp_path: Path) -> None:
    """Only after a write has failed, and only the one that the next success would have removed."""
    devices, exact, options = int(layout[-1]), layout == "data=1", (*EVERY_STEP, "--layout", layout)
    undisturbed = run(Run(WIDE, tmp_path / "undisturbed", devices, exact, options)).expect(0)
    wanted = Run(WIDE, tmp_path / "disk" / "run", devices, exact, (*options, "--keep-checkpoints", "2"))
    ended = on_small_disk(wanted).expect(0)
    assert ended.result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert sorted(path.name for path in (ended.out / "checkpoints").iterdir()) == ["step-00000005", "step-00000006"]
    lines = (ended.out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "checkpoint"]
    assert [event["done"].partition(" (")[0] for event in events] == [
        f"the checkpoint of step {step}" for step in (1, 2, 3, 4)
    ]
    assert all("No space left on device" in event["what"] for event in events)
    assert all(" bytes) was removed early" in event["done"] for event in events)


@pytest.mark.slow
def test_a_full_disk_keeps_all_checkpoints_that_are_to_stay(tmp_path: Path) -> None:
    wanted = Run(WIDE, tmp_path / "disk" / "run", 1, True, (*EVERY_STEP, "--keep-checkpoints", "all"))
    ended = on_small_disk(wanted).expect(73)
    assert sorted(path.name for path in (ended.out / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    assert "was removed" not in ended.output
