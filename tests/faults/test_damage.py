"""Damaged checkpoints: noticed, kept aside, and the one before is used."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Gate, Run, newest_checkpoint, run, spoil, start
from tests.sharing import Shared
from tests.usual import parametrize

from shoal.checkpoint.manifest import seal

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:convnet"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


@pytest.fixture(scope="module")
def cut(shared: Shared) -> Path:
    """A run that ended after step 9, with checkpoints after 3, 6 and 9."""
    arguments = ("--steps", "9", "--checkpoint-every", "3")
    return shared.run(Run(JOB, Path(), 1, True, arguments)).out


@pytest.fixture
def out(cut: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut, tmp_path / "run"))


def resume(out: Path, devices: int = 1) -> Ended:
    return run(Run(JOB, out, devices, arguments=("--resume", "--steps", "16")))


@parametrize("name", FILES, usual=["model.safetensors"])
def test_a_flipped_bit_in_the_newest(name: str, out: Path, undisturbed: Ended) -> None:
    newest = newest_checkpoint(out)
    spoil(newest / name, random.Random(name).randrange(10**6))
    spoilt = (newest / name).read_bytes()
    ended = resume(out, 2 if name == "model.safetensors" else 1).expect(0)
    assert ended.result["resumed_from"] == 6
    assert ended.result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert ended.result["sample_digest"] == undisturbed.result["sample_digest"]
    assert (newest.with_name(newest.name + ".bad") / name).read_bytes() == spoilt
    assert "checkpoint of step 9 is damaged" in ended.stdout


def test_a_missing_file_and_two_bad_ones(out: Path, undisturbed: Ended) -> None:
    (newest_checkpoint(out) / "optimizer.safetensors").unlink()
    spoil(out / "checkpoints" / "step-00000006" / "state.json", 5)
    ended = resume(out).expect(0)
    assert ended.result["resumed_from"] == 3
    assert ended.result["weights_sha256"] == undisturbed.result["weights_sha256"]


@parametrize("devices", [1, 2], usual=["2"])
def test_all_damaged(devices: int, out: Path) -> None:
    folders = sorted((out / "checkpoints").iterdir())
    for folder in folders:
        spoil(folder / "model.safetensors", 200)
    ended = resume(out, devices).fails(74)
    assert all(text in ended.stderr for text in ("you gave", "write instead"))
    assert "Traceback" not in ended.output
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == [f"{f.name}.bad" for f in folders]
    # Asked again, it does not start from nothing either.
    if devices == 1:
        resume(out).fails(74)


@parametrize("how", ["deleted", "emptied"], usual=["deleted"])
def test_checkpoints_that_are_gone(how: str, out: Path) -> None:
    """It never starts over silently."""
    shutil.rmtree(out / "checkpoints")
    if how == "emptied":
        (out / "checkpoints").mkdir()
    refused = resume(out).fails(74)
    assert "this run had a checkpoint of step 9, and no checkpoint is there any more" in refused.stderr


def test_the_newest_is_gone(out: Path, undisturbed: Ended) -> None:
    shutil.rmtree(newest_checkpoint(out))
    ended = resume(out).expect(0)
    assert "the checkpoint of step 9 is not there any more" in ended.stdout
    assert ended.result["weights_sha256"] == undisturbed.result["weights_sha256"]


def forged(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest with another content, and the checksum of that."""
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    change(body)
    path.write_bytes(seal(body))


def test_a_newer_format(out: Path) -> None:
    """It is not damaged, and nothing is moved."""
    newest = newest_checkpoint(out)
    forged(newest, lambda body: body.update(format=2))
    refused = resume(out).fails(74)
    assert "checkpoint format 2; this version reads 1" in refused.stderr
    assert newest.is_dir()
    assert not list((out / "checkpoints").glob("*.bad"))


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "huge": lambda body: body["files"]["model.safetensors"].update(size=10**17),
    "negative": lambda body: body["files"]["model.safetensors"].update(size=-2),
    "text": lambda body: body["files"]["model.safetensors"].update(size="12"),
    "absent": lambda body: body["files"].pop("optimizer.safetensors"),
    "list": lambda body: body.update(files=[]),
}


@parametrize("how", FORGED, usual=["huge", "absent"])
def test_a_forged_manifest(how: str, out: Path, undisturbed: Ended) -> None:
    newest = newest_checkpoint(out)
    forged(newest, FORGED[how])
    assert_falls_back(out, undisturbed)


def test_a_link_in_a_checkpoints_place(out: Path, undisturbed: Ended) -> None:
    newest = newest_checkpoint(out)
    newest.rename(out / "elsewhere")
    newest.symlink_to(out / "elsewhere")
    assert_falls_back(out, undisturbed)
    assert not list((out / "elsewhere").glob("*.bad"))


def assert_falls_back(out: Path, undisturbed: Ended) -> None:
    ended = resume(out).expect(0)
    assert ended.result["resumed_from"] == 6
    assert ended.result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert "checkpoint of step 9 is damaged" in ended.stdout


@pytest.mark.slow
def test_a_run_directory_that_vanishes_is_told_at_once(tmp_path: Path) -> None:
    gate, gone = Gate(tmp_path / "gate", 3), tmp_path / "run"
    with start(Run(JOB, gone, 2, environment=gate.environment)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        shutil.rmtree(gone)
        started.until(lambda: f"{gone} has vanished" in started.output, "a word about it")
        gate.open()
        ended = started.wait()
    assert "Traceback" not in ended.output
