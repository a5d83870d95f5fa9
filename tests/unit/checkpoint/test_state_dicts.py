"""State dicts in files of other programs, read as data alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shoal
from shoal.checkpoint.state_dicts import SafetensorsWeights, TorchWeights, state_dict_of
from shoal.errors import IntegrityError, RunDirectoryError

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
Write = Callable[[Path], Path]


def safetensors(folder: Path) -> Path:
    save_file(TENSORS, folder / "one.safetensors")
    return folder / "one.safetensors"


def torchs(folder: Path) -> Path:
    torch.save(TENSORS, folder / "one.pt")
    return folder / "one.pt"


def nested(folder: Path) -> Path:
    torch.save({"epoch": 3, "state_dict": TENSORS, "optimizer": {"state": {0: 1}}}, folder / "one.ckpt")
    return folder / "one.ckpt"


def legacy(folder: Path) -> Path:
    torch.save(TENSORS, folder / "one.bin", _use_new_zipfile_serialization=False)
    return folder / "one.bin"


def single(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def shards(folder: Path) -> Path:
    placed = {key: f"model-{number:05d}-of-00002.safetensors" for number, key in enumerate(TENSORS, 1)}
    for key, name in placed.items():
        save_file({key: TENSORS[key]}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("write", [safetensors, torchs, nested, legacy, single, shards])
def test_read_whole(write: Write, tmp_path: Path) -> None:
    found = shoal.load(write(tmp_path))
    assert isinstance(found, SafetensorsWeights | TorchWeights)
    assert set(found) == set(TENSORS)
    for key, tensor in TENSORS.items():
        assert (found.shape(key), found.dtype(key)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(found[key], tensor)
    assert shoal.weights_sha256(found) == shoal.weights_sha256(TENSORS)


def test_a_step_of_what_has_none(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run, and has no steps"):
        shoal.load(safetensors(tmp_path), step=3)


class Code:
    """Whatever a file could run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        ({"a": Code()}, IntegrityError, "code is never run"),
        ({"epoch": 3}, RunDirectoryError, "no state dict of tensors: epoch"),
        ({"model": TENSORS, "ema": TENSORS}, RunDirectoryError, "several state dicts: model, ema"),
        (torch.ones(2), RunDirectoryError, "no state dict"),
    ],
    ids=["code", "none", "several", "a tensor"],
)
def test_other_content(
    content: Any, error: type[Exception], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "one.pt")
    with pytest.raises(error, match=said):
        state_dict_of(tmp_path / "one.pt")
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["one.pt", "one.safetensors"])
def test_a_damaged_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x10\0\0\0\0\0\0\0 nothing of it")
    with pytest.raises(IntegrityError, match=name):
        state_dict_of(tmp_path / name)


def test_a_folder_that_lacks_a_shard_or_has_another(tmp_path: Path) -> None:
    shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text(encoding="utf-8"))
    index.write_text(json.dumps({"weight_map": {**document["weight_map"], "c": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(IntegrityError, match="index and files differ in c"):
        state_dict_of(tmp_path)
    index.write_text(json.dumps({"weight_map": {"c": "../one.safetensors"}}))
    with pytest.raises(IntegrityError, match="no weight_map of files beside it"):
        state_dict_of(tmp_path)
    index.write_text(json.dumps(document))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IntegrityError, match="model-00002"):
        state_dict_of(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"neither checkpoints of a run nor model.safetensors"):
        state_dict_of(tmp_path)


def test_a_folder_of_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for file in shards(blobs).iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert set(state_dict_of(snapshot)) == set(TENSORS)
