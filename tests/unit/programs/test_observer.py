"""What an observed script's recorder notes of loaders and gradients, and the words of its command."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from shoal.programs import observer
from shoal.programs.command import Script


class _Shard(BatchSampler):
    """A framework's part of a script's batches, without a sampler of its own."""

    def __init__(self, batches):
        self.batch_sampler = batches

    def __iter__(self):
        return iter(self.batch_sampler)


def test_the_sampler_of_a_loader_is_found_inside_of_a_frameworks_batches(monkeypatch, tmp_path):
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    monkeypatch.setattr(DistributedSampler, "__iter__", DistributedSampler.__iter__)
    recorder = observer.ScriptRecorder(str(tmp_path), 1)
    observer.observe_data(recorder)
    data = list(range(4))
    fixed = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    for options in ({"batch_sampler": _Shard(BatchSampler(RandomSampler(data), 2, False))}, {"sampler": fixed}, {}):
        iter(DataLoader(data, **options))
    names = [one["sampler"] for one in recorder.loaders]
    assert names == ["RandomSampler", "SequentialSampler", "SequentialSampler"]


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_gradient_that_no_optimizer_got_is_noted_when_it_is_set_to_zero(tmp_path, is_stepped):
    recorder, model = observer.ScriptRecorder(str(tmp_path), 3), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(1, 2)
    recorder.enter(model, (inputs,))
    output = model(inputs)
    recorder.leave(model, (inputs,), {}, output)
    output.sum().backward()
    if is_stepped:
        recorder.before_update(optimizer)
    recorder.cleared(model.parameters())
    assert recorder.step["erased"] == ([] if is_stepped else ["0:weight", "0:bias"])


def test_a_command_may_begin_with_an_interpreter():
    assert Script("train.py --lr 1", "torchrun", 8).parts == [sys.executable, "train.py", "--lr", "1"]
    other = Script("/env/bin/python3.11 train.py {batch}", "torchrun", 8)
    assert other.words(2, 4) == ["/env/bin/python3.11", "train.py", "4"]
    assert other.name == "train"
