"""Initial weights of a run in one process; divided models are in tests/ranks/test_initial_weights.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal.checkpoint.initial import TakenWeights, take_weights
from shoal.distributed.mesh import alone
from shoal.errors import JobMismatchError
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.runs.initial_weights import DIFFERENCES, InitialWeights, NameRules


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def taken(into: nn.Module, path: Path, *allow: str) -> TakenWeights:
    return take_weights(InitialWeights(path, NameRules(allow)), ShardedModel(alone(torch.device("cpu")), into))


def test_all_of_a_model_with_its_buffers(tmp_path: Path) -> None:
    source, into = model(), model()
    source[1].running_mean.fill_(3.0)
    save_file(source.state_dict(), tmp_path / "one.safetensors")
    found = taken(into, tmp_path / "one.safetensors")
    assert shoal.weights_sha256(into.state_dict()) == shoal.weights_sha256(source.state_dict()) == found.sha256
    assert found.num_taken == len(source.state_dict())
    assert "initial weights: 9 tensors of " in found.lines()[0]
    assert "converted" not in found.lines()[0]


def test_a_new_head(tmp_path: Path) -> None:
    """What is not taken stays as it was and is named, in words and in JSON; conversions are counted."""
    tensors = {
        key: value.bfloat16() if value.is_floating_point() else value for key, value in model().state_dict().items()
    }
    tensors["2.weight"], tensors["extra"] = torch.ones(7, 4), torch.ones(1)
    del tensors["2.bias"]
    save_file(tensors, tmp_path / "one.safetensors")
    into = model()
    before = into[2].weight.detach().clone()
    found = taken(into, tmp_path / "one.safetensors", *DIFFERENCES)
    assert torch.equal(into[2].weight, before)
    assert torch.equal(into[0].weight, tensors["0.weight"].float())
    said = "\n".join(found.lines())
    for line in (
        "6 converted from bfloat16 to float32",
        "as the job's model() makes it, missing there: 2.bias [2]",
        "as the job's model() makes it, another shape there: 2.weight: [7, 4] in the file, [2, 4] in the model",
        "not used, unexpected: extra [1]",
    ):
        assert line in said
    assert found.to_json()["missing"] == ["2.bias [2]"]


def test_nothing_is_taken_of_another_model(tmp_path: Path) -> None:
    """Not even where every difference is allowed: such a run would begin as without the option."""
    save_file({"a.b": torch.ones(3)}, tmp_path / "one.safetensors")
    into = model()
    before = shoal.weights_sha256(into.state_dict())
    with pytest.raises(JobMismatchError, match=r"missing in the file: 0\.bias"):
        taken(into, tmp_path / "one.safetensors")
    with pytest.raises(JobMismatchError, match="not one tensor"):
        taken(into, tmp_path / "one.safetensors", *DIFFERENCES)
    assert shoal.weights_sha256(into.state_dict()) == before
