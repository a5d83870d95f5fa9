"""Names of a model beside those of a source: what is taken, what differs, and what rules allow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shoal
from shoal.checkpoint.matching import Matches, match, named_tensors, value_of
from shoal.checkpoint.state_dicts import state_dict_of
from shoal.errors import CommandError, JobMismatchError
from shoal.runs.options import DIFFERENCES, NameRules


class Tied(nn.Module):
    """One weight under two names, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.ones(2), persistent=False)


def matched(tensors: dict[str, Tensor], folder: Path, model: nn.Module, **rules: tuple[str, ...]) -> Matches:
    save_file(tensors, folder / "one.safetensors")
    return match(named_tensors(model), state_dict_of(folder / "one.safetensors"), NameRules(**rules))  # type: ignore[arg-type]


def test_each_kind_of_difference(tmp_path: Path) -> None:
    tensors = {"embedding.weight": torch.ones(4, 3), "head.bias": torch.ones(5), "other": torch.ones(1)}
    found = matched(tensors, tmp_path, nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4)}))
    assert [one.names for one, _ in found.pairs] == [("embedding.weight",)]
    assert found.missing == ["head.weight [4, 3]"]
    assert found.unexpected == ["other [1]"]
    assert found.mismatched == ["head.bias: [5] in the file, [4] in the model"]


def test_rules_allow_one_kind_at_a_time(tmp_path: Path) -> None:
    tensors = {"embedding.weight": torch.ones(4, 3), "head.bias": torch.ones(5), "other": torch.ones(1)}
    found = matched(tensors, tmp_path, nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4)}))
    weights = state_dict_of(tmp_path / "one.safetensors")
    for kind in DIFFERENCES:
        others = tuple(other for other in DIFFERENCES if other != kind)
        told: list[str] = []
        with pytest.raises(JobMismatchError, match="1 tensors differ"):
            found.refuse(weights, NameRules(others), lambda kinds, told=told: told.extend(kinds) or "")  # type: ignore[misc]
        assert told == [kind]
    found.refuse(weights, NameRules(DIFFERENCES), lambda kinds: "")


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tie_under_any_of_its_names(name: str, tmp_path: Path) -> None:
    """As safetensors has it, once; the buffer that no state dict has is not missed."""
    found = matched({name: torch.ones(4, 3), "head.bias": torch.ones(4)}, tmp_path, Tied())
    assert (found.missing, found.unexpected, found.mismatched) == ([], [], [])
    assert len(found.pairs) == 2


def test_a_tie_that_the_source_does_not_have(tmp_path: Path) -> None:
    """Equal values are one; others are refused, as one of them would be lost."""
    tensors = {"embedding.weight": torch.ones(4, 3), "head.weight": torch.ones(4, 3), "head.bias": torch.ones(4)}
    found = matched(tensors, tmp_path, Tied())
    weights = state_dict_of(tmp_path / "one.safetensors")
    assert torch.equal(value_of(weights, found.pairs[0][1]), torch.ones(4, 3))
    tensors["head.weight"] = torch.zeros(4, 3)
    found = matched(tensors, tmp_path, Tied())
    with pytest.raises(JobMismatchError, match="one tensor in the model, several in"):
        value_of(state_dict_of(tmp_path / "one.safetensors"), found.pairs[0][1])


def test_renamed(tmp_path: Path) -> None:
    tensors = {"net.weight": torch.ones(4, 3), "net.bias": torch.ones(4)}
    assert len(matched(tensors, tmp_path, nn.Linear(3, 4), rename=(("net", ""),)).pairs) == 2  # type: ignore[arg-type]
    filled = shoal.load(tmp_path / "one.safetensors", nn.Sequential(nn.Linear(3, 4)), rename={"net": "0"})
    assert torch.equal(filled[0].weight, torch.ones(4, 3))


@pytest.mark.parametrize(
    ("rename", "said"),
    [((("gone", "new"),), "no name there begins so"), ((("a", "b"),), "makes b.weight of both")],
)
def test_renamings_that_cannot_be(rename: tuple[tuple[str, str], ...], said: str, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 3), "b.weight": torch.ones(4, 3)}
    with pytest.raises(CommandError, match=said):
        matched(tensors, tmp_path, nn.Linear(3, 4), rename=rename)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["module", "_orig_mod", "model0", "module._orig_mod"])
@pytest.mark.parametrize("there", [True, False])
def test_a_prefix_that_a_wrapper_leaves_is_told(there: bool, prefix: str, tmp_path: Path) -> None:
    """Of the file's names or of the model's; and what is told to write loads it."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    tensors = {f"{prefix}.{key}" if there else key: value for key, value in model.state_dict().items()}
    into: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for part in () if there else reversed(prefix.split(".")):
        into = nn.ModuleDict({part: into})
    save_file(tensors, tmp_path / "one.safetensors")
    old, new = (prefix, "") if there else ("", prefix)
    with pytest.raises(JobMismatchError) as caught:
        shoal.load(tmp_path / "one.safetensors", into)
    assert f'write --init-rename {old}={new}, or rename={{"{old}": "{new}"}}' in caught.value.remedy
    shoal.load(tmp_path / "one.safetensors", into, rename={old: new})
    assert shoal.weights_sha256(into.state_dict()) == shoal.weights_sha256(model.state_dict())


def test_no_prefix_is_told_where_that_is_not_the_difference(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    save_file({"a.weight": torch.ones(1), "x.1.bias": torch.ones(1)}, tmp_path / "one.safetensors")
    with pytest.raises(JobMismatchError) as caught:
        shoal.load(tmp_path / "one.safetensors", model)
    assert "init-rename" not in caught.value.remedy
