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
from shoal.runs.options import DIFFERENCES, InitialWeights, NameRules


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


class Adapted(nn.Module):
    """Modules named as a peft model with LoRA and a head that is trained whole names them."""

    def __init__(self, adapter: str = "default") -> None:
        super().__init__()
        self.base_layer = nn.Linear(3, 4)
        self.lora_A = nn.ModuleDict({adapter: nn.Linear(3, 2, bias=False)})
        self.lora_B = nn.ModuleDict({adapter: nn.Linear(2, 4, bias=False)})
        self.score = nn.ModuleDict(
            {"original_module": nn.Linear(4, 1), "modules_to_save": nn.ModuleDict({adapter: nn.Linear(4, 1)})}
        )


ADAPTER = {
    "lora_A.weight": torch.full((2, 3), 1.0),
    "lora_B.weight": torch.full((4, 2), 2.0),
    "score.weight": torch.full((1, 4), 3.0),
    "score.bias": torch.full((1,), 4.0),
}


def test_an_adapter_of_peft_goes_into_the_models_own(tmp_path: Path) -> None:
    save_file(ADAPTER, tmp_path / "adapter_model.safetensors")
    into = Adapted()
    before = {name: value.clone() for name, value in into.state_dict().items()}
    found = taken(into, tmp_path)
    assert found.num_taken == 4
    assert found.lines() == [found.lines()[0]], "the base is not missed"
    after = into.state_dict()
    assert torch.equal(after["lora_A.default.weight"], ADAPTER["lora_A.weight"])
    assert torch.equal(after["score.modules_to_save.default.weight"], ADAPTER["score.weight"])
    for name in ("base_layer.weight", "score.original_module.weight"):
        assert torch.equal(after[name], before[name])


def test_an_adapter_of_other_modules_is_refused(tmp_path: Path) -> None:
    save_file(
        {key: value for key, value in ADAPTER.items() if "lora_B" not in key}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(JobMismatchError, match=r"missing in the file: lora_B\.default\.weight"):
        taken(Adapted(), tmp_path)
    save_file(ADAPTER, tmp_path / "adapter_model.safetensors")
    with pytest.raises(JobMismatchError, match=r"unexpected, not in the model: lora_A\.weight"):
        taken(nn.Linear(3, 4), tmp_path)
