"""What an observed script's recorder notes of loaders and gradients, and the words of its command."""

import math
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from shoal.programs import hooks, observer, parts
from shoal.programs.command import Script
from shoal.programs.replay import distance


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
    hooks.observe_data(recorder)
    data = list(range(4))
    fixed = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    shards = _Shard(BatchSampler(RandomSampler(data), 2, False))
    for options in ({"batch_sampler": shards}, {"sampler": fixed}, {"sampler": [3, 1]}, {}):
        iter(DataLoader(data, **options))
    names = [one["sampler"] for one in recorder.loaders]
    assert names == ["RandomSampler", *["SequentialSampler"] * 3]


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


class _Cache(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor


def test_tensors_of_a_tuple_with_keys_and_rows_of_sparse_inputs():
    cache = _Cache(torch.ones(2), torch.zeros(2))
    assert [id(one) for one in observer.tensors_of({"cache": cache})] == [id(cache.keys), id(cache.values)]
    assert observer.row_digests(torch.eye(3).to_sparse()) == []
    assert len(observer.row_digests(torch.eye(3))) == 3


def test_a_large_buffer_is_stored_again_when_it_has_changed(tmp_path):
    recorder, model, inputs = observer.ScriptRecorder(str(tmp_path), 3), nn.Linear(2, 1), torch.ones(1, 2)
    model.register_buffer("bank", torch.zeros(1 << 20))
    stored = []
    for step in range(3):
        recorder.step = observer.new_step()
        if step == 2:
            model.bank += 1
        recorder.enter(model, (inputs,))
        recorder.leave(model, (inputs,), {}, model(inputs))
        stored.append("0:bank" in recorder.step["buffers"])
    assert stored == [True, False, True]


@pytest.mark.parametrize(
    ("weights", "count", "weighted"), [([0.5, 0.5, 0.0], 2, False), ([0.5, 0.25, 0.0], 2, True), ([0.0] * 3, 0, False)]
)
def test_a_loss_by_element_counts_what_the_script_weighs(tmp_path, weights, count, weighted):
    recorder, target = observer.ScriptRecorder(str(tmp_path), 1), torch.zeros(3, dtype=torch.int64)
    logits = torch.zeros(3, 2, requires_grad=True)
    losses = nn.functional.cross_entropy(logits, target, reduction="none")
    hooks.weigh(recorder, "cross_entropy", losses, target, {"reduction": "none"})
    (losses * torch.tensor(weights)).sum().backward()
    (about,) = recorder.step["losses"]
    assert (about["count"], about["weighted"], about["gradient"]) == (count, weighted, pytest.approx(sum(weights)))


def test_values_that_are_not_finite_do_not_hide_others():
    one = torch.tensor([math.inf, 1.0])
    assert distance(one, torch.tensor([math.inf, 1.0])) == 0.0
    assert distance(one, torch.tensor([math.inf, 2.0])) == pytest.approx(0.5)
    assert distance(one, torch.ones(2)) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_digest_is_of_values_alone_and_of_all_of_them(dtype):
    values = torch.arange(5000).to(dtype)
    shifted = torch.cat([values[:1], values])[1:]  # elsewhere in memory, at an odd place
    first, *same = observer.digests([values, shifted, shifted.view(50, 100), values.view(50, 100).T.contiguous().T])
    assert same == [first] * 3
    for place in (0, 2500, 4999):
        other = values.clone()
        other[place] = values[place] == 0
        assert observer.digests([other]) != [first]
    zeros = [torch.zeros(size, dtype=dtype) for size in (5000, 4999, 0)]
    assert len({*observer.digests(zeros)}) == 3
    assert observer.digests([]) == []


def test_gradients_that_are_changed_after_the_backward_are_recorded_as_it_left_them(tmp_path):
    recorder, model = observer.ScriptRecorder(str(tmp_path), 3), nn.Linear(2, 1)
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 2)
    recorder.enter(model, (inputs,))
    output = model(inputs)
    recorder.leave(model, (inputs,), {}, output)
    recorder.backward(torch.autograd.backward, output.sum())
    model.weight.grad.data.mul_(3)  # which changes no version
    recorder.before_update(optimizer)
    assert recorder.step["left"].keys() == {"0:weight"}
    assert recorder.step["left"]["0:weight"].tolist() == [[1.0, 1.0]]
    assert recorder.step["gradients"]["0:weight"].tolist() == [[3.0, 3.0]]


def test_a_generator_that_draws_is_named():
    before = observer.random_states()
    assert observer.drawn_since(before) == []
    torch.rand(())
    assert observer.drawn_since(before) == ["torch"]


class DeepSpeedEngine(nn.Module):
    """An engine of ZeRO-1 on one of two ranks, which has one and a half of three parameters."""

    def __init__(self, module):
        super().__init__()
        self.module, flat = module, torch.arange(6.0)
        ends = {"0.weight": (0, 4, 0), "0.bias": (0, 2, 4)}  # place in the parameter, size, place in the flat tensor
        for name, parameter in module.named_parameters():
            start, size, begin = ends.get(name, (None, None, None))
            lp, hp = SimpleNamespace(start=start), SimpleNamespace(start=begin, numel=size)
            mapping = SimpleNamespace(lp_fragment_address=lp, hp_fragment_address=hp)
            parameter._hp_mapping = mapping if name in ends else None
        groups = [list(module.parameters())]
        self.optimizer = SimpleNamespace(bit16_groups=groups, single_partition_of_fp32_groups=[flat])


def test_parts_of_flat_partitions():
    engine = DeepSpeedEngine(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    (flat,) = engine.optimizer.single_partition_of_fp32_groups
    own = {part.key: part for part in parts.parts_of(engine, 0)}
    assert list(own) == ["0:0.weight", "0:0.bias", "0:1.weight", "0:1.bias"]
    assert all(part.owner is flat for part in own.values())
    assert [part.weights().tolist() for part in own.values()] == [[0, 1, 2, 3], [4, 5], [], []]
    assert own["0:0.bias"].gradient() is None
    flat.grad = -flat
    assert own["0:0.bias"].gradient().tolist() == [-4, -5]
    assert own["0:0.weight"].place == {"shape": (2, 2), "offset": (0,), "size": (4,), "summed": []}
