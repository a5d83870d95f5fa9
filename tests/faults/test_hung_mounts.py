"""A mount that stops answering is named within a minute, and waited for; of checkpoints the training goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.test_preempted import assert_same
from tests.launching import JOBS, Gate, Run, run, start

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

NAMED_WITHIN_SECONDS = 60.0


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The folder through a file system of a process, which hangs while that process is stopped."""
    if shutil.which("bindfs") is None:
        pytest.skip("needs bindfs and /dev/fuse")
    folder.mkdir(parents=True)
    behind = folder.with_name(f"{folder.name}-behind")
    behind.mkdir()
    with subprocess.Popen(["bindfs", "-f", str(behind), str(folder)]) as server:
        while not folder.is_mount() and server.poll() is None:
            time.sleep(0.02)
        if server.poll() is not None:
            pytest.skip("mounts need a right that this process lacks")
        try:
            yield server
        finally:
            server.send_signal(signal.SIGCONT)
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(("devices", "workers"), [(1, 0), (1, 1), (2, 0)], ids=["one", "a data worker", "two"])
def test_a_dataset_on_a_hung_mount_is_waited_for(devices: int, workers: int, tmp_path: Path) -> None:
    job, gate = f"{JOBS / 'on_disk.py'}:job", Gate(tmp_path / "gate", 2)
    with mounted(tmp_path / "data") as server:
        variables = {"TEST_DATA": str(tmp_path / "data")}
        arguments = ("--workers", str(workers))
        undisturbed = run(Run(job, tmp_path / "whole", devices, True, arguments, environment=variables)).expect(0)
        wanted = Run(job, tmp_path / "run", devices, True, arguments, environment={**variables, **gate.environment})
        with start(wanted) as started:
            started.until(lambda: gate.reached(devices), "the gate")
            server.send_signal(signal.SIGSTOP)
            gate.open()
            said = "has waited for a disk for 30 s"
            started.until(lambda: said in " ".join(started.output.split()), "its name", NAMED_WITHIN_SECONDS)
            server.send_signal(signal.SIGCONT)
            ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == 0


def test_checkpoints_on_a_hung_mount_end_no_training(tmp_path: Path) -> None:
    out, gate, later = tmp_path / "run", Gate(tmp_path / "gate", 2), Gate(tmp_path / "later", 14)
    variables = {"TEST_GATE": f"{gate.environment['TEST_GATE']};{later.environment['TEST_GATE']}"}
    job = f"{JOBS / 'tiny.py'}:job"
    undisturbed = run(Run(job, tmp_path / "whole", 1, True)).expect(0)
    with mounted(out / "checkpoints") as server:
        wanted = Run(job, out, 1, True, ("--checkpoint-every", "2"), environment=variables)
        with start(wanted) as started:
            started.until(lambda: gate.reached(1), "the gate")
            server.send_signal(signal.SIGSTOP)
            gate.open()
            started.until(lambda: (later.folder / "reached-0").exists(), "a later step", NAMED_WITHIN_SECONDS)
            (event,) = map(json.loads, (out / "events.jsonl").read_text(encoding="utf-8").splitlines())
            assert "the one before is still being written" in event["what"]
            server.send_signal(signal.SIGCONT)
            later.open()
            assert_same(started.wait().expect(0), undisturbed)
