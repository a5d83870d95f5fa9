"""Predictions: rows of all samples in order, in files that numpy and safetensors read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.distributed.mesh import alone
from shoal.errors import CommandError, JobError
from shoal.training.microbatch.predictions import Predictions, of_first_part, read, refuse_file

SIZES = (4, 4, 3)


def chunks(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    whole = torch.arange(33.0).reshape(11, 3).to(dtype)
    return list(whole.split(SIZES))


def written(path: Path, outputs: list[Any]) -> dict[str, Tensor]:
    found = Predictions(alone(torch.device("cpu")), path)
    try:
        for size, output in zip(SIZES, outputs, strict=True):
            found.add(size, output)
        found.write()
    finally:
        found.close()
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"
    return read(path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float16])
def test_rows_come_back_in_order(dtype: torch.dtype, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"found{suffix}"
    found = written(path, chunks(dtype))
    assert torch.equal(found["ids"], torch.arange(11))
    assert torch.equal(found["outputs"].to(dtype), torch.cat(chunks(dtype)))
    theirs = np.load(path)["outputs"] if suffix == ".npz" else load_file(path)["outputs"]
    assert theirs.shape == (11, 3)
    assert found["outputs"].dtype == (torch.float32 if (suffix, dtype) == (".npz", torch.bfloat16) else dtype)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_several_outputs_have_their_names(suffix: str, tmp_path: Path) -> None:
    parts = chunks()
    found = written(tmp_path / f"a{suffix}", [{"class": p.argmax(1), "p": p.numpy()} for p in parts])
    assert set(found) == {"ids", "class", "p"}
    assert torch.equal(found["class"], torch.full((11,), 2))
    both = written(tmp_path / "b" / f"b{suffix}", [(p, p[:, 0]) for p in parts])
    assert both["outputs_1"].shape == (11,)


WRONG: list[tuple[Any, str]] = [
    (torch.zeros(()), r"outputs of shape \[\] for 4 samples"),
    (torch.zeros(3, 2), r"outputs of shape \[3, 2\] for 4 samples"),
    ({"ids": torch.zeros(4)}, "an output named 'ids'"),
    ({"words": ["a"] * 4}, "words of type list"),
    (torch.zeros(4, dtype=torch.complex128), "of type torch.complex128"),
]


@pytest.mark.parametrize(("output", "said"), WRONG)
def test_what_is_no_row_for_each_sample_is_refused(output: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=said):
        written(tmp_path / "a.npz", [output] * 3)
    assert not list(tmp_path.iterdir())


def test_rows_of_other_shapes_are_refused(tmp_path: Path) -> None:
    parts = chunks()
    with pytest.raises(JobError, match=r"float32 \[2\] for some samples, and of float32 \[3\] for others"):
        written(tmp_path / "a.npz", [parts[0], parts[1][:, :2], parts[2]])


def test_a_file_is_new_and_of_a_known_kind(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"a\.npz"):
        refuse_file(tmp_path / "a.csv")
    (tmp_path / "a.npz").touch()
    with pytest.raises(CommandError, match="nothing is overwritten"):
        refuse_file(tmp_path / "a.npz")
    refuse_file(tmp_path / "b.safetensors")


def test_outputs_are_of_the_first_part_of_a_batch() -> None:
    model, inputs = nn.Linear(3, 2), torch.ones(4, 3)
    for batch in (inputs, (inputs, 1), [inputs]):
        assert torch.equal(of_first_part(model, batch), model(inputs))
    with pytest.raises(JobError, match=r"write Job\(predict="):
        of_first_part(model, {"inputs": inputs})
