"""Damaged checkpoints: noticed, kept aside, and the one before is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Run, newest_checkpoint, run, spoil
from tests.sharing import Shared
from tests.usual import parametrize

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


@parametrize("name", FILES, usual=["model.safetensors", "manifest.json"])
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
    ended = resume(out, devices).expect(74)
    assert all(text in ended.stderr for text in ("you gave", "conflicts with", "write instead"))
    assert "Traceback" not in ended.output
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == [f"{f.name}.bad" for f in folders]
    # Asked again, it does not start from nothing either.
    if devices == 1:
        resume(out).expect(74)
