"""Weights of a checkpoint: into a model whole or not at all, with every difference named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.export import ExportFormat, export
from shoal.checkpoint.pieces import described, index, share
from shoal.checkpoint.store import Snapshot, Store
from shoal.checkpoint.weights import CheckpointWeights, find
from shoal.distributed.mesh import alone
from shoal.errors import JobMismatchError, RunDirectoryError
from shoal.parallel.model.sharded_model import ShardedModel, key_names


class Net(nn.Module):
    """Tied layers, a statistic and a buffer that no state dict has."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(4, width)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("table", torch.randn(5), persistent=False)


def save(model: nn.Module, folder: Path, *, keys: bool = True) -> Path:
    """A checkpoint of the model after step 7."""
    sharded_model = ShardedModel(alone(torch.device("cpu")), model)
    held = {"model": sharded_model.tensors()}
    written = index([described(held)])
    document = {"run": {"step": 7}, "tensors": written} | ({"keys": key_names(sharded_model)} if keys else {})
    Store(folder).write(Snapshot(7, dict(share(held, written, 0, 1)), document))
    return folder


def digest(model: nn.Module) -> str:
    """Of parameters and all buffers."""
    return shoal.weights_sha256({n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]})


def test_every_tensor_once_under_its_keys(tmp_path: Path) -> None:
    """Keys are those of the state dict; a buffer that it does not persist is no key, and is loaded all the same."""
    model = Net()
    save(model, tmp_path)
    weights = shoal.load(tmp_path)
    assert set(weights) == set(model.state_dict())
    assert weights["norm.num_batches_tracked"].shape == ()
    assert digest(shoal.load(tmp_path, Net())) == digest(model)


def test_values_take_the_models_dtype(tmp_path: Path) -> None:
    model = Net()
    save(model, tmp_path)
    found = shoal.load(tmp_path, Net().double())
    assert found.first.weight.dtype == torch.float64
    assert torch.equal(found.first.weight, model.first.weight.double())


def test_each_difference_is_named_and_nothing_loaded(tmp_path: Path) -> None:
    save(Net(), tmp_path)
    target = nn.Module()
    target.first, target.norm, target.other = nn.Linear(4, 5), nn.BatchNorm1d(3), nn.Linear(2, 2)
    before = digest(target)
    with pytest.raises(JobMismatchError) as caught:
        shoal.load(tmp_path, target)
    for line in (
        "first.weight: [3, 4] in the checkpoint, [5, 4] in the model",
        "first.bias: [3] in the checkpoint, [5] in the model",
        "missing in the checkpoint: other.weight [2, 2]",
        "unexpected, not in the model: last.bias [3]",
        "5 tensors differ; nothing was loaded",
    ):
        assert line in str(caught.value)
    assert digest(target) == before


def test_what_both_have_is_loaded_where_that_is_asked_for(tmp_path: Path) -> None:
    model, target = Net(), nn.Module()
    save(model, tmp_path)
    target.norm, target.other = nn.BatchNorm1d(3), nn.Linear(2, 2)
    target.norm.weight.data.fill_(9.0)
    shoal.load(tmp_path, target, strict=False)
    assert torch.equal(target.norm.weight, model.norm.weight)


def test_models_without_memory_of_their_own_are_refused(tmp_path: Path) -> None:
    save(Net(), tmp_path)
    with torch.device("meta"):
        target = Net()
    with pytest.raises(JobMismatchError, match="on the meta device"):
        shoal.load(tmp_path, target)


def test_tied_in_the_model_alone_is_refused(tmp_path: Path) -> None:
    model, target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(model, tmp_path)
    target[1].weight = target[0].weight
    with pytest.raises(JobMismatchError, match=r"0.weight, 1.weight: one tensor in the model, several"):
        shoal.load(tmp_path, target)


def test_of_an_earlier_version(tmp_path: Path) -> None:
    """Without the keys of a state dict each tensor has one name."""
    model = Net()
    save(model, tmp_path, keys=False)
    assert set(shoal.load(tmp_path)) == {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert digest(shoal.load(tmp_path, Net())) == digest(model)


@pytest.mark.parametrize(
    ("step", "words"),
    [(8, "there are checkpoints of the steps 7"), ("best", "no checkpoint is kept as the best"), ("first", "no such")],
)
def test_a_step_that_is_not_there(tmp_path: Path, step: int, words: str) -> None:
    save(Net(), tmp_path)
    with pytest.raises(RunDirectoryError, match=words):
        shoal.load(tmp_path, step=step)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (tmp_path / "cifar-2").mkdir()
    with pytest.raises(RunDirectoryError, match=r"there is no such folder(?s:.*)did you mean 'cifar-2'\?"):
        shoal.load(tmp_path / "cifra-2")
    with pytest.raises(RunDirectoryError, match="no checkpoint is there"):
        shoal.load(tmp_path / "cifar-2")
    save(Net(), tmp_path)
    with pytest.raises(RunDirectoryError, match="that is the checkpoint of step 7"):
        shoal.load(tmp_path / "step-00000007", step=8)


def test_quantized_weights_are_no_export(tmp_path: Path) -> None:
    """Their packed values and scales are shoal's own."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    model[0].weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.uint8), requires_grad=False)
    model[0].absmax = nn.Parameter(torch.zeros(3, 1, dtype=torch.int32), requires_grad=False)
    weights = CheckpointWeights(find(save(model, tmp_path / "run")))
    with pytest.raises(RunDirectoryError, match="quantized"):
        export(weights, tmp_path / "out", ExportFormat(1 << 30))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
